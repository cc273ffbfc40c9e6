"""What the start of the daemon does to its process, and what it must never do."""

from __future__ import annotations

import ast
import asyncio
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import expertd
import expertd_protocol
from expertd import app
from expertd.app import (
    NOFILE_WANTED,
    connections_that_fit,
    raise_descriptor_limit,
    watch_lifeline,
)
from expertd_protocol.errors import BadConfig
from tests.daemon.conftest import Run


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_end_of_the_lifeline_stops_the_daemon(run: Run) -> None:
    async def main() -> None:
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        stop = asyncio.Event()
        watch_lifeline(asyncio.get_running_loop(), read_end, stop)
        assert not os.get_inheritable(read_end)

        os.write(write_end, b"still here")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stop.is_set()

        os.close(write_end)
        await asyncio.wait_for(stop.wait(), 5)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read_end)

    run(main())


def test_the_lifeline_ends_when_its_owner_is_killed(run: Run) -> None:
    async def main() -> None:
        read_end, write_end = os.pipe()
        stop = asyncio.Event()
        watch_lifeline(asyncio.get_running_loop(), read_end, stop)
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[write_end],
        ) as owner:  # fmt: skip
            os.close(write_end)
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"\n"
            assert not stop.is_set()
            owner.kill()
            await asyncio.wait_for(stop.wait(), 5)

    run(main())


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (256, 4096, (4096, 4096)),  # launchd's default
        (256, 100_000, (NOFILE_WANTED, 100_000)),
        (256, resource.RLIM_INFINITY, (NOFILE_WANTED, resource.RLIM_INFINITY)),
        (1024, 1024, None),
        (70_000, 100_000, None),  # never lowered
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(app.sys, "platform", "linux")
    monkeypatch.setattr(app.resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(app.resource, "setrlimit", lambda what, limits: calls.append(limits))

    raise_descriptor_limit()

    assert calls == ([] if expected is None else [expected])


def test_the_limit_of_open_files_is_really_raised() -> None:
    code = (
        "import resource\n"
        "from expertd.app import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))\n"
        "raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )

    assert _python(code).split() == ["2048", "2048"]


def test_a_limit_that_cannot_be_raised_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(app.resource, "getrlimit", lambda what: (256, 4096))
    monkeypatch.setattr(app.resource, "setrlimit", refuse)

    raise_descriptor_limit()


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(65_536, 128), (640, 128), (639, 127), (132, 1), (resource.RLIM_INFINITY, 128)],
)
def test_no_more_connections_are_allowed_than_there_are_descriptors_for(
    soft: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.resource, "getrlimit", lambda what: (soft, soft))

    assert connections_that_fit(128) == expected


def test_too_few_descriptors_for_one_connection_are_a_wrong_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app.resource, "getrlimit", lambda what: (64, 64))

    with pytest.raises(BadConfig, match="the limit of open files is 64, expertd needs 640"):
        connections_that_fit(128)


def test_the_daemon_never_imports_mlx_or_what_lowers_its_limits_D25() -> None:
    code = (
        "import resource, sys\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import pkgutil, importlib, expertd\n"
        "for m in pkgutil.walk_packages(expertd.__path__, 'expertd.'):\n"
        "    importlib.import_module(m.name)\n"
        "assert 'expertd.app' in sys.modules and 'expertd.store.reader' in sys.modules\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))\n"
    )

    loaded = set(_python(code).split())

    assert loaded & {"mlx", "mlx_lm", "transformers", "torch", "huggingface_hub"} == set()


def test_importing_the_daemon_starts_nothing_D10() -> None:
    code = (
        "import asyncio, os, threading\n"
        "policy = type(asyncio.get_event_loop_policy())\n"
        "fds = len(os.listdir('/dev/fd'))\n"
        "import expertd.app\n"
        "assert type(asyncio.get_event_loop_policy()) is policy\n"
        "print(threading.active_count(), len(os.listdir('/dev/fd')) - fds)\n"
    )

    assert _python(code).split() == ["1", "0"]


def test_the_version_of_the_daemon_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert expertd.__version__ == expertd_protocol.__version__ == project["version"]


def test_the_daemon_never_forks_D13() -> None:
    """A child of a process with a running loop would share its epoll."""
    forks = {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"}
    found = []
    for path in Path(expertd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(n.split(".")[0] in ("subprocess", "multiprocessing", "pty") for n in names):
                found.append((path.name, names))
            if isinstance(node, ast.Attribute) and node.attr in forks:
                found.append((path.name, [node.attr]))

    assert found == []
