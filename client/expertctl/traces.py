"""Routing traces: which experts each token used, in files that anybody can read with numpy.

Owns the npz format. One array per fact, no pickles:

| name | type | what |
| --- | --- | --- |
| `ids` | u8 or u16 [tokens, layers, k] | expert numbers; the largest value of the type = not routed |
| `weights` | f16 [tokens, layers, k] | the gate weights of the same; NaN = not known (optional) |
| `num_experts` | integer | experts per layer |
| `phase` | u8 [tokens] | 0 prefill, 1 decode (optional) |
| `seq_len` | i32 [sequences] | lengths of the sequences that follow one another (optional) |
| `stream` | u8, u16 or i32 [tokens] | the sequence of each token, in place of `seq_len` (optional) |
| `expert_bytes` | i64 [layers] | bytes of one expert (optional) |
| `model`, `source`, `commit`, `licence`, `note` | text | where it comes from (optional) |

Layers are MoE layers, counted from 0. `ids` is u8 up to 255 experts, else u16. Other arrays are
ignored. A file that breaks the table is refused with one sentence. What a worker wrote of a recording
that nobody finished (`expertd_client.recording`) is read as well.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_client.recording import NOT_ROUTED, Recorded, is_recording, read_recording
from expertd_protocol.errors import BadTrace

__all__ = ["NOT_ROUTED", "Trace", "read_trace", "recorded_trace", "write_trace"]

U16 = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.intp]

_TEXTS = ("model", "source", "commit", "licence", "note")
#: A trace of a million tokens of the largest model is 750 MB; more is a mistake or an attack.
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class Trace:
    """The routing of one or more sequences through one model."""

    name: str
    #: u16[tokens, layers, k]; `NOT_ROUTED` where there is none.
    ids: U16
    num_experts: int
    weights: npt.NDArray[np.float16] | None = None
    phase: npt.NDArray[np.uint8] | None = None
    #: Lengths of the sequences; they add up to the tokens.
    lengths: tuple[int, ...] = ()
    expert_bytes: npt.NDArray[np.int64] | None = None
    texts: dict[str, str] = field(default_factory=dict)
    #: i32[tokens]: the sequence of each token, when they take turns.
    stream: npt.NDArray[np.int32] | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    def sequences(self) -> list[U16]:
        """Return the ids of each sequence, in order."""
        return np.split(self._by_sequence(), np.cumsum(self.lengths)[:-1])

    def _by_sequence(self) -> U16:
        """Return the ids with the tokens of one sequence after those of the one before."""
        if self.stream is None:
            return self.ids
        return self.ids[np.argsort(self.stream, kind="stable")]

    def parts(self, n: int) -> list[U16]:
        """Cut the trace into `n` parts of about the same length, between sequences where there are enough."""
        if not 0 < n <= self.tokens:
            raise BadTrace(f"{self.name} has {self.tokens} tokens, which make no {n} sessions")
        wanted = np.arange(1, n) * self.tokens / n
        if len(self.lengths) >= n:
            ends = np.cumsum(self.lengths)[:-1]
            cuts = [int(ends[np.abs(ends - at).argmin()]) for at in wanted]
            if len(set(cuts)) == n - 1:
                return np.split(self._by_sequence(), cuts)
        return np.split(self._by_sequence(), wanted.astype(int).tolist())


def read_trace(path: Path) -> Trace:
    """Read one trace, strictly.

    Raises:
        BadTrace: no such file, no npz, pickles inside, or arrays that do not fit together.
    """
    if is_recording(path):
        recorded = read_recording(path)
        if recorded is None or not len(recorded.rows):
            raise BadTrace(f"{path} has no token yet")
        return recorded_trace(path.name, recorded)
    try:
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > MOST_BYTES:
            raise BadTrace(f"{path} unpacks to {size} bytes; a trace has at most {MOST_BYTES}")
        with np.load(path, allow_pickle=False) as npz:
            return _trace(path, {name: _member(path, npz, name) for name in npz.files})
    except FileNotFoundError:
        raise BadTrace(f"{path} does not exist") from None
    except IsADirectoryError:
        raise BadTrace(f"{path} is a folder; a trace is one .npz file") from None
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise BadTrace(f"{path} cannot be read as an npz file: {error}") from error


def recorded_trace(name: str, recorded: Recorded, texts: dict[str, str] | None = None) -> Trace:
    """Return the trace that a worker recorded.

    Tokens stand in the order in which they went through the model: the sequences of a batch take
    turns. Without `weights` when the worker saw none at all.
    """
    rows, shape = recorded.rows, recorded.shape
    stream = rows["sequence"].astype(np.int32)
    weights = rows["weights"]
    return Trace(
        name,
        rows["ids"],
        shape.experts,
        None if np.isnan(weights).all() else weights,
        rows["phase"],
        tuple(np.unique(stream, return_counts=True)[1].tolist()),
        np.array(shape.expert_bytes, np.int64),
        texts or {},
        stream if (np.diff(stream) < 0).any() else None,
    )


def write_trace(path: Path, trace: Trace, *, new: bool = False) -> None:
    """Write one trace, compressed; an existing file is replaced only by a complete one.

    Args:
        new: replace none at all, and write one for this user alone.

    Raises:
        BadTrace: with `new`, there is such a file.
    """
    kind: type[np.uint8] | type[np.uint16] = np.uint8 if trace.num_experts < 256 else np.uint16
    ids = np.where(trace.ids == NOT_ROUTED, np.iinfo(kind).max, trace.ids).astype(kind)
    arrays: dict[str, Any] = {"ids": ids, "num_experts": np.int64(trace.num_experts)}
    for name, values in (
        ("weights", trace.weights),
        ("phase", trace.phase),
        ("expert_bytes", trace.expert_bytes),
    ):
        if values is not None:
            arrays[name] = values
    if trace.stream is not None:
        arrays["stream"] = trace.stream
    elif len(trace.lengths) > 1:
        arrays["seq_len"] = np.array(trace.lengths, np.int32)
    arrays.update({name: np.str_(text) for name, text in trace.texts.items()})
    _trace(path, arrays)  # what we write must be readable
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of somebody who was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o600 if new else 0o666), "wb") as file:
            np.savez_compressed(file, **arrays)
        if new:  # nobody else makes a file of this name from here on
            os.close(os.open(path, flags, 0o600))
        partial.replace(path)
    except FileExistsError:
        raise BadTrace(f"{path} exists and is not overwritten; choose another name") from None
    finally:
        partial.unlink(missing_ok=True)


def _member(path: Path, npz: Any, name: str) -> np.ndarray:
    try:
        array = npz[name]
    except ValueError as error:  # numpy's word for a pickle, and for a damaged header
        raise BadTrace(f"{path}: array {name!r} is a pickle or damaged, and is not read") from error
    if not isinstance(array, np.ndarray):
        raise BadTrace(f"{path}: member {name!r} is no array")
    return array


def _trace(path: Path, arrays: dict[str, Any]) -> Trace:
    ids = arrays.get("ids")
    if ids is None or "num_experts" not in arrays:
        raise BadTrace(f"{path} has no `ids` or no `num_experts`: it is no routing trace")
    if ids.dtype not in (np.uint8, np.uint16) or ids.ndim != 3 or 0 in ids.shape:
        raise BadTrace(
            f"{path}: `ids` is {ids.dtype}{list(ids.shape)}; "
            "u8 or u16 [tokens, layers, k] with none of them 0 is needed"
        )
    count = arrays["num_experts"]
    if count.shape != () or count.dtype.kind not in "iu" or not 0 < int(count) < NOT_ROUTED:
        raise BadTrace(f"{path}: `num_experts` is {count}; one number from 1 to 65534 is needed")
    none = np.iinfo(ids.dtype).max
    wide = np.where(ids == none, NOT_ROUTED, ids.astype(np.uint16)).astype(np.uint16)
    routed = wide[wide != NOT_ROUTED]
    if not len(routed):
        raise BadTrace(f"{path} routes nothing: every id means 'not routed'")
    if (largest := int(routed.max())) >= int(count):
        raise BadTrace(f"{path} names expert {largest}; the model has {int(count)} a layer")
    tokens, layers, _ = ids.shape
    lengths, stream = _sequences(path, arrays, tokens)
    return Trace(
        path.name,
        wide,
        int(count),
        _optional(path, arrays, "weights", ids.shape, "f"),
        _optional(path, arrays, "phase", (tokens,), "u"),
        lengths,
        _optional(path, arrays, "expert_bytes", (layers,), "i"),
        {n: str(arrays[n]) for n in _TEXTS if n in arrays and arrays[n].dtype.kind == "U"},
        stream,
    )


def _optional(
    path: Path, arrays: dict[str, Any], name: str, shape: Sequence[int], kind: str
) -> Any:
    array = arrays.get(name)
    if array is not None and (array.shape != tuple(shape) or array.dtype.kind != kind):
        raise BadTrace(
            f"{path}: `{name}` is {array.dtype}{list(array.shape)}, which does not fit `ids`: "
            f"{list(shape)} is needed"
        )
    return array


def _sequences(
    path: Path, arrays: dict[str, Any], tokens: int
) -> tuple[tuple[int, ...], npt.NDArray[np.int32] | None]:
    """Return the lengths of the sequences, and the sequence of each token where they take turns."""
    lengths, stream = arrays.get("seq_len"), arrays.get("stream")
    if lengths is not None:
        good = lengths.ndim == 1 and lengths.dtype.kind in "iu" and (lengths > 0).all()
        if not good or int(lengths.sum()) != tokens:
            raise BadTrace(f"{path}: `seq_len` does not add up to the {tokens} tokens of `ids`")
        return tuple(int(n) for n in lengths), None
    if stream is not None:
        if stream.shape != (tokens,) or stream.dtype.kind not in "iu":
            raise BadTrace(f"{path}: `stream` is not one number for each of {tokens} tokens")
        _, firsts, numbers, counts = np.unique(
            stream, return_index=True, return_inverse=True, return_counts=True
        )
        rank = np.argsort(np.argsort(firsts))  # sequences count in the order in which they begin
        order = rank[numbers].astype(np.int32)
        in_turns = bool((np.diff(order) < 0).any())
        return tuple(counts[np.argsort(firsts)].tolist()), order if in_turns else None
    return (tokens,), None
