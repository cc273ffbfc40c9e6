"""Where the daemon is found, and paths that the kernel could not take."""

import os
import socket
from pathlib import Path

import pytest

from expertd_protocol.endpoints import (
    RUN_DIR_ENV,
    SOCKET_PATH_MAX_BYTES,
    Endpoints,
    default_run_dir,
)
from expertd_protocol.errors import PathTooLong

_LONGEST_NAME = len("/router.sock")


def _run_dir_of_bytes(n: int) -> Path:
    return Path("/" + "d" * (n - 1))


def test_the_longest_socket_path_has_103_bytes() -> None:
    assert SOCKET_PATH_MAX_BYTES == 103
    endpoints = Endpoints(_run_dir_of_bytes(103 - _LONGEST_NAME))

    assert len(os.fsencode(endpoints.router)) == 103


def test_one_byte_more_is_refused_with_the_path_the_number_and_a_way_out() -> None:
    run_dir = _run_dir_of_bytes(104 - _LONGEST_NAME)

    with pytest.raises(PathTooLong) as caught:
        Endpoints(run_dir)

    assert str(run_dir) in caught.value.message
    assert "is 104 bytes, the system allows 103" in caught.value.message
    assert "--run-dir" in caught.value.message


def test_bytes_are_counted_not_characters() -> None:
    emoji = Path("/" + "🦊" * 23)  # 24 characters, 93 bytes
    assert len(str(emoji)) + _LONGEST_NAME < 103

    with pytest.raises(PathTooLong, match="is 105 bytes"):
        Endpoints(emoji)


def test_the_limit_is_one_that_this_system_can_bind(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.getbasetemp().parent
    fill = 103 - _LONGEST_NAME - len(os.fsencode(base)) - 1
    run_dir = base / ("d" * fill)
    run_dir.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(Endpoints(run_dir).router))
            os.unlink(Endpoints(run_dir).router)
    finally:
        run_dir.rmdir()


def test_all_files_of_a_daemon_live_in_its_run_directory() -> None:
    endpoints = Endpoints(Path("/run/x"))

    assert {endpoints.attach.parent, endpoints.router.parent, endpoints.lock.parent} == {
        Path("/run/x")
    }
    assert len({endpoints.attach, endpoints.router, endpoints.lock}) == 3
    assert endpoints.router_url == "ipc:///run/x/router.sock"


def test_the_environment_chooses_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv(RUN_DIR_ENV, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert default_run_dir() == Path("/run/user/7/expertd")

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir() == Path("/home/a/.expertd/run")

    monkeypatch.setenv(RUN_DIR_ENV, "~/elsewhere")
    assert default_run_dir() == Path("/home/a/elsewhere")


def test_macos_has_no_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv(RUN_DIR_ENV, raising=False)
    monkeypatch.setattr("sys.platform", "darwin")

    assert default_run_dir() == Path("/Users/a/.expertd/run")
