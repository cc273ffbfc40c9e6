"""The full memory fence (store-load) that the pin protocol stands on.

x86 and arm64 both may delay a store past a later load of the same core; without a full fence on both
sides a worker and the daemon can each miss what the other just wrote (pin rules 1 and 4).
Acquire/release operations, and so Python's own locks, do not give this ordering on arm64.
Measured on Linux x86-64: 0.2 us a call. `PyDLL` keeps the GIL: releasing it would cost more than the fence.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from functools import partial

_SEQ_CST = 5  # memory_order_seq_cst of <stdatomic.h>


def _load() -> Callable[[], object]:
    if sys.platform == "darwin":  # not run on macOS yet
        barrier = ctypes.PyDLL("/usr/lib/libSystem.B.dylib").OSMemoryBarrier
        barrier.argtypes, barrier.restype = [], None
        return barrier
    name = ctypes.util.find_library("atomic") or "libatomic.so.1"
    try:
        fence = ctypes.PyDLL(name).atomic_thread_fence
    except (OSError, AttributeError) as exc:
        raise ImportError(
            f"{name} with atomic_thread_fence is needed for the pin protocol; "
            "install it (Debian: apt install libatomic1, Fedora: dnf install libatomic)"
        ) from exc
    # No argtypes: a Python int is passed as a C int anyway, and the check doubles the time of a call.
    fence.restype = None
    return partial(fence, _SEQ_CST)


fence: Callable[[], object] = _load()
"""Order every earlier load and store of this thread before every later one."""
