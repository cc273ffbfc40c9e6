"""How a device is read best: how many threads, and whether straight into shared memory.

Measured once, in a quarter of a second, at the first open of a large model on a device, and kept in a
small JSON file for that size of reads. The usual way stays unless another is clearly better, so noise
decides nothing. What is read is thrown away. `reader_threads` overrides the number.

Straight costs no copy, but slots are shared memory of small pages while the reader's buffers have huge
ones, and some devices are slower for every page. Measured on a virtio disk, records of 2.5 MiB, 8
threads: straight 0.90 GB/s at 0.23 CPU seconds per GB, through the buffers 1.33 GB/s at 0.33. It has to
be throughput: with a full queue one read takes as long either way.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import platformdirs

from expertd.store.platform import (
    DIRECT_ALIGN_BYTES,
    Preadv,
    ReadMode,
    Source,
    file_system_name,
    read_buffer,
)

log = logging.getLogger(__name__)

#: What is used where nothing was measured.
USUAL_THREADS = 8
CANDIDATES = (2, 4, 8)
#: Four ways are measured.
SECONDS_EACH = 0.06
#: Another way must be this much faster than the usual one.
WORTH = 1.15
#: A smaller file is read in a moment in any way (a packed layer of a large model is larger).
MEASURED_FROM_BYTES = 128 << 20
#: A device that does not answer for so long is not measured.
HANGS_SECONDS = 1.0


@dataclass(frozen=True)
class Tuning:
    """How to read from one device."""

    threads: int
    straight: bool = True


def state_file() -> Path:
    """Return where what was measured is kept."""
    return platformdirs.user_state_path("expertd") / "readers.json"


def choose(buffered: Mapping[int, float], straight: float, most: int) -> Tuning:
    """Decide from bytes per second: through buffers by number of threads, and straight with the most."""
    usual = min(USUAL_THREADS, most)
    if usual not in buffered or not straight:
        return Tuning(usual)
    best = max(buffered, key=lambda n: buffered[n])
    threads = best if buffered[best] > WORTH * buffered[usual] else usual
    return Tuning(threads, WORTH * straight >= buffered[usual])


def measure(
    source: Source,
    read_bytes: int,
    threads: int,
    *,
    straight: bool = False,
    preadv: Preadv = os.preadv,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return bytes per second of random reads; 0 when the device fails or hangs.

    Takes memory for `threads + 1` reads.
    """
    places = (source.identity.size - read_bytes) // DIRECT_ALIGN_BYTES
    if places <= 0:
        return 0.0
    make = (lambda n: mmap.mmap(-1, n)) if straight else read_buffer  # the first is shared memory
    buffers = [make(read_bytes) for _ in range(threads)]
    slot = np.frombuffer(mmap.mmap(-1, read_bytes), np.uint8)
    got = [0] * threads
    failed: list[OSError] = []
    began = clock()

    def read(i: int) -> None:
        try:
            with source.in_use(), memoryview(buffers[i]) as view:
                while clock() - began < SECONDS_EACH:
                    offset = random.randrange(places) * DIRECT_ALIGN_BYTES
                    got[i] += preadv(source.fd, [view], offset)
                    if not straight:
                        np.copyto(slot, np.frombuffer(view, np.uint8))
        except OSError as exc:
            failed.append(exc)

    workers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANGS_SECONDS)
        if worker.is_alive():
            return 0.0
    return 0.0 if failed else sum(got) / max(clock() - began, 1e-9)


def tuned(source: Source, read_bytes: int, buffer_bytes: int, most: int, state: Path) -> Tuning:
    """Return how to read: remembered, measured, or the usual way.

    Args:
        read_bytes: Of a typical read.
        buffer_bytes, most: Buffers that the budget has room for; measuring takes no more.
        state: The JSON file of what is known; need not exist, and may be damaged.
    """
    usual = Tuning(min(USUAL_THREADS, most))
    if source.mode is ReadMode.BUFFERED or source.identity.size < MEASURED_FROM_BYTES:
        return usual
    room = min(read_bytes, buffer_bytes * most // (most + 1))
    if most < USUAL_THREADS or room < DIRECT_ALIGN_BYTES:
        return usual
    read_bytes = 1 << (room.bit_length() - 1)
    device = f"{os.major(source.device)}:{os.minor(source.device)}"
    key = f"{device} {file_system_name(source.device) or 'unknown'} {read_bytes}"
    known = _read(state)
    if key not in known:
        rates = {n: measure(source, read_bytes, n) for n in CANDIDATES}
        straight = measure(source, read_bytes, USUAL_THREADS, straight=True)
        if not straight or not all(rates.values()):
            return usual
        known[key] = choose(rates, straight, most)
        log.info(
            "reader_tuned device=%r rates=%s straight=%.0f chosen=%s",
            key, rates, straight, known[key],
        )  # fmt: skip
        _write(state, known)
    return known[key]


def _read(state: Path) -> dict[str, Tuning]:
    try:
        known = {key: Tuning(**value) for key, value in json.loads(state.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or nothing of ours
        return {}
    return {k: t for k, t in known.items() if t.threads in CANDIDATES and type(t.straight) is bool}


def _write(state: Path, known: Mapping[str, Tuning]) -> None:
    partial = state.with_name(f"{state.name}.{os.getpid()}")
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({k: asdict(t) for k, t in known.items()}, indent=1) + "\n")
        os.replace(partial, state)
    except OSError as exc:
        log.warning("reader_tuning_not_kept path=%s reason=%s", state, exc.strerror)
