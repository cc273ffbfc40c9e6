"""Four ways to have experts in memory, as one worker sees them: bring the experts of a layer, let go.

| way | memory | a look-up |
| --- | --- | --- |
| `shared` | one daemon's arena for all workers | pin, check and unpin through the client |
| `private` | a quarter of the budget each | own LRU, misses read by the daemon's `Reader` with O_DIRECT |
| `pread` | the page cache | every expert is read into a buffer, on every use |
| `mmap` | the page cache | every page of the expert's record is touched |

All read the same records, with as many threads as the daemon has for the device. `private` is a cache
as peers have: in the process that uses it, so a miss costs no message and no look at other workers;
all of its share is slots, while the daemon's budget also holds its directory, pages and read buffers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from streamed import Record, Streamed

from expertd.cache.shm import create
from expertd.store.plan import Fill, Piece, Priority
from expertd.store.platform import ReadMode, open_source
from expertd.store.reader import Reader
from expertd_client import Client
from expertd_protocol.errors import ExpertdError
from expertd_protocol.ids import ExpertKey
from expertd_protocol.layout import U8, Counter, Ints, Phase, SlabLayout, word_slots

READ_SECONDS = 60.0
NAMES = ("shared", "private", "pread", "mmap")


class Way(ABC):
    """One worker's way. `fetch` returns when the layer could be computed, `release` when it was."""

    #: Look-ups that found their expert in place at once; None where nobody can know.
    hits: int | None = 0

    @abstractmethod
    def fetch(self, layer: int, experts: Ints) -> None: ...

    def release(self) -> None:
        return

    def token_done(self) -> None:
        return

    def device_bytes(self) -> int:
        """What this process had read from the device so far; the kernel's count."""
        return process_read_bytes()


def process_read_bytes(pid: int | str = "self") -> int:
    """Return the bytes a process fetched from block devices; 0 where the kernel does not count."""
    path = Path(f"/proc/{pid}/io")
    if not path.exists():
        return 0
    fields = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(fields["read_bytes"])


class Shared(Way):
    """Ours. The bytes are counted by the daemon."""

    def __init__(self, client: Client, model: Streamed, top_k: int) -> None:
        self._client = client
        arena = client.attach(model.source, quota_min=top_k, quota_wanted=top_k)
        self._planes: list[U8] = [slab.plane(0)[:, 0] for slab in arena.slabs]
        self._slab_of_layer = arena.slab_of_layer
        self._serial = arena.serial

    def fetch(self, layer: int, experts: Ints) -> None:
        words = self._client.pin(layer, experts, Phase.DECODE)
        plane = self._planes[self._slab_of_layer[layer]]
        plane[word_slots(words).astype(np.intp)].max()

    def release(self) -> None:
        if not self._client.verify():
            raise SystemExit("a pinned slot changed under the worker")
        self._client.unpin()

    def token_done(self) -> None:
        self._client.end_pass(1, Phase.DECODE)
        self._client.begin_pass()
        if self._client.arena.serial != self._serial:
            raise SystemExit("the daemon ended in the middle of the run")

    def device_bytes(self) -> int:
        return 0

    @property
    def hits(self) -> int:  # type: ignore[override]
        return int(self._client.arena.page.counters[Phase.DECODE][Counter.HITS])

    def close(self) -> None:
        self._planes.clear()


class Private(Way):
    """A cache of its own: least recently used goes first."""

    def __init__(self, model: Streamed, nbytes: int, threads: int, top_k: int) -> None:
        self.hits = 0
        self._model = model
        self._sources = [open_source(s.path, s.identity) for s in model.shards]
        slots = max(nbytes // model.expert_bytes, top_k)
        self._layout = SlabLayout(model.parts, slots)
        self._memory = create(self._layout.nbytes)
        self._view = memoryview(self._memory.buffer)
        self._plane = np.frombuffer(self._view, np.uint8)[self._layout.plane_offsets[0] :]
        self._free = list(range(slots))
        self._slots: OrderedDict[ExpertKey, int] = OrderedDict()
        self._done: queue.SimpleQueue[ExpertdError | None] = queue.SimpleQueue()
        self._reader = Reader(
            threads=threads, buffer_bytes=4 << 20, on_done=lambda _, error: self._done.put(error)
        )

    @property
    def is_direct(self) -> bool:
        return all(source.mode is not ReadMode.BUFFERED for source in self._sources)

    def fetch(self, layer: int, experts: Ints) -> None:
        missing = []
        for expert in experts.tolist():
            key = ExpertKey(layer, expert)
            if key in self._slots:
                self.hits += 1
                self._slots.move_to_end(key)
            else:
                missing.append(key)
        fills = [self._fill(key) for key in missing]  # the layer's own hits are the newest by now
        if fills:
            self._reader.submit(fills)
        for _ in fills:
            if (error := self._done.get(timeout=READ_SECONDS)) is not None:
                raise error
        stride = self._layout.parts[0].nbytes
        for expert in experts.tolist():
            self._plane[self._slots[ExpertKey(layer, expert)] * stride]

    def _fill(self, key: ExpertKey) -> Fill:
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[key] = slot
        pieces = []
        for part, (shard, offset, nbytes) in enumerate(self._model.index.ranges(*key)):
            at, _ = self._layout.row(part, slot)
            pieces.append(Piece(self._sources[shard], offset, self._view[at : at + nbytes]))
        return Fill(key, (0, slot), tuple(pieces), Priority.DEMAND, b"private")

    def device_bytes(self) -> int:
        return sum(source.read_bytes for source in self._sources)

    def close(self) -> None:
        self._reader.close(READ_SECONDS)
        for source in self._sources:
            source.close()


class PageCache(Way):
    """What `pread` and `mmap` have in common: files, records, threads."""

    hits = None

    def __init__(self, model: Streamed, threads: int) -> None:
        self._model = model
        self._files = [os.open(s.path, os.O_RDONLY) for s in model.shards]
        self._records = [
            [model.record(layer, expert) for expert in range(model.experts)]
            for layer in range(model.layers)
        ]
        self._pool = ThreadPoolExecutor(threads)
        list(
            self._pool.map(lambda _: None, range(4 * threads))
        )  # all threads exist before the limit

    def fetch(self, layer: int, experts: Ints) -> None:
        row = self._records[layer]
        records = [row[expert] for expert in experts.tolist()]
        for _ in self._pool.map(self._bring, range(len(records)), records):
            pass

    @abstractmethod
    def _bring(self, n: int, record: Record) -> None: ...

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._files:
            os.close(fd)


class Pread(PageCache):
    """Buffered reads. No read-ahead: the next expert is somewhere else."""

    def __init__(self, model: Streamed, threads: int, top_k: int) -> None:
        super().__init__(model, threads)
        for fd in self._files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        nbytes = max(record.nbytes for row in self._records for record in row)
        self._buffers = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(top_k)]
        for buffer in self._buffers:
            buffer[:] = bytes(nbytes)  # its pages are there before the limit

    def _bring(self, n: int, record: Record) -> None:
        done, fd = 0, self._files[record.shard]
        while done < record.nbytes:
            view = self._buffers[n][done : record.nbytes]
            if not (got := os.preadv(fd, [view], record.offset + done)):
                raise SystemExit("a model file was cut while it was read")
            done += got


class Mapped(PageCache):
    """The files mapped as mlx and llama.cpp do, with the kernel's own read-ahead."""

    def __init__(self, model: Streamed, threads: int) -> None:
        super().__init__(model, threads)
        self._maps = [
            np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8) for fd in self._files
        ]

    def _bring(self, n: int, record: Record) -> None:
        # numpy lets other threads run above 500 elements
        stride = max(min(mmap.PAGESIZE, record.nbytes // 1024), 1)
        pages = self._maps[record.shard][record.offset : record.offset + record.nbytes : stride]
        np.bitwise_or.reduce(pages)


@contextlib.contextmanager
def opened(
    way: str, model: Streamed, *, socket: Path | None, nbytes: int, threads: int, top_k: int
) -> Iterator[Way]:
    """Open one of NAMES; `nbytes` is the private cache's share."""
    if way == "shared":
        with Client.connect(socket, name="bench") as client:
            shared = Shared(client, model, top_k)
            try:
                yield shared
            finally:
                shared.close()
        return
    other: Private | PageCache
    if way == "private":
        other = Private(model, nbytes, threads, top_k)
    elif way == "pread":
        other = Pread(model, threads, top_k)
    else:
        other = Mapped(model, threads)
    try:
        yield other
    finally:
        other.close()
