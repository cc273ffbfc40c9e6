"""The verifier: are the bytes on the disk those that were published, or packed?

Three things can be compared: the checksum of every packed record and of every tensor beside them;
the hash in the name of a blob of the Hugging Face cache (SHA-256 of a large file, git's SHA-1 of a
small one); and, always, headers, sizes and completeness. Where there is nothing to compare the
content with, the result says so. Reads past the page cache where it can: what is checked is what the
disk has.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertd.store.header import Identity, read_header
from expertd.store.index import ModelIndex, Records, Shard, build_index
from expertd.store.platform import Source, open_source
from expertd_protocol.errors import BadHeader, ReadFailed, TruncatedFile
from expertd_protocol.layout import round_up
from expertd_protocol.packed import CHECKSUMS_KEY, crc32_text, parse_checksums

BUFFER_BYTES = 8 << 20
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")

Progress = Callable[[int], None]


@dataclass
class Report:
    """What was compared, what was not, and what differs."""

    folder: Path
    shards: int
    tensors: int
    #: Files whose content was compared with the hash in their blob's name.
    hashed_files: int = 0
    #: Packed experts compared with their checksums.
    records: int = 0
    #: Tensors beside packed experts compared with their checksums.
    checked_tensors: int = 0
    checked_bytes: int = 0
    #: Files whose content there is nothing to compare with.
    unchecked: list[str] = field(default_factory=list)
    #: One sentence for each file, expert or tensor that is not what it should be.
    problems: list[str] = field(default_factory=list)


class Verification:
    """One check, planned from headers; `total_bytes` is what `run` will read."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises the daemon's own errors for a folder that is not sound."""
        self.index: ModelIndex = build_index(folder)
        self._blobs = _blobs(folder)
        self._packed = {records.shard: records for records in self.index.records}
        self._rest: dict[int, dict[str, str]] = {}
        for number, shard in enumerate(self.index.shards):
            if shard.path in self._blobs or number in self._packed:
                continue
            if checksums := _checksums(shard):
                self._rest[number] = checksums

    @property
    def total_bytes(self) -> int:
        shards = self.index.shards
        checked = sum(shards[n].nbytes for n in {*self._packed, *self._rest})
        return checked + sum(path.stat().st_size for path in self._blobs)

    def run(self, progress: Progress = lambda nbytes: None) -> Report:
        """Read everything that can be compared.

        Raises:
            ReadFailed, TruncatedFile, ModelChanged: a file could not be read to its end.
        """
        index = self.index
        report = Report(index.folder, len(index.shards), len(index.tensors))
        for path, (name, digest) in self._blobs.items():
            with closing(open_source(path, Identity.of(path))) as source:
                self._check_blob(source, name, digest, report, progress)
        for number, shard in enumerate(index.shards):
            if number in self._packed or number in self._rest:
                with closing(open_source(shard.path, shard.identity)) as source:
                    if number in self._packed:
                        self._check_records(source, shard, self._packed[number], report, progress)
                    else:
                        self._check_tensors(source, shard, self._rest[number], report, progress)
            elif shard.path not in self._blobs:
                report.unchecked.append(shard.name)
        checked = {shard.path for shard in index.shards} | self._blobs.keys()
        report.unchecked += [
            path.name
            for path in sorted(index.folder.iterdir())
            if path.is_file() and path.name[0] != "." and path.resolve() not in checked
        ]
        return report

    def _check_blob(
        self, source: Source, name: str, digest: str, report: Report, progress: Progress
    ) -> None:
        size = source.identity.size
        hasher: Any
        if len(digest) == 64:
            hasher = hashlib.sha256()
        else:
            hasher = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for piece in _pieces(source, 0, size):
            hasher.update(piece)
            progress(len(piece))
        report.hashed_files += 1
        report.checked_bytes += size
        if hasher.hexdigest() != digest:
            kind = "SHA-256" if len(digest) == 64 else "git SHA-1"
            report.problems.append(
                f"{name} has the {kind} {hasher.hexdigest()}, its name in the cache is {digest}"
            )

    def _check_records(
        self, source: Source, shard: Shard, records: Records, report: Report, progress: Progress
    ) -> None:
        layer = records.layer
        for expert, wanted in enumerate(layer.crc32):
            value = 0
            at = records.offset + expert * layer.record_bytes
            for piece in _pieces(source, at, layer.record_bytes):
                value = zlib.crc32(piece, value)
            progress(layer.record_bytes)
            report.records += 1
            report.checked_bytes += layer.record_bytes
            if crc32_text(value) != wanted:
                report.problems.append(
                    f"expert {expert} of {layer.path} in {shard.name} has the CRC-32 "
                    f"{crc32_text(value)}, it was packed with {wanted}"
                )

    def _check_tensors(
        self,
        source: Source,
        shard: Shard,
        checksums: dict[str, str],
        report: Report,
        progress: Progress,
    ) -> None:
        for name, wanted in checksums.items():
            tensor = self.index.tensors[name]
            value = 0
            for piece in _pieces(source, tensor.offset, tensor.nbytes):
                value = zlib.crc32(piece, value)
                progress(len(piece))
            report.checked_tensors += 1
            report.checked_bytes += tensor.nbytes
            if crc32_text(value) != wanted:
                report.problems.append(
                    f"tensor {name} in {shard.name} has the CRC-32 {crc32_text(value)}, it was "
                    f"packed with {wanted}"
                )


def _blobs(folder: Path) -> dict[Path, tuple[str, str]]:
    """Return path -> (name in the folder, hash) of files that are links into a cache's blobs."""
    found = {}
    for path in sorted(folder.iterdir()):
        real = Path(os.path.realpath(path))
        if real.parent.name == "blobs" and _BLOB.fullmatch(real.name) and real.is_file():
            found[real] = (path.name, real.name)
    return found


def _checksums(shard: Shard) -> dict[str, str]:
    header = read_header(shard.path)
    try:
        found = parse_checksums(header.metadata.get(CHECKSUMS_KEY, "{}"))
    except ValueError as exc:
        raise BadHeader(f"the {CHECKSUMS_KEY} in {shard.path} is malformed: {exc}") from exc
    if found and found.keys() != header.tensors.keys():
        raise BadHeader(
            f"the {CHECKSUMS_KEY} in {shard.path} is of {len(found)} tensors, the file has "
            f"{len(header.tensors)} and not the same; pack the model again"
        )
    return found


def _pieces(source: Source, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a file's bytes in pieces that are valid until the next one."""
    end, buffer = offset + nbytes, _BUFFER
    while offset < end:
        align = source.align
        start = offset - offset % align
        wanted = min(round_up(end, align) - start, len(buffer))
        try:
            got = source.preadv([buffer[:wanted]], start)
        except OSError as exc:
            raise ReadFailed(
                f"reading {source.path} at offset {start} failed: {exc.strerror}; check the disk"
            ) from exc
        until = min(start + got, end)
        if until <= offset:
            source.check_identity()
            raise TruncatedFile(f"{source.path} ended at byte {start + got}; download it again")
        yield buffer[offset - start : until - start]
        if align == 1:
            source.drop_cache(offset, until - offset)
        offset = until
    source.check_identity()


#: Page-aligned, as a direct read wants it. One is enough: a process verifies in one thread.
_BUFFER = memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
