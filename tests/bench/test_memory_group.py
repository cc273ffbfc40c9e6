"""bench/memory_group.py: a group holds its members to the limit and is gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench import memory_group

#: Reads a file through the page cache when told to.
READER = "import sys; sys.stdin.readline(); print(len(open(sys.argv[1], 'rb').read(1 << 25)))"


def test_a_member_reads_within_the_limit_and_the_group_is_removed(tmp_path: Path) -> None:
    if reason := memory_group.why_not():
        pytest.skip(reason)
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 22))
    with memory_group.memory_group("test", 1 << 40) as group:
        process = subprocess.Popen(
            [sys.executable, "-c", READER, str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            group.add(process.pid)
            group.set_limit(64 << 20)
            said, _ = process.communicate("go\n", timeout=30)
        finally:
            process.kill()
            process.wait(10)
        assert int(said) == 1 << 22
        peak = group.peak_bytes()
        assert peak is None or peak <= 64 << 20
        folder = group.folder
        assert folder.exists()
    assert not folder.exists()


def test_a_system_without_groups_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_group, "MOUNT", tmp_path)
    assert memory_group.why_not() == "this system has no memory control groups"
