"""A packed folder streams exactly what the original does; nothing ever computes with a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from expertctl.packer import Packer
from expertd.cache.budget import minimum_budget
from expertd.store.index import ExpertIndex, build_index
from expertd_client import Client
from expertd_mlx import prepare, stream_of, streamed_classes
from expertd_mlx.load import expert_layers
from expertd_mlx.packed import unpacked
from expertd_protocol.errors import BadHeader, UnsupportedLayout
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.system.daemon import real_daemon
from tests.tiny_models import TinyModel, write_tiny_model

PROMPTS = ((1, 1), (7, 3), (70, 1))
STEPS = 6


def pack(model: TinyModel, out: Path) -> TinyModel:
    layers, experts = expert_layers(model.path)
    Packer(build_index(model.path), layers, experts, out).run()
    return replace(model, path=out)


def streamed(path: Path) -> nn.Module:
    return load_model(path, lazy=True, get_model_classes=partial(streamed_classes, path=path))[0]


@pytest.mark.parametrize(
    ("family", "quantization", "view", "mode"),
    [
        ("qwen3_moe", "affine4", "map", "auto"),
        ("deepseek_v3", "float32", "copy", "buffered"),
        ("gpt_oss", "mxfp4", "map", "auto"),
        ("nemotron_h", "affine4", "copy", "auto"),
        ("gemma4", "affine8", "map", "auto"),
    ],
)
def test_a_packed_folder_streams_bit_for_bit_through_a_real_daemon(
    tmp_path: Path, family: str, quantization: str, view: str, mode: str
) -> None:
    mx.random.seed(7)
    model = write_tiny_model(tmp_path / "plain", family, quantization)
    expected = load_model(model.path)[0]
    packed = pack(model, tmp_path / "packed")
    ours = streamed(packed.path)
    stream = stream_of(ours)
    stream.arena_view = view

    index = ExpertIndex(build_index(packed.path), stream.layers, stream.experts)
    parts = [index.parts(layer) for layer in range(len(index))]
    least = minimum_budget(parts, index.experts, model.top_k)

    with real_daemon(str(least), "--poison-free-slots", "--read-mode", mode) as daemon:
        stream.attach(Client.connect(daemon.run_dir), packed.path)
        try:
            for p in PROMPTS:
                theirs = greedy(expected, prompt(*p), STEPS)
                assert first_difference(greedy(ours, prompt(*p), STEPS), theirs) is None, p
            stats = daemon.stats()
        finally:
            stream.close()

    assert stats.evictions > 0
    assert stats.sessions[0].mismatches == 0
    read = {Path(f.path).name for f in stats.models[0].files if f.reads}
    assert "model-00001-of" not in " ".join(read)  # the weights beside the experts


def test_the_layers_of_a_packed_folder_are_those_of_the_original(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    model = tiny("qwen3_moe", "affine4")
    packed = pack(model, tmp_path / "packed")

    assert expert_layers(packed.path) == expert_layers(model.path)
    ours, original = streamed(packed.path), streamed(model.path)
    assert stream_of(ours).resident_bytes == stream_of(original).resident_bytes


def test_stock_mlx_lm_refuses_a_packed_folder_and_does_not_guess(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    packed = pack(tiny("qwen3_moe", "affine4"), tmp_path / "packed")

    with pytest.raises(ValueError, match="packed_experts"):
        load_model(packed.path)


def test_a_prepared_folder_may_stand_for_a_packed_one(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    packed = pack(tiny("qwen3_moe", "affine4"), tmp_path / "packed")
    out = prepare(packed.path, tmp_path / "prepared")

    assert stream_of(load_model(out, lazy=True, **_own_code())[0]).path == packed.path


def _own_code() -> dict[str, Any]:
    return {"trust_remote_code": True}


def test_a_packed_tensor_that_is_not_streamed_is_refused(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    """Say, packed by a version that streams more: zeros in its place would be wrong tokens."""
    model = tiny("qwen3_moe", "float32")
    layers, experts = expert_layers(model.path)
    name = "model.norm.weight"
    norm = build_index(model.path).tensors[name]
    out = tmp_path / "packed"
    Packer(build_index(model.path), layers, experts, out).run()
    path = out / "model-00002-of-00003.safetensors"
    old = b'\\"tensor\\":\\"' + layers[0].parts[0].tensor.encode() + b'\\"'
    content = path.read_bytes()
    assert old in content
    # the same length, so that only the name of what the bytes stand for is another one
    new = b'\\"tensor\\":\\"' + name.encode() + b'\\"'
    path.write_bytes(content.replace(old, new + b" " * (len(old) - len(new))))

    assert norm.name == name
    with pytest.raises(UnsupportedLayout, match=r"model\.norm\.weight"):
        streamed(out)


def test_records_without_a_description_are_refused(tmp_path: Path) -> None:
    weights = {"model.layers.0.mlp.switch_mlp.packed_experts": mx.zeros((2, 16384), mx.uint8)}
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(UnsupportedLayout, match="says what is in"):
        unpacked(weights, None)
    with pytest.raises(BadHeader, match=r"model\.safetensors does not say"):
        unpacked(weights, tmp_path)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(UnsupportedLayout, match="says what is in"):
        unpacked(weights, tmp_path)
