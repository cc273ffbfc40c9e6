"""Rule 7: the fence that the product calls orders a store before a later load, on this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from expertd_protocol.fence import fence

ROUNDS = 20_000  # at once; a Xeon without a fence shows it in 2 to 20 % of them
MOST_TRIES = 20

Litmus = Callable[[bool], int]


@pytest.fixture(scope="module")
def both_missed(tmp_path_factory: pytest.TempPathFactory) -> Litmus:
    """Run so many rounds, with the fence or without; how often both sides missed the other's store."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler: there is no `cc` in PATH")
    if n_processors() < 2:
        pytest.skip("one processor cannot race with itself")
    library = tmp_path_factory.mktemp("litmus") / "litmus.so"
    source = Path(__file__).with_name("litmus.c")
    flags = ["-std=c11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([cc, *flags, "-o", str(library), str(source)], check=True, timeout=60)
    run = ctypes.CDLL(str(library)).both_missed
    run.restype = ctypes.c_long
    run.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    # The very symbol that expertd_protocol.fence calls; on Linux it is bound to its argument.
    symbol = fence.func if isinstance(fence, partial) else fence
    address = ctypes.cast(symbol, ctypes.c_void_p)  # type: ignore[arg-type]

    def litmus(fenced: bool) -> int:
        seen = [ctypes.create_string_buffer(ROUNDS) for _ in range(2)]
        missed = int(run(ROUNDS, address if fenced else None, *seen))
        assert missed >= 0, "no thread could be started"
        return missed

    return litmus


def n_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def test_two_sides_that_store_fence_and_load_never_both_miss(both_missed: Litmus) -> None:
    assert [both_missed(True) for _ in range(2)] == [0, 0]


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64", "arm64", "aarch64"),
    reason="whether this processor delays a store past a load is not known",
)
def test_without_the_fence_both_miss(both_missed: Litmus) -> None:
    """The control: else the test above says nothing about the fence."""
    assert any(both_missed(False) for _ in range(MOST_TRIES))
