"""How many threads read from a device: measured once, in a quarter of a second, and remembered.

Only large files are measured, at the first open on a device for a size of reads; the answer is kept
in a small JSON file and is a default, never a promise: `reader_threads` overrides it. The usual number
stays unless another one is clearly better, so noise decides nothing. What is read is thrown away.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import platformdirs

from expertd.store.platform import DIRECT_ALIGN_BYTES, Preadv, ReadMode, Source, file_system_name

log = logging.getLogger(__name__)

#: What is used where nothing was measured.
USUAL_THREADS = 8
CANDIDATES = (2, 4, 8)
SECONDS_EACH = 0.07
#: Another number must be this much faster than the usual one.
WORTH = 1.15
#: A smaller model is read in a moment with any number of threads.
MEASURED_FROM_BYTES = 512 << 20
#: A device that does not answer for so long is not measured.
HANGS_SECONDS = 1.0


def state_file() -> Path:
    """Return where what was measured is kept."""
    return platformdirs.user_state_path("expertd") / "readers.json"


def choose(rates: Mapping[int, float], most: int) -> int:
    """Return the number of threads, at most `most`, from bytes per second by number."""
    usual = min(USUAL_THREADS, most)
    known = {n: rate for n, rate in rates.items() if n <= most}
    if usual not in known:
        return usual
    best = max(known, key=lambda n: known[n])
    return best if known[best] > WORTH * known[usual] else usual


def measure(
    source: Source,
    read_bytes: int,
    candidates: Iterable[int] = CANDIDATES,
    *,
    preadv: Preadv = os.preadv,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, float]:
    """Return bytes per second by number of threads; empty when the device fails or hangs.

    Takes a buffer of `read_bytes` for each thread, as the reader will.
    """
    candidates = sorted(candidates)
    places = (source.identity.size - read_bytes) // DIRECT_ALIGN_BYTES
    if places <= 0:
        return {}
    buffers = [
        mmap.mmap(-1, read_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(candidates[-1])
    ]
    rates: dict[int, float] = {}
    for n in candidates:
        got = [0] * n
        failed: list[OSError] = []
        began = clock()

        def read(
            i: int, got: list[int] = got, failed: list[OSError] = failed, began: float = began
        ) -> None:
            try:
                with source.in_use(), memoryview(buffers[i]) as view:
                    while clock() - began < SECONDS_EACH:
                        offset = random.randrange(places) * DIRECT_ALIGN_BYTES
                        got[i] += preadv(source.fd, [view], offset)
            except OSError as exc:
                failed.append(exc)

        threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_SECONDS)
        if failed or any(thread.is_alive() for thread in threads):
            return {}
        rates[n] = sum(got) / max(clock() - began, 1e-9)
    return rates


def threads_for(source: Source, read_bytes: int, most: int, state: Path) -> int:
    """Return how many threads to read with, at most `most`: remembered, measured, or the usual.

    Args:
        read_bytes: Of a typical read.
        most: Buffers that the budget has room for.
        state: The JSON file of what is known; need not exist, and may be damaged.
    """
    if source.mode is ReadMode.BUFFERED or source.identity.size < MEASURED_FROM_BYTES:
        return min(USUAL_THREADS, most)
    read_bytes = max(1 << (read_bytes.bit_length() - 1), DIRECT_ALIGN_BYTES)
    device = f"{os.major(source.device)}:{os.minor(source.device)}"
    key = f"{device} {file_system_name(source.device) or 'unknown'} {read_bytes}"
    known = _read(state)
    if key not in known:
        rates = measure(source, read_bytes, [n for n in CANDIDATES if n <= most] or [1])
        if most < USUAL_THREADS or not rates:
            return choose(rates, most)
        known[key] = choose(rates, most)
        log.info("reader_threads_measured device=%r rates=%s chosen=%d", key, rates, known[key])
        _write(state, known)
    return min(known[key], most)


def _read(state: Path) -> dict[str, int]:
    try:
        value = json.loads(state.read_text())
        return {k: n for k, n in value.items() if type(n) is int and 1 <= n <= 64}
    except (OSError, ValueError, AttributeError):  # not there, or nothing of ours: measure again
        return {}


def _write(state: Path, known: Mapping[str, int]) -> None:
    partial = state.with_name(f"{state.name}.{os.getpid()}")
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dict(known), indent=1) + "\n")
        os.replace(partial, state)
    except OSError as exc:
        log.warning("reader_threads_not_kept path=%s reason=%s", state, exc.strerror)
