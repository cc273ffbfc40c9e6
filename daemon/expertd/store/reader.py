"""Reader threads: they bring the bytes of experts from one device into their slots.

Owns N threads, each with one page-aligned bounce buffer; nothing else allocates per read. A fill is
done when all its reads are, and `on_done` is called exactly once for each fill, whatever happens.
A failing read fails only the fills that it touches. The slot is written, but never published, here.

A read whose offsets, lengths and addresses are aligned may go straight into the slots, by one preadv
over all of them; a large one only where that is not slower (`store/tuning.py`). Any other direct read
goes to the bounce buffer as the aligned superset and is copied from there. Both the read and a large
copy release the GIL. A disk that hangs blocks these threads and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from expertd.store.plan import Fill, Priority, Read, ReadQueue, coalesce
from expertd.store.platform import (
    NOT_DIRECT,
    READ_MAX_BYTES,
    Preadv,
    ReadMode,
    Source,
    read_buffer,
)
from expertd_protocol.errors import Draining, ExpertdError, ReadFailed, TruncatedFile
from expertd_protocol.layout import round_up

log = logging.getLogger(__name__)

#: Reading this much that nobody wants costs less than one more read call.
MAX_GAP_BYTES = 16 * 1024
BUFFER_ALIGN_BYTES = 4096
BUFFER_MIN_BYTES = 2 * BUFFER_ALIGN_BYTES
#: Smaller aligned reads always go straight: one copy less is all that matters there.
LARGE_BYTES = 256 * 1024
#: Copies up to this size keep the GIL: giving it away and waiting for it takes longer.
COPY_WITH_GIL_BYTES = 16 * 1024

#: The descriptor is dead, the file may be alive: the device or server went away and came back.
_STALE = frozenset({errno.ESTALE, errno.ENXIO, errno.ENODEV})
#: Threads look up this often even when nobody wakes them.
_IDLE_SECONDS = 60.0

OnDone = Callable[[Fill, ExpertdError | None], None]


@dataclass(eq=False)
class _Job:
    """A fill on its way."""

    fill: Fill
    reads_left: int = 0
    error: ExpertdError | None = None
    done: bool = False


@dataclass(eq=False)
class _Task:
    """A read and the jobs that need it."""

    read: Read
    jobs: list[_Job]

    def __post_init__(self) -> None:
        # the queue asks for these again and again
        self.priority = self.read.priority
        self.session = self.read.session
        self.nbytes = self.read.nbytes


class Reader:
    """The executor of one device."""

    def __init__(
        self,
        *,
        threads: int,
        buffer_bytes: int,
        on_done: OnDone,
        name: str = "reader",
        straight: bool = True,
        preadv: Preadv = os.preadv,
    ) -> None:
        """Start the threads.

        Args:
            threads: Reads at once.
            buffer_bytes: Bounce buffer of each thread, and the longest read: a multiple of 4096,
                8192 bytes to 64 MiB. `threads * buffer_bytes` counts in the memory budget.
            on_done: Called in a reader thread with the fill and its error or None.
            name: Of the threads, with a number.
            straight: Large aligned reads go into the slots, not through the buffers.
            preadv: Makes the reads; tests inject failures here.
        """
        if threads < 1:
            raise ValueError(f"{threads} reader threads, at least 1 is needed")
        if (
            buffer_bytes % BUFFER_ALIGN_BYTES
            or not BUFFER_MIN_BYTES <= buffer_bytes <= READ_MAX_BYTES
        ):
            raise ValueError(
                f"a read buffer of {buffer_bytes} bytes; it must be a multiple of "
                f"{BUFFER_ALIGN_BYTES} from {BUFFER_MIN_BYTES} to {READ_MAX_BYTES}"
            )
        self.name = name
        self.buffer_bytes = buffer_bytes
        #: What the read buffers take, for the budget.
        self.nbytes = threads * buffer_bytes
        self._straight = straight
        self._on_done = on_done
        self._preadv = preadv
        self._queue: ReadQueue[_Task] = ReadQueue()
        self._state = threading.Lock()
        self._work = threading.Condition(self._state)
        self._no_jobs = threading.Condition(self._state)
        self._jobs: set[_Job] = set()
        self._closing = self._stopping = False
        self._buffers = [read_buffer(buffer_bytes) for _ in range(threads)]
        # Daemon threads: one that hangs in a dead disk must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, args=(b,), name=f"{name}-{i}", daemon=True)
            for i, b in enumerate(self._buffers)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<Reader {self.name} queue_depth={self.queue_depth} fills={len(self._jobs)}>"

    @property
    def queue_depth(self) -> int:
        """Reads that wait for a thread."""
        return len(self._queue)

    def submit(self, fills: Sequence[Fill]) -> None:
        """Queue fills; neighbours in one call share reads. Never blocks on a device.

        Raises:
            Draining: the reader is closing; none of the fills was taken.
            ValueError: a fill without bytes, or with a destination that cannot be written.
        """
        for fill in fills:
            if not any(len(piece.dest) for piece in fill.pieces):
                raise ValueError(f"fill of {fill.key} has no bytes")
            for piece in fill.pieces:
                if piece.dest.readonly or not piece.dest.c_contiguous or piece.dest.itemsize != 1:
                    raise ValueError(
                        f"fill of {fill.key} has a destination that is not plain bytes"
                    )
        reads = coalesce(fills, max_bytes=self.buffer_bytes, max_gap=MAX_GAP_BYTES)
        jobs = [_Job(fill) for fill in fills]
        tasks = []
        for read in reads:
            touched = [jobs[n] for n in sorted({segment.fill for segment in read.segments})]
            for job in touched:
                job.reads_left += 1
            tasks.append(_Task(read, touched))
        with self._state:
            if self._closing:
                raise Draining(f"{self.name} is closing; attach to the next daemon")
            self._jobs.update(jobs)
            for task in tasks:
                self._queue.push(task)
            self._work.notify(len(tasks))

    def hurry(self, fill: Fill, priority: Priority) -> None:
        """Let the reads of a fill that still wait go with those of `priority`, if that is more urgent."""

        def slower(task: _Task) -> bool:
            return task.priority > priority and any(job.fill is fill for job in task.jobs)

        with self._state:
            for task in self._queue.cancel(slower):
                task.priority = priority
                self._queue.push(task)

    def close(self, deadline_seconds: float) -> bool:
        """Take no more fills, finish those there are, abandon what is left at the deadline.

        Returns whether every fill was finished. If not, a read that hangs may still write into its
        slot: the slots of abandoned fills must not be used again.
        """
        end = time.monotonic() + deadline_seconds
        with self._state:
            self._closing = True
            finished = self._no_jobs.wait_for(lambda: not self._jobs, max(0.0, deadline_seconds))
            self._stopping = True
            left = list(self._jobs)
            self._queue.cancel(lambda task: True)
            self._work.notify_all()
        for job in left:
            self._finish(job, Draining(f"{self.name} was closed before the expert was read"))
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for buffer in self._buffers:
                buffer.close()
        return finished

    # --- in the threads --------------------------------------------------------------------------
    def _run(self, buffer: mmap.mmap) -> None:
        with memoryview(buffer) as bounce:
            while (task := self._next()) is not None:
                finished = self._carry_out(task, bounce)
                del task  # it names slots: an idle thread must not keep their memory mapped
                while finished:
                    job = finished.pop()
                    self._finish(job, job.error or _changed(job.fill))
                    del job

    def _next(self) -> _Task | None:
        with self._state:
            while not self._stopping:
                if (task := self._queue.pop()) is not None:
                    return task
                self._work.wait(_IDLE_SECONDS)
        return None

    def _carry_out(self, task: _Task, bounce: memoryview) -> list[_Job]:
        """Do one read; return the jobs that have none left."""
        error: ExpertdError | None = None
        if any(job.error is None for job in task.jobs):
            try:
                self._read(task.read, bounce)
            except ExpertdError as exc:
                error = exc
            except Exception as exc:  # a thread that dies would leave its fills waiting for ever
                log.exception("read_crashed path=%s", task.read.source.path)
                error = ReadFailed(f"reading {task.read.source.path} failed: {exc!r}")
            if error is not None:
                _forget_frames(error)
                task.read.source.failed()
        with self._state:
            for job in task.jobs:
                job.reads_left -= 1
                job.error = job.error or error
            return [job for job in task.jobs if not job.reads_left]

    def _finish(self, job: _Job, error: ExpertdError | None) -> None:
        with self._state:
            if job.done:
                return
            job.done = True
        try:
            self._on_done(job.fill, error)
        except Exception:
            log.exception("on_done_failed key=%s", job.fill.key)
        with self._state:
            self._jobs.discard(job)
            if not self._jobs:
                self._no_jobs.notify_all()

    def _read(self, read: Read, bounce: memoryview) -> None:
        source, reopened = read.source, False
        with source.in_use():
            while True:
                seen, align = source.opened, source.align
                try:
                    self._transfer(read, align, bounce)
                    return
                except OSError as exc:
                    if exc.errno in NOT_DIRECT and align > 1:
                        source.fall_back(f"a read answered {errno.errorcode[exc.errno]}")
                    elif exc.errno in _STALE and not reopened:
                        reopened = True
                        source.reopen(seen)
                    else:
                        raise ReadFailed(
                            f"reading {read.nbytes} bytes at offset {read.offset} of "
                            f"{source.path} failed: {exc.strerror}; check the disk"
                        ) from exc

    def _transfer(self, read: Read, align: int, bounce: memoryview) -> None:
        source, nbytes = read.source, read.nbytes
        if align == 1 or ((self._straight or nbytes < LARGE_BYTES) and _is_aligned(read, align)):
            self._read_fully(source, _scatter(read, bounce), read.offset, nbytes, align)
        else:
            start = read.offset - read.offset % align
            window = bounce[: round_up(read.end, align) - start]
            shift = read.offset - start
            self._read_fully(source, [window], start, shift + nbytes, align)
            for _, at, dest in read.segments:
                piece = window[at + shift : at + shift + len(dest)]
                if len(dest) <= COPY_WITH_GIL_BYTES:
                    dest[:] = piece
                else:
                    np.copyto(np.frombuffer(dest, np.uint8), np.frombuffer(piece, np.uint8))
        if source.mode is ReadMode.BUFFERED:
            source.drop_cache(read.offset, nbytes)

    def _read_fully(
        self, source: Source, views: list[memoryview], offset: int, need: int, align: int
    ) -> None:
        done = 0
        while done < need:
            start = done - done % align  # a direct read may only continue on a boundary
            try:
                got = source.preadv(_behind(views, start), offset + start, self._preadv)
            except InterruptedError:
                continue
            if start + got <= done:
                source.verify()  # rather say that somebody cut the file
                raise TruncatedFile(
                    f"{source.path} ended at byte {offset + done}, {need - done} bytes before the "
                    "end of an expert; download the file again"
                )
            done = start + got


def _changed(fill: Fill) -> ExpertdError | None:
    """Check, after the last byte of a fill was read, that its files are still the indexed ones.

    Once behind all reads is enough: a file that changed before or between them has changed now, too.
    """
    for source in {id(piece.source): piece.source for piece in fill.pieces}.values():
        try:
            with source.in_use():
                seen = source.opened
                try:
                    source.verify()
                except OSError as exc:
                    if exc.errno not in _STALE:
                        raise
                    source.reopen(seen)  # compares the identity
        except (ExpertdError, OSError) as exc:
            source.failed()
            if not isinstance(exc, ExpertdError):
                exc = ReadFailed(f"{source.path} cannot be checked after reading: {exc.strerror}")
            _forget_frames(exc)
            return exc
    return None


def _forget_frames(error: BaseException | None) -> None:
    """Drop tracebacks: errors are kept, and their frames would keep slots and buffers mapped."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _is_aligned(read: Read, align: int) -> bool:
    """Say whether a direct read may go straight into the slots; what lies between goes to scratch."""
    if read.offset % align:  # experts in place, nearly always
        return False
    at = 0
    for segment in read.segments:
        if (segment.at - at) % align or len(segment.dest) % align or _address(segment.dest) % align:
            return False
        at = segment.at + len(segment.dest)
    return True


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # a tenth of numpy's time


def _scatter(read: Read, bounce: memoryview) -> list[memoryview]:
    """Return the buffers of one preadv: destinations, and scratch for the gaps between them."""
    views, at = [], 0
    for segment in read.segments:
        if segment.at > at:
            views.append(bounce[: segment.at - at])
        views.append(segment.dest)
        at = segment.at + len(segment.dest)
    return views


def _behind(views: list[memoryview], start: int) -> list[memoryview]:
    """Return the buffers without their first `start` bytes."""
    if not start:
        return views
    rest = []
    for view in views:
        if start < len(view):
            rest.append(view[start:])
        start = max(0, start - len(view))
    return rest
