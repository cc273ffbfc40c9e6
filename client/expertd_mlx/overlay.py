"""Overlay: lets an MLX array's pages be those of a shared-memory object (Linux).

MLX's CPU build refuses to adopt foreign memory, so the order is turned round: MLX allocates an
array, and `mmap(MAP_SHARED | MAP_FIXED, PROT_READ)` then puts the object over its page-aligned
interior. Promises: `words` shows every later change of the object, costs no copy, and cannot be
written. Never leaves a foreign mapping inside memory that goes back to MLX's allocator: see `undo`.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import mlx.core as mx
import numpy as np

from expertd_protocol.errors import OutOfMemory
from expertd_protocol.layout import round_up

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # Linux, all architectures
_MADV_DONTNEED, _MADV_DONTFORK = 4, 10
#: glibc serves every allocation above 32 MiB from a mapping of its own, so that freeing it returns
#: whole pages to the system and never touches the bytes inside.
_MIN_BYTES = (32 << 20) + _PAGE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map_over(address: int, nbytes: int, prot: int, flags: int, fd: int) -> None:
    if _libc.mmap(address, nbytes, prot, flags | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OutOfMemory(f"cannot map {nbytes} bytes of a slab: {os.strerror(number)}")


class Overlay:
    """`words`: the first `nbytes` of the object behind `fd`, as a uint32 array of MLX."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._nbytes = round_up(nbytes, _PAGE)
        # mx.zeros writes its pages once: for a moment the worker needs this much memory of its own,
        # which is why slabs are overlaid one after the other.
        self._base = mx.zeros((max(self._nbytes + 2 * _PAGE, _MIN_BYTES) // 4,), mx.uint32)
        mx.eval(self._base)
        start = int(np.array(self._base, copy=False).ctypes.data)
        self._address = round_up(start, _PAGE)
        end = start + self._base.nbytes
        self._mapped = False
        _map_over(self._address, self._nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)
        self._mapped = True
        # a forked child must not keep a slab alive that the daemon has given up; it cannot use it
        _libc.madvise(self._address, self._nbytes, _MADV_DONTFORK)
        rest = self._address + self._nbytes
        if (spare := (end - rest) // _PAGE * _PAGE) > 0:
            _libc.madvise(rest, spare, _MADV_DONTNEED)
        first = (self._address - start) // 4
        self.words = self._base[first : first + nbytes // 4]
        mx.eval(self.words)

    def undo(self) -> None:
        """Give the array plain zero pages back. Nothing may be evaluated on it any more."""
        if self._mapped:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            _map_over(self._address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1)
            self._mapped = False

    def __del__(self) -> None:
        # Only memory that is still ours to map: `_base` is freed after this, never before.
        if getattr(self, "_mapped", False):
            self.undo()
