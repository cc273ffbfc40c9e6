"""A model folder: headers are the truth, holes are refused, experts are byte ranges."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from expertd.store.header import Identity
from expertd.store.index import ExpertIndex, ModelIndex, Shard, Tensor, build_index
from expertd_protocol.errors import (
    BadHeader,
    DuplicateTensor,
    ExpertdError,
    GitLfsPointer,
    MissingShard,
    ModelNotFound,
    NotAModel,
    TruncatedFile,
    UnsupportedLayout,
)
from expertd_protocol.layout import Part
from expertd_protocol.messages import LayerSource, PartSource
from tests.safetensors_files import (
    LFS_POINTER,
    Raw,
    expert_tensors,
    pattern,
    shard_names,
    write_file,
    write_header,
    write_index,
    write_model,
)

NORM = {"model.norm.weight": Raw("BF16", (4,), bytes(8))}


def refused(error: type[ExpertdError], folder: Path, *words: str) -> str:
    with pytest.raises(error) as caught:
        build_index(folder)
    message = caught.value.message
    assert type(caught.value) is error
    assert str(folder) in message
    for word in words:
        assert word in message
    return message


def layer_source(layer: int, *, hidden: int = 64, width: int = 32) -> LayerSource:
    """Say what a worker says of a layer made by `expert_tensors`."""
    path = f"model.layers.{layer}.mlp.switch_mlp"
    parts = []
    for projection, out, into in (
        ("gate_proj", width, hidden),
        ("up_proj", width, hidden),
        ("down_proj", hidden, width),
    ):
        for kind in ("weight", "scales", "biases"):
            shape = (out, into // 8) if kind == "weight" else (out, into // 32)
            parts.append(
                PartSource(
                    name=f"{projection}.{kind}",
                    tensor=f"{path}.{projection}.{kind}",
                    dtype="U32" if kind == "weight" else "BF16",
                    shape=shape,
                )
            )
    return LayerSource(path=path, parts=tuple(parts))


def one_part(tensor: str, dtype: str, shape: tuple[int, ...], path: str = "mlp") -> LayerSource:
    return LayerSource(
        path=path, parts=(PartSource(name="p", tensor=tensor, dtype=dtype, shape=shape),)
    )


# --- the folder ----------------------------------------------------------------------------------
def test_a_model_of_two_shards_is_indexed_whole(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), {**expert_tensors(1), **NORM}])

    index = build_index(folder)

    assert [shard.name for shard in index.shards] == shard_names(2)
    assert index.warnings == ()
    assert len(index.tensors) == 19
    assert index.nbytes == sum(tensor.nbytes for tensor in index.tensors.values())
    for tensor in index.tensors.values():
        shard = index.shards[tensor.shard]
        assert shard.identity == Identity.of(shard.path)
        assert tensor.offset + tensor.nbytes <= shard.nbytes == shard.path.stat().st_size
    norm = index.tensors["model.norm.weight"]
    assert (norm.shard, norm.dtype, norm.shape, norm.nbytes) == (1, "BF16", (4,), 8)


def test_links_of_the_hugging_face_cache_are_followed_once(tmp_path: Path) -> None:
    real = write_model(tmp_path / "m", [NORM])
    snapshot = tmp_path / "snapshots" / "abc"
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")

    (shard,) = build_index(snapshot).shards

    assert shard.path == Path(os.path.realpath(blobs / "hash-model.safetensors"))
    assert shard.name == "model.safetensors"


def test_a_link_to_a_blob_that_is_gone_is_a_missing_shard_A03(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    gone = folder / shard_names(2)[1]
    gone.unlink()
    gone.symlink_to("../blobs/none")

    refused(MissingShard, folder, f"{gone.name} (9 tensors)")


def test_wrong_paths_are_told_apart(tmp_path: Path) -> None:
    refused(ModelNotFound, tmp_path / "none", "does not exist")
    file = tmp_path / "file"
    file.write_text("x")
    refused(NotAModel, file, "is a file")
    refused(ModelNotFound, file / "below", "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(NotAModel, empty, "no config.json")
    (empty / "config.json").symlink_to("nowhere")
    refused(NotAModel, empty, "config.json is a link to a file that is gone")
    with pytest.raises(ModelNotFound, match="null"):
        build_index(Path("a\0b"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ["holds no weights"]),
        (["pytorch_model-00001-of-00002.bin"], ["pytorch_model-00001-of-00002.bin", "mlx_lm"]),
        (["model-q4.gguf"], ["model-q4.gguf"]),
        (["weights.00.safetensors", "consolidated.safetensors"], ["only model*.safetensors"]),
        (["a.pt", "b.pt", "c.pt", "d.pt"], ["a.pt, b.pt, c.pt and 1 more"]),
    ],
)
def test_a_folder_without_model_files_says_what_it_holds_instead(
    tmp_path: Path, names: list[str], words: list[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in names:
        (tmp_path / name).write_bytes(b"x")

    refused(NotAModel, tmp_path, *words)


def test_twins_that_start_with_a_dot_are_ignored_A09(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    expected = build_index(folder)
    for name in [*shard_names(2), "model.safetensors.index.json", "config.json"]:
        (folder / f"._{name}").write_bytes(pattern(4096))

    assert build_index(folder) == expected


@pytest.mark.parametrize(
    ("content", "error"),
    [(LFS_POINTER, GitLfsPointer), (b"", TruncatedFile), (b"not weights at all", BadHeader)],
)
def test_one_bad_shard_refuses_the_folder_and_is_named_A01_A31(
    tmp_path: Path, content: bytes, error: type[ExpertdError]
) -> None:
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    (folder / shard_names(2)[1]).write_bytes(content)

    refused(error, folder, shard_names(2)[1])


def test_a_truncated_shard_refuses_the_folder_A03(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    path = folder / shard_names(2)[1]
    whole = path.stat().st_size
    os.truncate(path, whole * 6 // 10)

    refused(TruncatedFile, folder, path.name, str(whole), str(whole * 6 // 10))


# --- which files ---------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", [(2,), (4,), (0,), (1, 3)])
@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shards_are_all_named_with_their_tensors_A05(
    tmp_path: Path, missing: tuple[int, ...], with_index: bool
) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(n) for n in range(5)], index=with_index)
    names = [shard_names(5)[n] for n in missing]
    for name in names:
        (folder / name).unlink()

    message = refused(MissingShard, folder, *names)

    assert message.count("(9 tensors)") == (len(missing) if with_index else 0)
    assert not any(name in message for name in shard_names(5) if name not in names)


def test_all_shards_missing_is_a_missing_shard_not_an_unknown_folder_A05(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), NORM])
    for name in shard_names(2):
        (folder / name).unlink()

    refused(MissingShard, folder, f"{shard_names(2)[0]} (9 tensors)", f"{shard_names(2)[1]} (1 te")


def test_a_missing_file_without_a_number_is_refused_too_A05(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    write_index(
        folder, {"model.norm.weight": "model.safetensors", "lost": "model-extra.safetensors"}
    )

    refused(MissingShard, folder, "model-extra.safetensors (1 tensors)")


def test_a_stale_index_is_a_warning_when_the_files_are_complete_A06(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), expert_tensors(1)])
    write_index(folder, {f"layers.{n}.experts.gate_up_proj": shard_names(30)[n] for n in range(30)})

    index = build_index(folder)

    assert sorted(index.tensors) == sorted([*expert_tensors(0), *expert_tensors(1)])
    assert len(index.warnings) == 1
    assert "stale" in index.warnings[0]
    assert "30 files" in index.warnings[0]


def test_a_stale_index_does_not_excuse_a_missing_file_A05_A06(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), expert_tensors(1)])
    write_index(folder, {f"old.{n}": shard_names(30)[n] for n in range(30)})
    (folder / shard_names(2)[1]).unlink()

    refused(MissingShard, folder)


def test_an_index_that_names_the_wrong_file_of_a_tensor_is_a_warning_A06(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), NORM])
    write_index(
        folder,
        dict.fromkeys([*expert_tensors(0), *NORM], shard_names(2)[0])
        | {"other": shard_names(2)[1]},
    )

    index = build_index(folder)

    assert index.shards[index.tensors["model.norm.weight"].shard].name == shard_names(2)[1]
    assert "stale: 2 tensors" in index.warnings[0]


def test_tensors_that_the_index_does_not_know_are_used_with_a_warning(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    write_file(folder / "model-mtp.safetensors", {"mtp.norm": Raw("U8", (1,), b"1")})

    index = build_index(folder)

    assert "mtp.norm" in index.tensors
    assert "1 tensors" in index.warnings[0]
    assert "model-mtp.safetensors" in index.warnings[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../../etc/passwd"}}',
        '{"weight_map": {"a": "m", "a": "n"}}',
        '{"weight_map": ' + "[" * 100_000,
        "\xff",
    ],
)
def test_an_unusable_index_is_ignored_with_a_warning_A06(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))

    index = build_index(folder)

    assert list(index.tensors) == ["model.norm.weight"]
    assert len(index.warnings) == 1
    assert "is ignored" in index.warnings[0]


def test_an_index_that_is_a_link_to_nothing_is_ignored_with_a_warning(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM], index=False)
    (folder / "model.safetensors.index.json").symlink_to("nowhere")

    assert "does not exist" in build_index(folder).warnings[0]


def test_a_stray_second_copy_of_the_tensors_is_refused_and_named_A07(tmp_path: Path) -> None:
    """Also with an index that selects the shards: mlx-lm would read the stray file all the same."""
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    stray = {name: Raw("U8", (3,), b"abc") for name in expert_tensors(0)}
    write_file(folder / "model.safetensors", stray)

    refused(
        DuplicateTensor,
        folder,
        shard_names(2)[1],
        "model.safetensors",
        "9 tensors",
        "move the one its index does not name, model.safetensors,",
    )


def test_two_shards_with_the_same_tensors_are_refused_A26(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [expert_tensors(0), expert_tensors(0)], index=False)

    refused(DuplicateTensor, folder, *shard_names(2), "move one of them")


def test_shards_numbered_from_zero_are_complete(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM], index=False)
    (folder / "model.safetensors").unlink()
    write_file(folder / "model-00000-of-00002.safetensors", NORM)
    write_file(folder / "model-00001-of-00002.safetensors", expert_tensors(0))

    assert len(build_index(folder).tensors) == 10


def test_a_consistent_index_overrules_odd_numbers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_index(folder, {"model.norm.weight": "model-00001-of-00002.safetensors"})

    assert build_index(folder).warnings == ()


def test_a_huge_number_in_a_file_name_is_only_a_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM], index=False)
    (folder / "model.safetensors").rename(folder / "model-1-of-99999999999999.safetensors")

    assert len(build_index(folder).tensors) == 1


# --- experts -------------------------------------------------------------------------------------
def test_every_expert_is_found_byte_for_byte_in_the_file(tmp_path: Path) -> None:
    layers = [expert_tensors(0), expert_tensors(1)]
    folder = write_model(tmp_path / "m", layers, pad_header=3)
    index = build_index(folder)

    experts = ExpertIndex(index, [layer_source(0), layer_source(1)], 8)

    assert len(experts) == 2
    for layer, tensors in enumerate(layers):
        for expert in range(8):
            ranges = experts.ranges(layer, expert)
            assert sum(r.nbytes for r in ranges) == experts.expert_bytes(layer)
            for part, source, where in zip(
                experts.parts(layer), layer_source(layer).parts, ranges, strict=True
            ):
                content = index.shards[where.shard].path.read_bytes()
                raw = tensors[source.tensor].data
                size = len(raw) // 8
                assert part == Part(source.name, source.dtype, source.shape)
                assert part.nbytes == where.nbytes == size
                assert (
                    content[where.offset : where.offset + size]
                    == raw[expert * size : (expert + 1) * size]
                )
    assert experts.total_bytes == sum(len(r.data) for t in layers for r in t.values())


def test_parts_may_have_other_sizes_per_layer_and_no_inner_shape(tmp_path: Path) -> None:
    tensors = {
        "a": Raw("F8_E4M3", (4, 6), pattern(24)),
        "b": Raw("F32", (4,), pattern(16)),
    }
    index = build_index(write_model(tmp_path / "m", [tensors]))

    experts = ExpertIndex(index, [one_part("a", "U8", (6,)), one_part("b", "F32", ())], 4)

    assert experts.parts(0) == (Part("p", "U8", (6,)),)
    assert [experts.expert_bytes(0), experts.expert_bytes(1)] == [6, 4]
    assert experts.ranges(1, 3)[0].offset == index.tensors["b"].offset + 12
    with pytest.raises(IndexError):
        experts.ranges(1, 4)
    with pytest.raises(IndexError):
        experts.ranges(1, -1)


@pytest.mark.parametrize(
    ("source", "experts", "words"),
    [
        (one_part("w", "U32", (4, 2)), 16, ["U32 [8, 4, 2]", "U32 [16, 4, 2]"]),
        (one_part("w", "U32", (4, 4)), 8, ["U32 [8, 4, 2]", "U32 [8, 4, 4]"]),
        (one_part("w", "U32", (2, 4)), 8, ["[8, 4, 2]", "[8, 2, 4]"]),
        (one_part("w", "BF16", (4, 2)), 8, ["(256 bytes)", "(128 bytes)"]),
        (one_part("w", "F4", (4, 2)), 8, ["'F4'", "not read"]),
        (one_part("none", "U32", (4, 2)), 8, ["'none'", "layer mlp"]),
    ],
)
def test_a_part_that_is_stored_otherwise_is_refused_with_both_shapes(
    tmp_path: Path, source: LayerSource, experts: int, words: list[str]
) -> None:
    folder = write_model(tmp_path / "m", [{"w": Raw("U32", (8, 4, 2), pattern(256))}])
    index = build_index(folder)

    with pytest.raises(UnsupportedLayout) as caught:
        ExpertIndex(index, [source], experts)
    for word in [str(folder), *words]:
        assert word in caught.value.message


def test_a_part_listed_twice_is_refused(tmp_path: Path) -> None:
    index = build_index(write_model(tmp_path / "m", [{"w": Raw("U8", (2, 1), b"12")}]))
    part = PartSource(name="p", tensor="w", dtype="U8", shape=(1,))

    with pytest.raises(UnsupportedLayout, match="lists a part twice"):
        ExpertIndex(index, [LayerSource(path="mlp", parts=(part, part))], 2)


@pytest.mark.parametrize(
    ("names", "meaning"),
    [
        (["mlp.experts.0.gate_proj.weight"], "one tensor per expert"),
        (["block_sparse_moe.experts.3.w1.weight"], "one tensor per expert"),
        (
            ["mlp.experts.0.up_proj.weight", "mlp.experts.0.up_proj.weight_scale_inv"],
            "FP8 block checkpoint",
        ),
        (["mlp.experts.0.up_proj.qweight"], "AWQ or GPTQ"),
        (["mlp.experts.0.up_proj.weight_packed"], "compressed-tensors"),
        (["mlp.experts.gate_up_proj"], "fused in one tensor"),
        (["mlp.switch_mlp.gate_up_proj.weight"], "fused in one tensor"),
    ],
)
def test_a_layout_that_is_not_read_is_named_with_the_command_that_fixes_it_A19(
    tmp_path: Path, names: list[str], meaning: str
) -> None:
    folder = write_model(tmp_path / "my model", [{name: Raw("U8", (1,), b"1") for name in names}])
    index = build_index(folder)

    with pytest.raises(UnsupportedLayout) as caught:
        ExpertIndex(index, [one_part("mlp.switch_mlp.up_proj.weight", "U32", (4,))], 8)

    message = caught.value.message
    assert meaning in message
    assert names[-1] in message
    assert f"mlx_lm.convert --hf-path '{folder}' --mlx-path OUT -q" in message
    assert "\n" not in message


def test_a_large_model_is_checked_in_far_less_than_its_attach_may_take() -> None:
    layers, experts = 94, 128
    tensors, sources, at = {}, [], 0
    for layer in range(layers):
        source = layer_source(layer, hidden=4096, width=1536)
        for part in source.parts:
            nbytes = experts * Part(part.name, part.dtype, part.shape).nbytes
            tensors[part.tensor] = Tensor(
                part.tensor, part.dtype, (experts, *part.shape), 0, at, nbytes
            )
            at += nbytes
        sources.append(source)
    shard = Shard(Path("model.safetensors"), Identity(0, 0, at, 0), at, "model.safetensors")
    index = ModelIndex(Path("m"), (shard,), tensors, (), at)

    times = []
    for _ in range(5):
        start = time.perf_counter()
        expert_index = ExpertIndex(index, sources, experts)
        times.append(time.perf_counter() - start)

    assert expert_index.total_bytes == at
    assert min(times) < 0.050


def test_the_model_folder_is_only_read_A32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM, expert_tensors(0)])
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        build_index(folder)
    finally:
        folder.chmod(0o755)
    assert {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()} == before


def test_a_folder_that_was_moved_away_is_not_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    build_index(folder)
    shutil.rmtree(folder)

    refused(ModelNotFound, folder)


def test_a_malformed_header_names_the_file_in_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", [NORM])
    write_header(folder / "model.safetensors", b"{}", b"123")

    refused(BadHeader, folder, "model.safetensors", "3 bytes")
