"""The packer: writes a packed copy of a model folder, one file after another.

Promises that the source is only read; that a file under its final name is whole and on the disk; that
a folder without config.json (it comes last) is an unfinished copy and no model; and that the same
command continues an unfinished copy of the same, unchanged source, whatever killed it. Memory is
bounded: experts pass through in batches. Bytes are copied, never converted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expertd.store.index import ExpertIndex, ModelIndex, Tensor
from expertd.store.platform import Source, open_source
from expertd.store.shards import INDEX_NAME
from expertd_protocol.errors import (
    BadConfig,
    ExpertdError,
    NoSpace,
    ReadFailed,
    TruncatedFile,
    UnsupportedLayout,
)
from expertd_protocol.layout import round_up
from expertd_protocol.messages import LayerSource
from expertd_protocol.packed import (
    CHECKSUMS_KEY,
    LAYER_KEY,
    RECORD_ALIGN_BYTES,
    PackedLayer,
    crc32_text,
    plan_layer,
)

#: Which source an unfinished copy is of. Hidden: model folders are read without such names.
JOURNAL = ".expertd-pack.json"
PARTIAL = ".partial"
#: What is in memory at once, twice: as it was and as it will be.
BATCH_BYTES = 16 << 20
#: Room that must stay beside the files: directories, the index, the journal.
SPARE_BYTES = 1 << 20

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".npz", ".incomplete")

Progress = Callable[[int], None]


@dataclass(frozen=True)
class _File:
    """One shard to write: its tensors back to back behind a header that ends on a boundary.

    `sources` are tensors copied as they are; else `layer` and `number` say which experts are packed.
    """

    name: str
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    sources: tuple[Tensor, ...] = ()
    layer: PackedLayer | None = None
    number: int = 0

    @property
    def data_bytes(self) -> int:
        return sum(nbytes for *_, nbytes in self.tensors)

    @property
    def nbytes(self) -> int:
        return len(self.header(self.metadata({}))) + self.data_bytes

    def metadata(self, checksums: dict[str, str]) -> dict[str, str]:
        """Return the metadata; without checksums, it is as long as with them."""
        if self.layer is None:
            found = {name: checksums.get(name, crc32_text(0)) for name, *_ in self.tensors}
            return {"format": "mlx", CHECKSUMS_KEY: json.dumps(found)}
        crc32 = tuple(checksums.values()) or self.layer.crc32
        layer = self.layer.model_copy(update={"crc32": crc32})
        return {"format": "mlx", LAYER_KEY: layer.model_dump_json()}

    def header(self, metadata: dict[str, str]) -> bytes:
        entries: dict[str, object] = {"__metadata__": metadata}
        at = 0
        for name, dtype, shape, nbytes in self.tensors:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes)}
            at += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        length = round_up(8 + len(text), RECORD_ALIGN_BYTES) - 8
        return struct.pack("<Q", length) + text.ljust(length)  # the format allows spaces


class Packer:
    """One copy, planned from headers; nothing is written before `run`."""

    def __init__(
        self,
        index: ModelIndex,
        layers: Sequence[LayerSource],
        experts: int,
        out: Path,
        *,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        """Check what can be checked without writing.

        Raises:
            UnsupportedLayout: the source is packed, or not what `layers` says.
            BadConfig: `out` is no place for it.
            NoSpace: the disk of `out` is too small; the message has the numbers.
        """
        check_source(index)
        self.index = index
        self.experts = ExpertIndex(index, layers, experts)
        self.out = out.expanduser().absolute()
        self._check_place()
        self.files = _plan(index, layers, experts)
        self._extras = _extras(index.folder)
        self._journal = json.dumps(
            {
                "source": str(index.folder),
                "shards": [[s.name, *vars(s.identity).values()] for s in index.shards],
                "files": [[file.name, file.nbytes] for file in self.files],
                "layers": [layer.model_dump(mode="json") for layer in layers],
            },
            sort_keys=True,
        )
        self._check_journal()
        self._check_space(statvfs)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(file.nbytes for file in self.files)

    @property
    def done_bytes(self) -> int:
        """Bytes of the shards that are finished."""
        return sum(file.nbytes for file in self.files if self._finished(file))

    @property
    def padding_bytes(self) -> int:
        """What packing adds: room between parts, behind records, and behind headers."""
        return self.total_bytes - self.index.nbytes

    def _check_place(self) -> None:
        source, out = self.index.folder, self.out.resolve()
        if out.is_relative_to(source) or source.is_relative_to(out):
            raise BadConfig(
                f"{self.out} and the model's own folder {source} lie one inside the other; "
                "choose another folder"
            )
        if self.out.exists() and not self.out.is_dir():
            raise BadConfig(f"{self.out} is a file; choose a folder that is new or empty")

    def _check_journal(self) -> None:
        # a journal that was not finished either is as good as none
        if not self.out.exists() or {p.name for p in self.out.iterdir()} <= {JOURNAL + PARTIAL}:
            return
        try:
            journal = (self.out / JOURNAL).read_text()
        except FileNotFoundError:
            raise BadConfig(
                f"{self.out} is not empty and not an unfinished packed copy (a finished one is left "
                "as it is); choose another folder"
            ) from None
        if journal != self._journal:
            raise BadConfig(
                f"{self.out} is an unfinished packed copy of another model, or of "
                f"{self.index.folder} before it changed; delete it or choose another folder"
            )

    def _check_space(self, statvfs: Callable[[Path], os.statvfs_result]) -> None:
        there = next(p for p in (self.out, *self.out.parents) if p.exists())
        disk = statvfs(there)
        free = disk.f_bavail * disk.f_frsize
        free += sum(p.stat().st_size for p in self.out.glob(f"*{PARTIAL}"))  # written over
        need = self.total_bytes - self.done_bytes + SPARE_BYTES
        need += sum(p.stat().st_size for p in self._extras)
        if need > free:
            raise NoSpace(
                f"packing into {self.out} needs {need:,} more bytes, its disk has {free:,} free; "
                f"free {need - free:,} bytes or choose another disk"
            )

    def _finished(self, file: _File) -> bool:
        # renamed after fsync and only then: the name and the size say that it is whole
        path = self.out / file.name
        return path.exists() and path.stat().st_size == file.nbytes

    # --- writing -----------------------------------------------------------------------------
    def run(self, progress: Progress = lambda nbytes: None) -> None:
        """Write what is not there yet; `progress` is told the bytes of each piece.

        Raises:
            NoSpace: the disk became full. ModelChanged, ReadFailed: the source did.
            BadConfig: another process is writing the same copy.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with _locked(self.out):
                self._check_journal()
                self._write_small(JOURNAL, self._journal.encode())
                with contextlib.ExitStack() as stack:
                    sources = [
                        stack.enter_context(contextlib.closing(source))
                        for source in map(_open, self.index.shards)
                    ]
                    for file in self.files:
                        if not self._finished(file):
                            self._write(file, sources, progress)
                self._finish()
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(
                    f"the disk of {self.out} is full; make room and run the same command again: it "
                    "continues"
                ) from exc
            raise ExpertdError(
                f"{exc.filename or self.out} cannot be written: {exc.strerror}; run the same command "
                "again when that is solved: it continues"
            ) from exc

    def _write(self, file: _File, sources: Sequence[Source], progress: Progress) -> None:
        partial = self.out / (file.name + PARTIAL)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            start = len(file.header(file.metadata({})))
            progress(start)
            copy = self._copy_tensors if file.layer is None else self._copy_experts
            checksums = copy(file, sources, fd, start, progress)
            header = file.header(file.metadata(checksums))
            assert len(header) == start, "the header grew over the data"
            _write_fully(fd, header, 0)
            for source in sources:
                source.check_identity()
            _to_disk(fd)
        finally:
            os.close(fd)
        os.replace(partial, self.out / file.name)
        _sync_folder(self.out)

    def _copy_tensors(
        self, file: _File, sources: Sequence[Source], fd: int, at: int, progress: Progress
    ) -> dict[str, str]:
        checksums = {}
        buffer = np.empty(BATCH_BYTES, np.uint8)
        for tensor in file.sources:
            value = done = 0
            while done < tensor.nbytes:
                piece = buffer[: min(BATCH_BYTES, tensor.nbytes - done)]
                _read_fully(sources[tensor.shard], piece, tensor.offset + done)
                value = zlib.crc32(piece.data, value)
                _write_fully(fd, piece, at + done)
                done += len(piece)
                progress(len(piece))
            at += tensor.nbytes
            checksums[tensor.name] = crc32_text(value)
        return checksums

    def _copy_experts(
        self, file: _File, sources: Sequence[Source], fd: int, at: int, progress: Progress
    ) -> dict[str, str]:
        layer = file.layer
        assert layer is not None
        batch = max(1, BATCH_BYTES // layer.record_bytes)
        records = np.zeros((batch, layer.record_bytes), np.uint8)  # the padding stays zero
        stacked = np.empty(batch * max(part.nbytes for part in layer.parts), np.uint8)
        checksums: dict[str, str] = {}
        for first in range(0, layer.experts, batch):
            n = min(batch, layer.experts - first)
            ranges = self.experts.ranges(file.number, first)
            for part, (shard, offset, nbytes) in zip(layer.parts, ranges, strict=True):
                rows = stacked[: n * nbytes]
                _read_fully(
                    sources[shard], rows, offset
                )  # experts of a stacked part are neighbours
                records[:n, part.offset : part.offset + nbytes] = rows.reshape(n, nbytes)
            for i in range(n):
                checksums[str(first + i)] = crc32_text(zlib.crc32(records[i].data))
            _write_fully(fd, records[:n].reshape(-1), at + first * layer.record_bytes)
            progress(n * layer.record_bytes)
        return checksums

    def _finish(self) -> None:
        weight_map = {name: file.name for file in self.files for name, *_ in file.tensors}
        index = {
            "metadata": {"total_size": sum(file.data_bytes for file in self.files)},
            "weight_map": weight_map,
        }
        self._write_small(INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
        for extra in self._extras:  # config.json is the last
            self._write_small(extra.name, extra.read_bytes())
        for partial in self.out.glob(f"*{PARTIAL}"):
            partial.unlink()
        (self.out / JOURNAL).unlink()
        _sync_folder(self.out)

    def _write_small(self, name: str, content: bytes) -> None:
        partial = self.out / (name + PARTIAL)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.out / name)
        _sync_folder(self.out)


def check_source(index: ModelIndex) -> None:
    """Refuse a folder that is packed already."""
    if index.records:
        raise UnsupportedLayout(f"{index.folder} is packed already; use it as it is")


def _plan(index: ModelIndex, layers: Sequence[LayerSource], experts: int) -> list[_File]:
    """The first file has what is not an expert; then each layer has one."""
    packed = {part.tensor for layer in layers for part in layer.parts}
    rest = tuple(t for name, t in index.tensors.items() if name not in packed)
    count = len(layers) + 1
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = [_File(names[0], tuple((t.name, t.dtype, t.shape, t.nbytes) for t in rest), rest)]
    for number, source in enumerate(layers):
        layer = plan_layer(source, experts)
        shape = (experts, layer.record_bytes)
        tensor = (layer.records, "U8", shape, experts * layer.record_bytes)
        files.append(_File(names[number + 1], (tensor,), (), layer, number))
    return files


def _extras(folder: Path) -> list[Path]:
    """Return config, tokenizer and the like; weights in other formats are not copied."""
    extras = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHTS, PARTIAL)) and path.name != INDEX_NAME
    ]  # fmt: skip
    return sorted(extras, key=lambda path: path.name == "config.json")


def _open(shard: Any) -> Source:
    return open_source(shard.path, shard.identity, "buffered")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadConfig(f"another process is packing into {folder}; wait for it") from None
        yield
    finally:
        os.close(fd)


def _read_fully(source: Source, into: Any, offset: int) -> None:
    done, view = 0, memoryview(into)
    while done < len(view):
        try:
            got = source.preadv([view[done:]], offset + done)
        except OSError as exc:
            raise ReadFailed(
                f"reading {source.path} at offset {offset + done} failed: {exc.strerror}; check the disk"
            ) from exc
        if not got:
            source.check_identity()
            raise TruncatedFile(f"{source.path} ended at byte {offset + done}; download it again")
        done += got
    source.drop_cache(offset, len(view))  # what is read once need not push other things out


def _write_fully(fd: int, content: Any, offset: int) -> None:
    view = memoryview(content)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def _to_disk(fd: int) -> None:
    os.fsync(fd)
    if sys.platform != "darwin":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
