"""Recording: the file that a worker fills while its routing is recorded, and how it is read.

Who wants the recording makes the file, empty and for its owner alone; the worker opens it and appends.
The first line is JSON and says the model's shape, then comes one row of fixed size per token that went
through a forward pass. So whatever ends the worker, every whole row that it wrote is there; and the
file's name is the recording's life: a worker whose file was removed stops. Holds routing only: expert
numbers, router weights, phase and the number of the sequence. Never text, never token ids.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_protocol.errors import BadTrace

SUFFIX = ".recording"
#: An expert that was not routed.
NOT_ROUTED = 0xFFFF
#: Most tokens of one recording: 1.5 GB of a model of 48 layers with 8 experts a token.
MOST_TOKENS = 1_000_000
#: What the first line starts with, and the most that it takes: it has one number for each layer.
_MAGIC = b'{"expertd_recording": 1, '
_LINE_BYTES = 1 << 20
#: `phase` of the last row, when the worker ended the recording; its `sequence` is the `End`.
_END_PHASE = 255


class End(IntEnum):
    """Why a worker ended a recording."""

    TOKENS = 1
    SECONDS = 2
    #: The model was closed.
    CLOSED = 3
    #: The worker was being recorded into another file.
    BUSY = 4
    #: The file could not be written, or a pass did not fit into its rows.
    FAILED = 5


@dataclass(frozen=True)
class Shape:
    """What the rows of a recording have in common; `k` is the most experts of a token in a layer."""

    layers: int
    k: int
    experts: int
    #: Bytes of one expert, per layer.
    expert_bytes: tuple[int, ...]

    @property
    def row(self) -> np.dtype[np.void]:
        """One token: `ids` and `weights` [layers, k], `phase` (0 prefill, 1 decode), `sequence`."""
        each = (self.layers, self.k)
        return np.dtype(
            [("ids", "<u2", each), ("weights", "<f2", each), ("phase", "u1"), ("sequence", "<i4")]
        )

    def rows(self, n: int) -> npt.NDArray[np.void]:
        """Return `n` rows that route nothing, with weights that nobody knows."""
        rows = np.zeros(n, self.row)
        rows["ids"] = NOT_ROUTED
        rows["weights"] = np.nan
        return rows


def make_recording(path: Path) -> None:
    """Make the empty file that a worker is to fill.

    Raises:
        BadTrace: it exists already, or cannot be made there.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise BadTrace(
            f"{path} exists: another recording runs, or was killed; end it or move the file away"
        ) from None
    except OSError as exc:
        raise BadTrace(f"{path} cannot be made: {exc.strerror}; choose another place") from exc


class RecordingFile:
    """The worker's side: appends, and never leaves half a row behind an error."""

    def __init__(self, path: Path) -> None:
        """Open a file that `make_recording` made.

        Raises:
            OSError: it is gone, or it is not an empty file of this user.
        """
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags)
        info = os.fstat(self._fd)
        if not (stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_size):
            self.close()
            raise OSError(f"{path} is not an empty file of this user")
        self._size = self._start = 0
        self._shape: Shape | None = None

    def begin(self, shape: Shape) -> None:
        """Write the first line; once, before any row."""
        self._shape = shape
        line = json.dumps(asdict(shape)).removeprefix("{")
        self._write(_MAGIC + line.encode() + b"\n")
        self._start = self._size

    def append(self, rows: npt.NDArray[np.void]) -> None:
        """Append rows, all or none.

        Raises:
            OSError: the disk is full, or gone.
        """
        self._write(rows.tobytes())

    def end(self, why: End) -> None:
        """Say why nothing more comes, as far as the disk allows, and close; idempotent."""
        if self._fd >= 0 and self._shape is not None:
            last = self._shape.rows(1)
            last["phase"], last["sequence"] = _END_PHASE, why
            with suppress(OSError):
                try:
                    self.append(last)
                except OSError:  # no room: that of the last token will do
                    self._cut(max(self._start, self._size - last.nbytes))
                    self.append(last)
        self.close()

    def removed(self) -> bool:
        """Tell whether nobody wants the recording any more."""
        return self._fd < 0 or os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with suppress(OSError):
                self._cut(self._size)
            raise
        self._size += len(data)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._size = size


@dataclass(frozen=True)
class Recorded:
    """What is in the file: whole rows, and why they end; None while they go on or were cut off."""

    shape: Shape
    rows: npt.NDArray[np.void]
    end: End | None


def is_recording(path: Path) -> bool:
    """Tell by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def progress(path: Path) -> tuple[int, End | None]:
    """Return (tokens so far, why they end), without reading them; (0, None) for an empty file.

    Raises:
        BadTrace: the file is no recording, or cannot be read.
    """
    opened = _open(path)
    if opened is None:
        return 0, None
    shape, start, size = opened
    rows, end = _last(path, shape, start, size)
    return rows, end


def read_recording(path: Path) -> Recorded | None:
    """Read what is there; None when no pass went through the model yet.

    Raises:
        BadTrace: the file is no recording, or cannot be read.
    """
    opened = _open(path)
    if opened is None:
        return None
    shape, start, size = opened
    n, end = _last(path, shape, start, size)
    if n > MOST_TOKENS:
        raise BadTrace(f"{path} has {n:,} tokens; a recording has at most {MOST_TOKENS:,}")
    return Recorded(shape, np.fromfile(path, shape.row, n, offset=start), end)


def _open(path: Path) -> tuple[Shape, int, int] | None:
    """Return the shape, where the rows start, and the size of the file; None when it is empty."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LINE_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise BadTrace(f"{path} cannot be read: {exc.strerror}") from exc
    if not line:
        return None
    try:
        if not (line.startswith(_MAGIC) and line.endswith(b"\n")):
            raise ValueError("its first line is another")
        shape = _shape(**{k: v for k, v in json.loads(line).items() if k != "expertd_recording"})
    except (ValueError, TypeError) as exc:
        raise BadTrace(f"{path} is no recording of expertd: {exc}") from exc
    return shape, len(line), size


def _shape(layers: Any, k: Any, experts: Any, expert_bytes: Any) -> Shape:
    good = all(type(n) is int and 0 < n < NOT_ROUTED for n in (layers, k, experts))
    if not good or k > experts or [type(n) for n in expert_bytes] != [int] * layers:
        raise ValueError("the numbers of its first line do not fit together")
    return Shape(layers, k, experts, tuple(expert_bytes))


def _last(path: Path, shape: Shape, start: int, size: int) -> tuple[int, End | None]:
    """Return how many whole rows there are without the one that ends them, and what that one says."""
    each = shape.row.itemsize
    n = (size - start) // each
    if n < 1:
        return 0, None
    (last,) = np.fromfile(path, shape.row, 1, offset=start + (n - 1) * each)
    if last["phase"] != _END_PHASE:
        return n, None
    known = int(last["sequence"]) in End.__members__.values()
    return n - 1, End(int(last["sequence"])) if known else End.FAILED
