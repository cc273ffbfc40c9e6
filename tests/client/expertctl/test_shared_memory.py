"""What the kernel says of a process's shared memory."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from expertctl.shared_memory import SharedMemoryPeak, shared_bytes

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")


def test_the_figure_is_read_in_units_of_1024_bytes(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("VmRSS:\t  900 kB\nRssShmem:\t   48 kB\nThreads:\t1\n")

    assert shared_bytes(7, tmp_path) == 48 * 1024


def test_a_system_or_process_without_the_figure_has_none(tmp_path: Path) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "status").write_text("VmRSS:\t  900 kB\n")

    assert shared_bytes(8, tmp_path) is None
    assert shared_bytes(9, tmp_path) is None


@linux_only
def test_the_peak_sees_memory_that_is_gone_again() -> None:
    size = 8 << 20
    fd = os.memfd_create("peak")
    os.ftruncate(fd, size)
    with SharedMemoryPeak(os.getpid(), period_seconds=0.001) as peak:
        with mmap.mmap(fd, size) as view:
            view.write(b"x" * size)
            seen = peak.samples
            while peak.samples < seen + 2:
                pass
        before = shared_bytes(os.getpid())
    os.close(fd)

    assert before is not None
    assert peak.peak_bytes is not None
    assert peak.peak_bytes >= before + size


def test_a_process_that_is_gone_ends_the_sampling() -> None:
    with SharedMemoryPeak(2**22 + 1) as peak:
        pass

    assert (peak.peak_bytes, peak.samples) == (None, 0)
