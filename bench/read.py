"""Demand reads of experts through the daemon's Reader, against fio on the same files.

    python bench/read.py [--json] [--save] [--data bench/data] [--threads 8]

Two pairs, interleaved in rounds: packed experts (one record, one read) against fio with blocks of one
record, and experts in place (nine reads each) against fio with blocks of the same sizes in the same
mix, widened to 4096 bytes as a direct read must be. Same files, O_DIRECT, random, the same number of
reads at once. Every arm of a round takes offsets of its own. What counts is bytes of experts, so in
place the widening is a loss that is shown, not hidden. The models are written first where they are
missing (tools/write_synthetic_model.py, expertctl pack: 5.5 GB of disk). Without fio nothing can be
compared: `apt-get install fio`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("protocol", "daemon", "client", "bench")]

# ruff: noqa: E402
import record

from expertctl.facts import expert_layers
from expertd.cache.shm import create
from expertd.store.index import ExpertIndex, build_index
from expertd.store.plan import Fill, Piece, Priority
from expertd.store.platform import ReadMode, open_source
from expertd.store.reader import Reader
from expertd.store.tuning import USUAL_THREADS, tuned
from expertd_protocol.errors import ExpertdError
from expertd_protocol.ids import ExpertKey
from expertd_protocol.layout import SlabLayout, round_up
from expertd_protocol.messages import LayerSource, PartSource

#: As four workers would: requests of one layer's misses, so many of them at once.
REQUESTS, EXPERTS_PER_REQUEST = 4, 8
ROUNDS = 5
ROUND_BYTES = 512 << 20
SLOTS = 2 * REQUESTS * EXPERTS_PER_REQUEST


class Model:
    """One folder as the daemon reads it: real index, real sources, real planes."""

    def __init__(self, folder: Path) -> None:
        index = build_index(folder)
        layers = expert_layers(index.tensors)
        sources = tuple(
            LayerSource(
                path=layer.path,
                parts=tuple(
                    PartSource(name=p.name, tensor=f"{layer.path}.{p.name}", dtype=p.dtype, shape=p.shape)
                    for p in layer.parts
                ),
            )
            for layer in layers
        )  # fmt: skip
        self.index = ExpertIndex(index, sources, layers[0].experts)
        self.sources = [open_source(s.path, s.identity) for s in index.shards]
        if bad := [s.path for s in self.sources if s.mode is ReadMode.BUFFERED]:
            raise SystemExit(f"{bad[0]} cannot be read directly; use another disk (--data)")
        self.layout = SlabLayout(self.index.parts(0), SLOTS)
        self.memory = create(self.layout.nbytes)
        self.files = [s.path for s in index.shards if not self.packed or s is not index.shards[0]]
        self.record_bytes = index.records[0].layer.record_bytes if index.records else 0

    @property
    def packed(self) -> bool:
        return bool(self.index.index.records)

    @property
    def expert_bytes(self) -> int:
        return self.index.expert_bytes(0)

    def fill(self, key: ExpertKey, slot: int) -> Fill:
        view = memoryview(self.memory.buffer)
        pieces = []
        for part, (shard, offset, nbytes) in enumerate(self.index.ranges(*key)):
            at, _ = self.layout.row(part, slot)
            pieces.append(Piece(self.sources[shard], offset, view[at : at + nbytes]))
        return Fill(key, (0, slot), tuple(pieces), Priority.DEMAND, b"bench")

    def blocks(self) -> str:
        """Return fio's block sizes: one record, or the parts of an expert in their mix."""
        if self.packed:
            return f"--bs={self.record_bytes}"
        sizes = collections.Counter(
            round_up(part.nbytes + 4096, 4096) for part in self.index.parts(0)
        )
        total = sum(sizes.values())
        shares = [100 * n // total for n in sizes.values()]
        shares[-1] += 100 - sum(shares)
        return "--bssplit=" + ":".join(f"{s}/{p}" for s, p in zip(sizes, shares, strict=True))


class Ours:
    """A Reader and the workers that keep it busy."""

    def __init__(self, threads: int, buffer_bytes: int, straight: bool) -> None:
        self._done: queue.SimpleQueue[tuple[Fill, ExpertdError | None]] = queue.SimpleQueue()
        self.reader = Reader(
            threads=threads,
            buffer_bytes=buffer_bytes,
            on_done=lambda fill, error: self._done.put((fill, error)),
            straight=straight,
        )

    def run(self, model: Model, keys: list[ExpertKey]) -> tuple[float, float]:
        """Read the experts; returns bytes of experts per second, and CPU seconds per GB."""
        free = list(range(SLOTS))
        began, cpu = time.perf_counter(), time.process_time()
        waiting = 0
        at = 0
        while at < len(keys) or waiting:
            while at < len(keys) and waiting <= (REQUESTS - 1) * EXPERTS_PER_REQUEST:
                batch = keys[at : at + EXPERTS_PER_REQUEST]
                at += len(batch)
                waiting += len(batch)
                self.reader.submit([model.fill(key, free.pop()) for key in batch])
            fill, error = self._done.get(timeout=60)
            if error is not None:
                raise error
            waiting -= 1
            free.append(fill.slot[1])
        seconds = time.perf_counter() - began
        nbytes = len(keys) * model.expert_bytes
        return nbytes / seconds, (time.process_time() - cpu) / nbytes * 1e9


def fio(model: Model, nbytes: int, depth: int, seed: int) -> tuple[float, float]:
    """Return what fio reads: bytes per second, and CPU seconds per GB."""
    command = [
        "fio", "--name=read", "--readonly", "--rw=randread", "--direct=1", "--ioengine=libaio",
        f"--filename={':'.join(map(str, model.files))}", f"--io_size={nbytes}", model.blocks(),
        "--blockalign=4096", f"--iodepth={depth}", f"--randseed={seed}", "--norandommap",
        "--file_service_type=random", "--mem=malloc", "--output-format=json",
    ]  # fmt: skip
    # fio's buffers get huge pages as the Reader's do, else it would lose by that alone
    env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    read = job["read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * read["runtime"] / 1e3
    return read["io_bytes"] / read["runtime"] * 1e3, cpu / read["io_bytes"] * 1e9


def straight_is_better(model: Model, buffer_bytes: int) -> bool:
    """Ask as the daemon does at the first open of a model."""
    with tempfile.TemporaryDirectory() as state:
        file = Path(state) / "readers.json"
        way = tuned(model.sources[-1], model.record_bytes, buffer_bytes, USUAL_THREADS, file)
        if not file.exists():
            print("the shards are too small to be measured; reading straight", file=sys.stderr)
    return way.straight


def ensure(data: Path) -> tuple[Path, Path]:
    """Return the folders in place and packed, made where they are missing."""
    plain, packed = data / "synthetic", data / "packed"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:3])}
    if not (plain / "config.json").exists():
        shutil.rmtree(plain, ignore_errors=True)
        tool = ROOT / "tools" / "write_synthetic_model.py"
        subprocess.run([sys.executable, str(tool), str(plain)], check=True, stdout=sys.stderr)
    if not (packed / "config.json").exists() or (packed / ".expertd-pack.json").exists():
        subprocess.run(
            [sys.executable, "-m", "expertctl", "pack", str(plain), str(packed)],
            check=True, env=env, stdout=sys.stderr,
        )  # fmt: skip
    return plain, packed


@contextmanager
def opened(folder: Path) -> Iterator[Model]:
    model = Model(folder)
    try:
        yield model
    finally:
        for source in model.sources:
            source.close()
        model.memory.close()


def measure(
    plain: Path, packed: Path, threads: int, buffer_bytes: int, rounds: int
) -> dict[str, Any]:
    samples: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    rng = random.Random(os.getpid())
    with opened(plain) as in_place, opened(packed) as records:
        arms = {"packed": records, "in_place": in_place}
        straight = straight_is_better(records, buffer_bytes)
        ours = Ours(threads, buffer_bytes, straight)
        n = ROUND_BYTES // in_place.expert_bytes
        everything = [
            ExpertKey(layer, expert)
            for layer in range(len(in_place.index))
            for expert in range(in_place.index.experts)
        ]
        for _ in range(rounds):
            order = [(name, who) for name in arms for who in ("ours", "fio")]
            rng.shuffle(order)
            for name, who in order:
                model = arms[name]
                if who == "ours":
                    by_layer = rng.sample(everything, n)
                    samples[name].append(ours.run(model, by_layer))
                else:
                    seed = rng.randrange(1 << 30)
                    nbytes = n * (model.record_bytes or model.expert_bytes)
                    samples[f"fio_{name}"].append(fio(model, nbytes, threads, seed))
        shape = {
            "layers": len(in_place.index), "experts": in_place.index.experts,
            "expert_bytes": in_place.expert_bytes, "record_bytes": records.record_bytes,
            "reads_per_expert_in_place": len(in_place.index.parts(0)),
        }  # fmt: skip
    ours.reader.close(5)
    speed = {name: statistics.median(s[0] for s in values) for name, values in samples.items()}
    cpu = {name: statistics.median(s[1] for s in values) for name, values in samples.items()}
    return {
        "packed_ratio": round(speed["packed"] / speed["fio_packed"], 3),
        "in_place_ratio": round(speed["in_place"] / speed["fio_in_place"], 3),
        **{f"{name}_gb_per_s": round(value / 1e9, 3) for name, value in speed.items()},
        **{f"{name}_cpu_s_per_gb": round(value, 3) for name, value in cpu.items()},
        "rounds": {name: [round(s[0] / 1e9, 3) for s in v] for name, v in samples.items()},
        "threads": threads,
        "straight": straight,
        "buffer_bytes": buffer_bytes,
        "model": shape,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write it to bench/results/")
    parser.add_argument("--data", type=Path, default=ROOT / "bench" / "data")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--buffer-mib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: apt-get install fio (macOS: brew install fio)")
    plain, packed = ensure(args.data)
    load = os.getloadavg()[0]
    figures = measure(plain, packed, args.threads, args.buffer_mib << 20, args.rounds)
    fio_version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    figures |= record.circumstances(load) | {"fio": fio_version.stdout.strip()}
    record.finish("read", figures, as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
