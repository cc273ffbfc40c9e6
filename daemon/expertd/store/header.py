"""The header of a safetensors file, read strictly.

Promises that every tensor of a returned header lies inside the file, that tensors neither overlap
nor leave holes, and that each has exactly the bytes of its shape and dtype. Everything else is one
typed error that names the file. Bytes stay bytes: dtypes are names and bit counts, never numpy
dtypes, because numpy has no bf16. Data may start at any address, odd ones included.

Never allocates from a length field before it was checked against the file and the cap, and never
maps a file: truncating a mapped file kills the process.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from expertd_protocol.errors import (
    BadHeader,
    DuplicateTensor,
    GitLfsPointer,
    ModelChanged,
    ModelError,
    ModelNotFound,
    NotAModel,
    ReadFailed,
    TruncatedFile,
    UnreadableFile,
)

#: Same cap as the safetensors library: a larger header is an attack or a mistake.
HEADER_MAX_BYTES = 100_000_000

#: Bits of one element, for every dtype of the safetensors format.
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "U8": 8, "I8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip

#: The largest signed 64-bit number: no file, dimension or offset is larger.
_MAX_INT = (1 << 63) - 1
_LENGTH = struct.Struct("<Q")
_LFS_STARTS = (b"version https://git-lfs", b"version https://hawser")  # hawser: before 2014

Pread = Callable[[int, int, int], bytes]


@dataclass(frozen=True)
class Identity:
    """What makes a file the same file: a rewrite, a replacement or a truncation changes it."""

    dev: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: int | str | os.PathLike[str]) -> Identity:
        """Return the identity of an open descriptor, or of the file a path leads to."""
        s = os.stat(file)
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)

    def matches(self, s: os.stat_result) -> bool:
        """Say whether a stat result is of this very file."""
        return (s.st_ino, s.st_mtime_ns, s.st_size, s.st_dev) == (
            self.inode, self.mtime_ns, self.size, self.dev
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A checked header; `nbytes` is the size of the whole file."""

    tensors: dict[str, TensorInfo]
    identity: Identity
    nbytes: int
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(path: Path, *, pread: Pread = os.pread) -> Header:
    """Read and check the header of one safetensors file.

    Args:
        path: The file; links are followed.
        pread: Reads the bytes, as `os.pread` does; tests inject failures here.

    Raises:
        ModelNotFound, NotAModel, UnreadableFile: no regular file is there that may be read.
        GitLfsPointer, TruncatedFile: the content is not whole.
        BadHeader, DuplicateTensor: the content is not sound.
        ReadFailed: the device reported an error.
        ModelChanged: somebody writes the file right now.
    """
    fd = open_file(path)
    try:
        identity = Identity.of(fd)
        raw = _header_bytes(path, fd, identity.size, pread)
        if Identity.of(fd) != identity:
            raise ModelChanged(
                f"{path} changed while its header was read; "
                "wait until the download or copy is finished"
            )
    finally:
        os.close(fd)
    data_start = _LENGTH.size + len(raw)
    entries, metadata = _parse(path, raw)
    tensors = _tensors(path, entries, data_start)
    _check_cover(path, tensors, data_start, identity.size)
    return Header(tensors, identity, identity.size, metadata)


def open_file(path: Path) -> int:
    """Open a regular file read-only and return its descriptor, or raise the error that fits."""
    try:
        # Without O_NONBLOCK a FIFO of that name would block for ever; regular files ignore it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise open_error(path, exc) from exc
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise NotAModel(f"{path} is {what}, a safetensors file is needed")
    return fd


def open_error(path: Path, exc: OSError) -> ModelError:
    """Return the error for a file that could not be opened."""
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return ModelNotFound(f"{path} does not exist")
    hint = "check its permissions and those of its folders"
    if sys.platform == "darwin" and exc.errno == errno.EPERM:
        hint = (
            "allow Full Disk Access or Removable Volumes in System Settings, Privacy & Security, "
            f"for {sys.executable}"
        )
    return UnreadableFile(f"{path} cannot be read by this user: {exc.strerror}; {hint}")


def _header_bytes(path: Path, fd: int, size: int, pread: Pread) -> bytes:
    if size == 0:
        raise TruncatedFile(f"{path} is empty (0 bytes); download it again")
    start = _read(path, fd, min(size, 64), 0, pread)
    if start.startswith(_LFS_STARTS):
        raise GitLfsPointer(
            f"{path} is a git-lfs pointer, not weights ({size} bytes of text); "
            "run `git lfs pull` in its repository or download the file itself"
        )
    if size < _LENGTH.size:
        raise TruncatedFile(
            f"{path} has {size} bytes, a safetensors file has at least 8; download it again"
        )
    length: int = _LENGTH.unpack_from(start)[0]
    if length > HEADER_MAX_BYTES:
        raise BadHeader(
            f"{path} is not a usable safetensors file: its first 8 bytes give a header of "
            f"{length} bytes, at most {HEADER_MAX_BYTES} are allowed and the file has {size}"
        )
    if length > size - _LENGTH.size:
        raise TruncatedFile(
            f"{path} is truncated: its header alone needs {_LENGTH.size + length} bytes, "
            f"the file has {size}; download it again"
        )
    return _read(path, fd, length, _LENGTH.size, pread)


def _read(path: Path, fd: int, count: int, offset: int, pread: Pread) -> bytes:
    got = bytearray()
    while len(got) < count:
        try:
            more = pread(fd, count - len(got), offset + len(got))
        except OSError as exc:
            raise ReadFailed(
                f"reading the header of {path} failed at offset {offset + len(got)}: "
                f"{exc.strerror}; check the disk and its connection"
            ) from exc
        if not more:
            raise TruncatedFile(
                f"{path} ended at byte {offset + len(got)} while its header was read "
                f"({count - len(got)} bytes are missing); download it again"
            )
        got += more
    return bytes(got)


# --- JSON ----------------------------------------------------------------------------------------
class _DuplicateKey(Exception):
    """Carries the key out of the JSON parser."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object (`object_pairs_hook`), refusing a key that stands twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_json(raw: bytes) -> object:
    """Parse strict JSON in UTF-8.

    Raises:
        ValueError: with a short reason, for anything that is not JSON or is nested too deeply.
        DuplicateTensor: for an object with the same key twice (the message is only the key).
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8 at byte {exc.start}") from exc
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except _DuplicateKey as exc:
        raise DuplicateTensor(str(exc)) from exc
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc.msg} at character {exc.pos}") from exc


def _parse(path: Path, raw: bytes) -> tuple[dict[str, object], dict[str, str]]:
    try:
        value = parse_json(raw)
    except DuplicateTensor as exc:
        raise DuplicateTensor(
            f"{path} has a duplicate tensor: its header has the name {short(exc.message)} twice"
        ) from exc
    except ValueError as exc:
        raise BadHeader(f"the header of {path} is malformed: {exc}") from exc
    if not isinstance(value, dict):
        raise BadHeader(f"the header of {path} is not a JSON object")
    metadata = value.pop("__metadata__", None)
    if metadata is None:
        return value, {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadHeader(f"the __metadata__ of {path} is not a map from text to text")
    return value, metadata


# --- tensors -------------------------------------------------------------------------------------
def _tensors(path: Path, entries: dict[str, object], data_start: int) -> dict[str, TensorInfo]:
    tensors = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(entry, data_start)
        except ValueError as exc:
            raise BadHeader(f"tensor {short(name)} of {path}: {exc}") from exc
    return tensors


def _tensor(entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ValueError("its entry is not a JSON object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {short(dtype)}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise ValueError(f"shape {short(shape)} is not a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(_is_size(n) for n in span):
        raise ValueError(f"data_offsets {short(span)} is not [begin, end]")
    begin, end = span
    if begin > end:
        raise ValueError(f"data_offsets {short(span)} end before they begin")
    total_bits = DTYPE_BITS[dtype]
    for n in shape:  # stops early: a long shape of large sizes would take minutes to multiply
        total_bits *= n
        if total_bits > 8 * _MAX_INT:
            raise ValueError(f"shape {short(shape)} is larger than any file")
    if total_bits != 8 * (end - begin):
        raise ValueError(
            f"shape {short(shape)} of {dtype} needs {total_bits / 8:g} bytes, "
            f"data_offsets {short(span)} hold {end - begin}"
        )
    return TensorInfo(dtype, tuple(shape), data_start + begin, end - begin)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT  # a bool is no size


def _check_cover(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Check that tensors cover the data exactly once, and that the file ends where they do."""
    expected = max((t.offset + t.nbytes for t in tensors.values()), default=data_start)
    if size < expected:
        raise TruncatedFile(
            f"{path} is truncated: its tensors need {expected} bytes, the file has {size} "
            f"({expected - size} are missing); download it again"
        )
    at, before = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset < at:
            raise BadHeader(
                f"tensor {short(name)} of {path} overlaps {before} by {at - tensor.offset} bytes"
            )
        if tensor.offset > at:
            raise BadHeader(
                f"{path} has a hole of {tensor.offset - at} bytes between {before} "
                f"and tensor {short(name)}"
            )
        at, before = tensor.offset + tensor.nbytes, f"tensor {short(name)}"
    if size > expected:
        raise BadHeader(
            f"{path} has {size - expected} bytes after {before} that belong to no tensor"
        )


def short(value: object) -> str:
    """Show a value from a file in a message, at most about 100 characters of it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
