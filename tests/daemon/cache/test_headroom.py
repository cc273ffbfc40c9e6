"""What the system has left, in the machine and in control groups of both versions."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from expertd.cache import shm
from expertd.cache.headroom import headroom
from expertd_protocol.errors import OutOfMemory

MIB = 1 << 20


def group(folder: Path, version: int, limit: str, usage: int, page_cache: int) -> None:
    folder.mkdir(parents=True)
    v1 = version == 1
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{usage}\n")
    total = "total_" if v1 else ""
    (folder / "memory.stat").write_text(
        f"shmem {usage}\n{total}inactive_file {page_cache}\n{total}active_file 0\n"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_it_and_its_page_cache_does_not_count(
    version: int, tmp_path: Path
) -> None:
    root = tmp_path / "memory" if version == 1 else tmp_path
    group(root / "a" / "b", version, str(10 * MIB), 7 * MIB, 2 * MIB)
    (tmp_path / "proc").write_text("5:cpu:/x\n4:memory:/a/b\n" if version == 1 else "0::/a/b\n")

    assert headroom(tmp_path / "proc", tmp_path) == 5 * MIB


def test_the_tightest_of_the_groups_around_us_counts(tmp_path: Path) -> None:
    group(tmp_path / "a", 2, str(3 * MIB), 2 * MIB, 0)
    group(tmp_path / "a" / "b", 2, "max", 2 * MIB, 0)
    (tmp_path / "proc").write_text("0::/a/b\n")

    assert headroom(tmp_path / "proc", tmp_path) == 1 * MIB


def test_a_full_group_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path / "a", 2, str(3 * MIB), 4 * MIB, 0)
    (tmp_path / "proc").write_text("0::/a\n")

    assert headroom(tmp_path / "proc", tmp_path) == 0


@pytest.mark.parametrize("text", ["", "0::/not/there\n", "4:memory:/not/there\n"])
def test_without_a_group_it_is_what_the_machine_has(text: str, tmp_path: Path) -> None:
    (tmp_path / "proc").write_text(text)

    left = headroom(tmp_path / "proc", tmp_path)

    assert 0 < left <= psutil.virtual_memory().total


def test_it_needs_no_proc(tmp_path: Path) -> None:
    assert headroom(tmp_path / "missing", tmp_path) > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS swaps and compresses instead")
def test_memory_that_the_system_does_not_have_is_refused_and_not_died_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "headroom", lambda: MIB)

    with pytest.raises(OutOfMemory, match="2,097,152 bytes of shared memory left"):
        shm.create(2 * MIB)
    shm.create(MIB).close()
