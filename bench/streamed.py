"""A model on disk for benchmarks that only move bytes: as many layers and experts as a trace has.

Random weights in the packed layout (`expertctl pack`): one record per expert, at multiples of 16 KiB,
its parts at multiples of 4 KiB. Every way of having experts in memory reads the same records.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from expertctl.facts import expert_layers
from expertd.store.index import ExpertIndex, build_index
from expertd_client import ModelSource
from expertd_protocol.layout import Part
from expertd_protocol.messages import LayerSource, PartSource

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Record:
    """Where one expert is."""

    shard: int
    offset: int
    nbytes: int


class Streamed:
    """One packed folder, as its headers describe it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = build_index(folder)
        self.shards = index.shards
        layers = expert_layers(index.tensors)
        self.experts = layers[0].experts
        self.sources = tuple(
            LayerSource(
                path=layer.path,
                parts=tuple(
                    PartSource(
                        name=p.name, tensor=f"{layer.path}.{p.name}", dtype=p.dtype, shape=p.shape
                    )
                    for p in layer.parts
                ),
            )
            for layer in layers
        )
        self.index = ExpertIndex(index, self.sources, self.experts)

    @property
    def layers(self) -> int:
        return len(self.sources)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.index.parts(0)

    @property
    def expert_bytes(self) -> int:
        return self.index.expert_bytes(0)

    @property
    def total_bytes(self) -> int:
        return self.index.total_bytes

    @property
    def source(self) -> ModelSource:
        """What a worker attaches with."""
        return ModelSource(self.folder, self.experts, self.sources)

    def record(self, layer: int, expert: int) -> Record:
        """Return the bytes of one expert: its parts follow one another in one file."""
        ranges = self.index.ranges(layer, expert)
        start = min(r.offset for r in ranges)
        return Record(ranges[0].shard, start, max(r.offset + r.nbytes for r in ranges) - start)

    def drop_from_page_cache(self) -> None:
        """Let the kernel forget the files, so that every arm begins cold."""
        for shard in self.shards:
            fd = os.open(shard.path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages cannot be dropped
                if hasattr(os, "posix_fadvise"):  # not on macOS
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def ensure(data: Path, layers: int, experts: int, hidden: int, width: int) -> Streamed:
    """Return the model of that shape under `data`, written first where it is missing."""
    folder = data / f"replay-{layers}x{experts}-{hidden}x{width}"
    if not (folder / "config.json").exists() or (folder / ".expertd-pack.json").exists():
        plain = folder.with_name(folder.name + "-plain")
        for old in (plain, folder):
            shutil.rmtree(old, ignore_errors=True)
        tool = ROOT / "tools" / "write_synthetic_model.py"
        shape = {"layers": layers, "experts": experts, "hidden": hidden, "width": width}
        flags = [text for name, n in shape.items() for text in (f"--{name}", str(n))]
        try:
            _run([str(tool), str(plain), *flags, "--top-k", "2"])
            _run(["-m", "expertctl", "pack", str(plain), str(folder)])
        finally:
            shutil.rmtree(plain, ignore_errors=True)
    return Streamed(folder)


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=sys.stderr)
