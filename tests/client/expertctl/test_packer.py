"""pack: every byte arrives, whatever kills it, and the source is only read."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from expertctl import packer as packer_module
from expertctl.packer import JOURNAL, PARTIAL, Packer
from expertd.store.header import read_header
from expertd.store.index import ExpertIndex, build_index
from expertd.store.plan import Fill, Piece, Priority
from expertd.store.platform import open_source
from expertd.store.reader import Reader
from expertd_protocol.errors import (
    BadConfig,
    BadHeader,
    DuplicateTensor,
    ExpertdError,
    ModelChanged,
    NoSpace,
    TruncatedFile,
    UnsupportedLayout,
)
from expertd_protocol.ids import ExpertKey
from expertd_protocol.layout import DTYPE_BYTES
from expertd_protocol.messages import LayerSource, PartSource
from expertd_protocol.packed import PART_ALIGN_BYTES, RECORD_ALIGN_BYTES
from tests.safetensors_files import Raw, expert_tensors, pattern, write_model
from tests.system.daemon import environment

OTHER = {"model.embed_tokens.weight": Raw("BF16", (3, 5), pattern(30, seed=9))}


def layers_of(tensors: Mapping[str, Raw]) -> tuple[LayerSource, ...]:
    """Every stacked tensor is a part of the layer in its name."""
    layers: dict[str, list[PartSource]] = {}
    for name, raw in tensors.items():
        path, _, part = name.partition(".switch_mlp.")
        if part:
            source = PartSource(name=part, tensor=name, dtype=raw.dtype, shape=raw.shape[1:])
            layers.setdefault(f"{path}.switch_mlp", []).append(source)
    return tuple(LayerSource(path=path, parts=tuple(parts)) for path, parts in layers.items())


class Written:
    """A model in a folder, and what it is made of."""

    def __init__(self, folder: Path, shards: list[dict[str, Raw]], experts: int) -> None:
        self.folder = write_model(folder, shards, pad_header=3)
        self.tensors = {name: raw for shard in shards for name, raw in shard.items()}
        self.layers = layers_of(self.tensors)
        self.experts = experts

    def packer(self, out: Path, **options: object) -> Packer:
        index = build_index(self.folder)
        return Packer(index, self.layers, self.experts, out, **options)  # type: ignore[arg-type]

    def expert(self, layer: int, expert: int) -> list[bytes]:
        parts = []
        for part in self.layers[layer].parts:
            data = self.tensors[part.tensor].data
            n = len(data) // self.experts
            parts.append(data[expert * n : (expert + 1) * n])
        return parts


@pytest.fixture
def model(tmp_path: Path) -> Written:
    return Written(tmp_path / "model", [expert_tensors(0) | OTHER, expert_tensors(1)], 8)


def state(folder: Path) -> dict[str, tuple[str, int, int]]:
    return {
        f.name: (hashlib.sha256(f.read_bytes()).hexdigest(), f.stat().st_mtime_ns, f.stat().st_mode)
        for f in folder.iterdir()
    }


def read_expert(
    folder: Path, layers: tuple[LayerSource, ...], key: ExpertKey, n: int, mode: str
) -> list[bytes]:
    """Read one expert through the daemon's own Reader."""
    index = ExpertIndex(build_index(folder), layers, n)
    sources = [open_source(s.path, s.identity, mode) for s in index.index.shards]  # type: ignore[arg-type]
    answers: queue.SimpleQueue[ExpertdError | None] = queue.SimpleQueue()
    reader = Reader(threads=2, buffer_bytes=64 << 10, on_done=lambda _, error: answers.put(error))
    try:
        ranges = index.ranges(*key)
        memory = [bytearray(b"\xee" * r.nbytes) for r in ranges]
        pieces = tuple(
            Piece(sources[r.shard], r.offset, memoryview(m))
            for r, m in zip(ranges, memory, strict=True)
        )
        reader.submit([Fill(key, (0, 0), pieces, Priority.DEMAND, b"s")])
        assert answers.get(timeout=20) is None
        return [bytes(m) for m in memory]
    finally:
        reader.close(5)
        for source in sources:
            source.close()


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_every_expert_comes_back_byte_for_byte(model: Written, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out"
    model.packer(out).run()

    for layer in range(2):
        for expert in range(8):
            key = ExpertKey(layer, expert)
            assert read_expert(out, model.layers, key, 8, mode) == model.expert(layer, expert)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    experts=st.integers(1, 9),
    parts=st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(1, 40), max_size=2)
        ),
        min_size=1,
        max_size=6,
    ),
    batch=st.sampled_from([1, 20_000, 1 << 20]),
)  # fmt: skip
def test_any_shape_and_type_survives(
    experts: int, parts: list[tuple[str, list[int]]], batch: int
) -> None:
    tensors = {}
    for i, (dtype, shape) in enumerate(parts):
        nbytes = experts * int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]
        name = f"model.layers.0.mlp.switch_mlp.p{i}.weight"
        tensors[name] = Raw(dtype, (experts, *shape), pattern(nbytes, seed=i))
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer_module, "BATCH_BYTES", batch)
        model = Written(Path(temporary) / "model", [{**OTHER, **tensors}], experts)
        out = Path(temporary) / "out"
        model.packer(out).run()
        for expert in {0, experts // 2, experts - 1}:
            key = ExpertKey(0, expert)
            assert read_expert(out, model.layers, key, experts, "auto") == model.expert(0, expert)


def test_the_files_are_plain_safetensors_whose_records_lie_on_boundaries(
    model: Written, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    model.packer(out).run()

    for path in sorted(out.glob("*.safetensors")):
        header = read_header(path)
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(header.tensors)
    index = build_index(out)
    assert index.warnings == ()
    assert [r.layer.path for r in index.records] == [layer.path for layer in model.layers]
    for records in index.records:
        assert records.offset % RECORD_ALIGN_BYTES == 0
        assert records.layer.record_bytes % RECORD_ALIGN_BYTES == 0
        assert all(part.offset % PART_ALIGN_BYTES == 0 for part in records.layer.parts)
    original = build_index(model.folder)
    assert {n: (t.dtype, t.shape) for n, t in index.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in original.tensors.items()
    }
    assert index.nbytes == original.nbytes


def test_the_source_is_untouched_and_everything_else_is_copied_A32(
    model: Written, tmp_path: Path
) -> None:
    (model.folder / "tokenizer.json").write_text("{}")
    (model.folder / "consolidated.bin").write_text("other weights")
    (model.folder / "._model.safetensors").write_text("a twin of exFAT")
    for file in model.folder.iterdir():
        file.chmod(0o444)
    before = state(model.folder)

    model.packer(tmp_path / "out").run()

    assert state(model.folder) == before
    names = {f.name for f in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors.index.json"} | {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }


KILLED = """
import json, os, signal, sys
from pathlib import Path
from expertctl import packer
from expertd.store.index import build_index
from expertd_protocol.messages import LayerSource
source, out, at, layers = sys.argv[1:]
steps = 0
def step(*_):
    global steps
    if steps == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1
for name in ("_write_fully", "_to_disk", "_sync_folder"):
    def wrapped(*args, call=getattr(packer, name)):
        step()
        return call(*args)
    setattr(packer, name, wrapped)
packer.BATCH_BYTES = 1 << 16
layers = [LayerSource.model_validate(layer) for layer in json.loads(layers)]
packer.Packer(build_index(Path(source)), layers, 8, Path(out)).run()
print(steps)
"""


def pack_until(model: Written, out: Path, step: int) -> subprocess.CompletedProcess[str]:
    layers = json.dumps([layer.model_dump(mode="json") for layer in model.layers])
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(model.folder), str(out), str(step), layers],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_after_a_kill_at_any_point_the_same_command_continues(
    model: Written, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    steps = int(pack_until(model, whole, 10_000).stdout)
    wanted = {f.name: f.read_bytes() for f in whole.iterdir()}

    for step in sorted({0, 1, 2, steps // 3, steps // 2, 2 * steps // 3, steps - 3, steps - 2}):
        out = tmp_path / f"killed-{step}"
        assert pack_until(model, out, step).returncode == -9
        finished = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
        packer = model.packer(out)
        left = packer.total_bytes - packer.done_bytes
        written: list[int] = []

        packer.run(written.append)

        assert sum(written) == left
        assert {f.name: f.read_bytes() for f in out.iterdir()} == wanted
        assert finished.items() <= {p.name: p.stat().st_mtime_ns for p in out.iterdir()}.items()


def test_an_unfinished_copy_is_no_model(model: Written, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack_until(model, out, 12)

    with pytest.raises(ExpertdError, match=r"has no config\.json"):
        build_index(out)
    assert any(p.name.endswith(PARTIAL) for p in out.iterdir()) or (out / JOURNAL).exists()


def test_a_journal_that_was_cut_short_is_as_good_as_none(model: Written, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / (JOURNAL + PARTIAL)).write_text("{")

    model.packer(out).run()

    assert len(build_index(out).records) == 2
    assert not any(p.name.startswith(".") for p in out.iterdir())


def test_an_unfinished_copy_of_a_changed_model_is_not_continued(
    model: Written, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    pack_until(model, out, 12)
    write_model(model.folder, [expert_tensors(0, seed=1) | OTHER, expert_tensors(1)], pad_header=3)

    with pytest.raises(BadConfig, match="before it changed; delete it"):
        model.packer(out)


def test_a_source_that_changes_meanwhile_is_noticed(model: Written, tmp_path: Path) -> None:
    packer = model.packer(tmp_path / "out")
    first = model.folder / "model-00001-of-00002.safetensors"

    with pytest.raises(ModelChanged):
        packer.run(lambda nbytes: os.utime(first, ns=(1, 1)))

    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_small_disk_is_refused_with_the_numbers_before_anything_is_written(
    model: Written, tmp_path: Path
) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 10  # f_bavail
    small = os.statvfs_result(fields)

    with pytest.raises(
        NoSpace, match=rf"needs [\d,]+ more bytes, its disk has {10 * real.f_frsize:,} free"
    ):
        model.packer(tmp_path / "deep" / "out", statvfs=lambda path: small)

    assert not (tmp_path / "deep").exists()


def test_a_disk_that_becomes_full_says_that_the_command_continues(
    model: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(NoSpace, match="run the same command again: it continues"):
            model.packer(tmp_path / "out").run()
    model.packer(tmp_path / "out").run()
    build_index(tmp_path / "out")


def test_places_that_would_hurt_are_refused(model: Written, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    with pytest.raises(BadConfig, match="is not empty"):
        model.packer(full)
    with pytest.raises(BadConfig, match="one inside the other"):
        model.packer(model.folder / "packed")
    with pytest.raises(BadConfig, match="one inside the other"):
        model.packer(tmp_path)
    with pytest.raises(BadConfig, match="is a file"):
        model.packer(full / "notes")
    assert (full / "notes").read_text() == "mine"


def test_a_packed_folder_is_not_packed_again(model: Written, tmp_path: Path) -> None:
    model.packer(tmp_path / "out").run()

    with pytest.raises(UnsupportedLayout, match="is packed already"):
        Packer(build_index(tmp_path / "out"), model.layers, 8, tmp_path / "twice")


def test_two_at_once_do_not_mix(model: Written, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packer = model.packer(out)
    out.mkdir()
    with packer_module._locked(out), pytest.raises(BadConfig, match="another process is packing"):
        packer.run()
    assert list(out.iterdir()) == []


def test_a_truncated_packed_file_is_named(model: Written, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model.packer(out).run()
    last = out / "model-00003-of-00003.safetensors"
    os.truncate(last, last.stat().st_size - 1)

    with pytest.raises(TruncatedFile, match=f"{last} is truncated"):
        build_index(out)


def test_experts_that_are_there_packed_and_as_they_were_are_refused(
    model: Written, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    model.packer(out).run()
    (out / "model-extra.safetensors").symlink_to(model.folder / "model-00002-of-00002.safetensors")

    with pytest.raises(DuplicateTensor, match="packed and as it was"):
        build_index(out)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('\\"version\\":1', '\\"version\\":2', "version"),
        ('\\"record_bytes\\":', '\\"recorD_bytes\\":', "record_bytes"),
        ('"U8"', '"I8"', "should be U8"),
        ('\\"offset\\":0', '\\"offset\\":9', "wanted a multiple of 4096"),
        ('\\"dtype\\":\\"U32\\"', '\\"dtype\\":\\"U33\\"', "unknown dtype"),
    ],
)
def test_a_description_that_does_not_fit_its_file_is_refused(
    model: Written, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    out = tmp_path / "out"
    model.packer(out).run()
    path = out / "model-00002-of-00003.safetensors"
    content = path.read_bytes()
    assert old.encode() in content
    path.write_bytes(content.replace(old.encode(), new.encode(), 1))

    with pytest.raises(BadHeader, match=reason):
        build_index(out)
