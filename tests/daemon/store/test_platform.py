"""Opening shards: the effective read mode, fallbacks, and files that change underneath."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from expertd.store.header import Identity
from expertd.store.platform import (
    DIRECT_ALIGN_BYTES,
    READ_MAX_BYTES,
    ReadMode,
    Source,
    file_system_name,
    macos_bypass_cache,
    open_source,
)
from expertd_protocol.errors import ModelChanged, ModelNotFound, ReadFailed, UnreadableFile
from tests.safetensors_files import pattern


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pattern(20_000))
    return file


def no_direct(fd: int, views: Sequence[Any], offset: int) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_buffered_reads_are_read_only_unmapped_and_closed(path: Path) -> None:
    source = open_source(path, Identity.of(path), "buffered")

    assert (source.mode, source.align) == (ReadMode.BUFFERED, 1)
    assert source.device == path.stat().st_dev
    assert fcntl.fcntl(source.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(source.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    into = bytearray(7)
    assert source.preadv([memoryview(into)], 13) == 7
    assert bytes(into) == pattern(20_000)[13:20]
    assert (source.reads, source.read_bytes, source.errors) == (1, 7, 0)
    source.close()
    source.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(source.fd)


def test_auto_reports_the_mode_that_really_works(path: Path) -> None:
    """E04: what stats say of a file is how it is read."""
    source = open_source(path, Identity.of(path))
    try:
        if source.mode is ReadMode.BUFFERED:  # this file system cannot
            assert source.align == 1
        else:
            assert source.align == DIRECT_ALIGN_BYTES
            with mmap.mmap(-1, 8192) as page, memoryview(page) as view:
                assert source.preadv([view], 4096) == 8192
                assert bytes(view) == pattern(20_000)[4096 : 4096 + 8192]
            if sys.platform == "linux":
                assert fcntl.fcntl(source.fd, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        source.close()


def test_a_file_system_whose_reads_refuse_o_direct_falls_back_and_says_so_once_E03(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(path, Identity.of(path), preadv=no_direct)

    assert source.mode is ReadMode.BUFFERED
    into = bytearray(3)
    assert source.preadv([memoryview(into)], 1) == 3  # unaligned: only without O_DIRECT
    source.fall_back("again")
    assert [r.getMessage().split()[0] for r in caplog.records] == ["read_mode_fallback"]
    assert str(path) in caplog.records[0].getMessage()
    source.close()


def test_a_wish_for_direct_reads_is_refused_where_they_are_impossible_E03(path: Path) -> None:
    before = os.open("/dev/null", os.O_RDONLY)
    os.close(before)
    with pytest.raises(UnreadableFile, match=r"EINVAL.*use read mode auto"):
        open_source(path, Identity.of(path), "direct", preadv=no_direct)
    after = os.open("/dev/null", os.O_RDONLY)
    os.close(after)
    assert before == after  # nothing stays open


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")
def test_a_file_system_in_memory_is_read_buffered_although_o_direct_opens_E03() -> None:
    path = Path("/dev/shm") / f"expertd-test-{os.getpid()}.safetensors"
    path.write_bytes(pattern(5000))
    try:
        if file_system_name(path.stat().st_dev) != "tmpfs":
            pytest.skip("/dev/shm is no tmpfs here")
        source = open_source(path, Identity.of(path))
        assert source.mode is ReadMode.BUFFERED
        source.close()
        with pytest.raises(UnreadableFile, match="tmpfs lives in memory"):
            open_source(path, Identity.of(path), "direct")
    finally:
        path.unlink()


def test_a_later_fallback_switches_the_same_descriptor_E03(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(path, Identity.of(path))
    source.mode = ReadMode.DIRECT  # whatever works here

    source.fall_back("a read answered EINVAL")
    source.fall_back("a read answered EINVAL")

    into = bytearray(5)
    assert source.preadv([memoryview(into)], 1) == 5
    assert source.align == 1
    assert sum("answered EINVAL" in r.getMessage() for r in caplog.records) == 1
    source.close()


def test_one_read_is_never_above_64_MiB_E01(path: Path) -> None:
    source = open_source(path, Identity.of(path), "buffered")
    with mmap.mmap(-1, READ_MAX_BYTES) as pages, memoryview(pages) as view:
        with pytest.raises(ValueError, match="67108865 bytes"):
            source.preadv([view, memoryview(bytearray(1))], 0)
        assert source.preadv([view], 0) == 20_000
    source.close()


# --- files that change ---------------------------------------------------------------------------
def test_an_untouched_file_passes_every_check_E09(path: Path) -> None:
    source = open_source(path, Identity.of(path))
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # reading it changes the access time only
    source.check_identity()
    source.close()


def test_every_kind_of_change_is_noticed_E09(tmp_path: Path) -> None:
    def rewrite(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"other bytes")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # clocks may be coarse

    def replace(path: Path) -> None:
        other = path.with_suffix(".new")
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(0, path.stat().st_mtime_ns))
        other.rename(path)

    def truncate(path: Path) -> None:
        os.truncate(path, 10)

    def append(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    for change, words in (
        (rewrite, "rewritten in place"),
        (replace, "replaced by another file"),
        (truncate, "rewritten in place.*20000 bytes, now 10"),
        (append, "rewritten in place.*20000 bytes, now 20001"),
        (Path.unlink, "deleted or moved away"),
        (lambda p: p.rename(p.with_suffix(".old")), "deleted or moved away"),
    ):
        path = tmp_path / "model.safetensors"
        path.write_bytes(pattern(20_000))
        source = open_source(path, Identity.of(path))
        change(path)
        with pytest.raises(ModelChanged, match=words) as caught:
            source.check_identity()
        assert str(path) in caught.value.message
        source.close()


def test_a_file_that_changed_since_its_header_was_read_is_not_opened_E09(path: Path) -> None:
    identity = Identity.of(path)
    path.write_bytes(b"short")

    with pytest.raises(ModelChanged, match="changed after its header was read"):
        open_source(path, identity)
    path.unlink()
    with pytest.raises(ModelNotFound):
        open_source(path, identity)


def test_reopen_keeps_the_number_and_opens_once_for_all_threads_E15(path: Path) -> None:
    source = open_source(path, Identity.of(path))
    number, mode = source.fd, source.mode
    broken = os.open("/dev/null", os.O_RDONLY)
    os.dup2(broken, source.fd)  # as if the device had gone
    os.close(broken)

    source.reopen(1)
    source.reopen(1)  # another thread that saw the same failure

    assert (source.fd, source.opened, source.mode) == (number, 2, mode)
    source.check_identity()
    assert not os.get_inheritable(source.fd)
    source.close()


def test_reopen_refuses_another_file_E15(path: Path) -> None:
    source = open_source(path, Identity.of(path))
    path.unlink()
    path.write_bytes(pattern(20_000, seed=1))

    with pytest.raises(ModelChanged, match="another file"):
        source.reopen(1)
    source.close()


def test_a_source_that_is_read_is_closed_when_the_read_ends(path: Path) -> None:
    source = open_source(path, Identity.of(path))
    with source.in_use():
        source.close()
        os.fstat(source.fd)  # still open: its number cannot become another file's
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(source.fd)
    with pytest.raises(ReadFailed, match="closed before it was read"), source.in_use():
        pass


# --- platforms -----------------------------------------------------------------------------------
def test_macos_switches_caching_and_read_ahead_off_and_on() -> None:
    calls: list[tuple[int, int, int]] = []

    macos_bypass_cache(7, True, lambda *call: calls.append(call))
    macos_bypass_cache(7, False, lambda *call: calls.append(call))

    assert calls == [(7, 48, 1), (7, 45, 0), (7, 48, 0), (7, 45, 1)]


def test_nocache_reads_keep_the_alignment_of_direct_ones(path: Path) -> None:
    source = Source(os.open(path, os.O_RDONLY), path, Identity.of(path), ReadMode.NOCACHE)
    assert source.align == DIRECT_ALIGN_BYTES
    assert "nocache" in repr(source)
    source.close()


def test_the_file_system_is_found_by_device(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "36 22 0:31 / /dev/shm rw - tmpfs tmpfs rw\n"
    )
    assert file_system_name(os.makedev(254, 0), mounts) == "ext4"
    assert file_system_name(os.makedev(0, 31), mounts) == "tmpfs"
    assert file_system_name(os.makedev(9, 9), mounts) == ""
    assert file_system_name(os.makedev(9, 9), tmp_path / "none") == ""


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "expertd.store.platform")
