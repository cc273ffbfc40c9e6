"""Models: which layers are streamed, what stays, and what is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.utils import does_model_support_input_embeddings, load_model

from expertd_mlx import stream_of, streamed_classes
from expertd_mlx.models import _FileTensors, stream_experts
from expertd_protocol.errors import (
    BadConfig,
    DenseModel,
    ExpertdError,
    UnsupportedLayout,
    UnsupportedModel,
)
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel, make_model, write_shards

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4")


def load(path: Path, **options: Any) -> nn.Module:
    return load_model(path, get_model_classes=partial(streamed_classes, path=path), **options)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["float32", "mxfp4"])
def test_every_expert_tensor_is_streamed_and_nothing_else_A20_A33(
    family: str,
    quantization: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
) -> None:
    model = tiny(family, quantization)
    stream = stream_of(ours := load(model.path))
    files = json.loads((model.path / "model.safetensors.index.json").read_text())["weight_map"]
    plain = dict(tree_flatten(resident(model.path).parameters()))
    left = dict(tree_flatten(ours.parameters()))

    streamed = {
        f"{layer.path}.{part.name}": part for layer in stream.layers for part in layer.parts
    }
    assert len(stream.layers) == model.layers > 0
    assert all(layer.path.endswith(f".{model.switch_attribute}") for layer in stream.layers)
    assert (stream.experts, stream.top_k) == (model.experts, model.top_k)
    assert {part.tensor for part in streamed.values()} <= files.keys()
    assert left.keys() | streamed.keys() == plain.keys()
    assert not left.keys() & streamed.keys()
    for name, part in streamed.items():
        assert plain[name].shape == (model.experts, *part.shape)
    for name, array in left.items():
        assert mx.array_equal(array, plain[name])
    assert stream.resident_bytes == sum(array.nbytes for array in left.values())


def test_layers_are_numbered_as_they_run(tiny: Callable[..., TinyModel]) -> None:
    model = tiny("qwen3_moe", num_hidden_layers=12, mlp_only_layers=[0, 3])

    paths = [layer.path for layer in stream_of(load(model.path)).layers]

    assert paths == [f"model.layers.{i}.mlp.switch_mlp" for i in (1, 2, *range(4, 12))]


def test_expert_bytes_are_never_read_by_the_worker(tiny: Callable[..., TinyModel]) -> None:
    model = tiny("qwen3_moe", hidden_size=128, moe_intermediate_size=256, num_experts=32)
    expert_bytes = model.layers * 32 * 3 * 128 * 256 * 4
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    ours = load(model.path)

    assert mx.get_peak_memory() - before < expert_bytes / 4
    assert stream_of(ours).resident_bytes < expert_bytes / 4


def test_a_switch_linear_outside_of_an_expert_layer_stays_resident() -> None:
    """deepseek_v41 has one in its attention."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts_norm = nn.RMSNorm(8)
            self.o_a_proj = SwitchLinear(8, 8, 4, bias=False)
            self.moe = SwitchMLP(8, 16, 4, bias=True)
            self.moe.alpha = mx.ones((3,))

    model = Model()
    weights = dict(tree_flatten(model.parameters()))

    stream = stream_experts(model, _FileTensors(weights), {}, None)

    assert [layer.path for layer in stream.layers] == ["moe"]
    names = [part.name for part in stream.layers[0].parts]
    assert sorted(names) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    left = [name for name, _ in tree_flatten(model.parameters())]
    assert sorted(left) == ["experts_norm.weight", "moe.alpha", "o_a_proj.weight"]
    assert type(model.moe).__name__ == "StreamedSwitchMLP"
    assert isinstance(model.moe, SwitchMLP)


def test_layers_of_unequal_experts_are_refused() -> None:
    model = nn.Module()
    model.a, model.b = SwitchGLU(8, 8, 4), SwitchGLU(8, 8, 6)

    with pytest.raises(UnsupportedLayout, match="have 4 and 6 experts"):
        stream_experts(model, _FileTensors(dict(tree_flatten(model.parameters()))), {}, None)


def test_a_dense_model_is_left_to_plain_mlx_lm(tiny: Callable[..., TinyModel]) -> None:
    with pytest.raises(DenseModel, match=r"plain mlx_lm\.generate runs it"):
        load(tiny("qwen3").path)


def test_declared_experts_that_are_not_found_are_an_error_A20() -> None:
    """Not a dense model: that would hide experts left as random numbers."""
    with pytest.raises(UnsupportedModel, match="declares 64 experts"):
        stream_experts(nn.Linear(2, 2), _FileTensors({}), {"num_experts": 64}, Path("folder"))


def test_an_unknown_family_is_named_A28() -> None:
    with pytest.raises(UnsupportedModel, match="does not know the model type 'command_a_moe'"):
        streamed_classes({"model_type": "command_a_moe"})
    with pytest.raises(UnsupportedModel, match="does not say a model_type"):
        streamed_classes({}, Path("folder"))


def raw_mixtral(folder: Path, extra: dict[str, mx.array] | None = None) -> None:
    """One tensor per expert, as Hugging Face has it."""
    from tests.tiny_models import CONFIGS

    model = make_model(CONFIGS["mixtral"], seed=1)
    weights: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        head, switch, tail = name.partition("switch_mlp.")
        if not switch:
            weights[name] = array
            continue
        projection = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[tail.split(".")[0]]
        for expert in range(array.shape[0]):
            weights[f"{head}experts.{expert}.{projection}.weight"] = array[expert]
    folder.mkdir(exist_ok=True)
    write_shards(folder, weights | (extra or {}))
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))


def test_one_tensor_per_expert_is_refused_with_the_command_that_helps_A33(tmp_path: Path) -> None:
    raw_mixtral(tmp_path)
    load_model(tmp_path)  # mlx-lm itself can

    with pytest.raises(UnsupportedLayout) as refused:
        load(tmp_path)

    message = refused.value.message
    assert "model.layers.0.block_sparse_moe.switch_mlp.gate_proj.weight is not stored" in message
    assert f"mlx_lm.convert --hf-path {tmp_path} --mlx-path OUT -q" in message
    assert "\n" not in message


def test_an_fp8_checkpoint_is_one_line_and_not_61000_names_A19(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale_inv"
    raw_mixtral(tmp_path, {name: mx.ones((1, 1))})

    with pytest.raises(UnsupportedLayout, match="FP8 block checkpoint") as refused:
        load(tmp_path)

    assert len(refused.value.message) < 400


def test_a_tensor_that_mlx_lm_does_not_know_is_named_A27(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    source = tiny("mixtral")
    weights: dict[str, mx.array] = {}
    for file in source.path.glob("*.safetensors"):
        weights.update(mx.load(str(file)))
    weights["lm_head.scales"] = mx.ones((2, 2))
    write_shards(tmp_path, weights)
    (tmp_path / "config.json").write_bytes((source.path / "config.json").read_bytes())

    with pytest.raises(UnsupportedLayout, match=r"not in model: lm_head\.scales") as refused:
        load(tmp_path)

    assert "\n" not in refused.value.message
    assert "not in model: \nlm_head.scales" in str(refused.value.__cause__)  # mlx-lm's own words


def test_signature_and_module_are_the_familys_own(
    tiny: Callable[..., TinyModel], resident: Callable[[Path], nn.Module]
) -> None:
    """mlx-lm looks at both."""
    for family in ("qwen3_moe", "deepseek_v3"):
        model = tiny(family)
        ours, plain = load(model.path), resident(model.path)

        assert type(ours).__module__ == type(plain).__module__
        assert isinstance(ours, type(plain))
        supports = does_model_support_input_embeddings
        assert supports(ours) == supports(plain) == (family == "qwen3_moe")


def test_input_embeddings_pass_through(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(32, 16)
    ours, plain = streamed(model, client), resident(model.path)
    embeddings = mx.random.normal((2, 5, 64))
    tokens = prompt(5, 2)

    out = ours(tokens, input_embeddings=embeddings)

    assert mx.array_equal(out, plain(tokens, input_embeddings=embeddings))
    assert client.passes[0][0] == 10


def test_the_smallest_quota_is_the_top_k(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    client = FakeExperts(16, 16)
    ours = streamed(tiny("gemma4"), client)

    assert (client.quota_min, client.quota_wanted) == (2, 8)
    assert client.resident_bytes == stream_of(ours).resident_bytes > 0


def test_lazy_loading_attaches_nowhere_and_two_builds_are_fine(
    tiny: Callable[..., TinyModel],
) -> None:
    """mlx-lm's sharded_load builds a model, looks at it and builds it again."""
    model = tiny("mixtral")
    first = load(model.path, lazy=True, strict=False)
    second = load(model.path, lazy=True, strict=False)

    assert stream_of(first) is not stream_of(second)
    assert stream_of(second).path == model.path
    second.shard(mx.distributed.init()) if hasattr(second, "shard") else None


def test_a_model_without_a_folder_says_so(tiny: Callable[..., TinyModel]) -> None:
    model = load_model(tiny("mixtral").path, get_model_classes=streamed_classes)[0]

    with pytest.raises(BadConfig, match="does not know its folder"):
        model(prompt(3, 1))


def test_adapters_that_change_experts_are_refused(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module], tmp_path: Path
) -> None:
    ours = streamed(tiny("mixtral"), FakeExperts(16, 8))
    name = "model.layers.0.block_sparse_moe.switch_mlp.gate_proj.lora_a"
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: mx.ones((2, 2))})

    with pytest.raises(UnsupportedLayout, match=r"mlx_lm\.fuse"):
        ours.load_weights(str(tmp_path / "adapters.safetensors"), strict=False)
    with pytest.raises(UnsupportedLayout, match=r"mlx_lm\.fuse"):
        ours.load_weights([(name, mx.ones((2, 2)))], strict=False)


def test_other_weights_can_still_be_set(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    ours = streamed(tiny("mixtral"), FakeExperts(16, 8))

    ours.load_weights([("model.norm.weight", mx.full((64,), 2.0))], strict=False)

    assert ours.model.norm.weight[0].item() == 2.0


def test_a_plain_model_has_no_stream(resident: Callable[..., Any], tiny: Any) -> None:
    with pytest.raises(ExpertdError, match="was not loaded by expertd_mlx"):
        stream_of(resident(tiny("mixtral").path))


def test_the_models_folder_is_never_written_A32(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    model = tiny("olmoe", "affine4")

    def state() -> dict[str, tuple[bytes, int]]:
        return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in model.path.iterdir()}

    before = state()
    greedy(streamed(model, FakeExperts(4, 4)), prompt(70, 1), 3)

    assert state() == before


def test_two_models_of_one_family_do_not_share_anything(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    models = [tiny("mixtral", seed=seed) for seed in (1, 2)]
    ours = [streamed(model, FakeExperts(4, 4, hostile=True)) for model in models]

    outs = [greedy(one, prompt(9, 1), 2) for one in (*ours, ours[0])]

    for model, out in zip((*models, models[0]), outs, strict=True):
        assert first_difference(out, greedy(resident(model.path), prompt(9, 1), 2)) is None
    assert not np.array_equal(np.array(outs[0][0]), np.array(outs[1][0]))


def with_quantization(model: TinyModel, folder: Path, quantization: dict[str, Any]) -> TinyModel:
    """The same files with another account of how they are quantised."""
    for file in model.path.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model.path / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return replace(model, path=folder)


def test_bits_of_layers_that_the_config_names_wrongly_are_those_of_the_files_A16(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
) -> None:
    source = tiny("qwen3_moe", "mixed")
    stated = json.loads((source.path / "config.json").read_text())["quantization"]
    names = ("model.language_model.layers.0.mlp.switch_mlp.gate_proj", "model.layers.0.self_attn.x")
    renamed = stated | {key: {"bits": 6, "group_size": 64} for key in names}
    model = with_quantization(source, tmp_path, renamed)

    ours = greedy(streamed(model, FakeExperts(16, 8)), prompt(9, 1), 3)

    assert first_difference(ours, greedy(resident(source.path), prompt(9, 1), 3)) is None


def test_a_quantised_router_that_is_not_in_the_files_is_named_A18(
    tiny: Callable[..., TinyModel], tmp_path: Path
) -> None:
    source = tiny("qwen3_moe", "affine4")
    stated = json.loads((source.path / "config.json").read_text())["quantization"]
    router = {"model.layers.0.mlp.gate": {"bits": 4, "group_size": 32}}
    model = with_quantization(source, tmp_path, stated | router)
    with pytest.raises(ValueError, match="gate"):
        load_model(model.path)  # mlx-lm refuses it as well

    with pytest.raises(UnsupportedLayout, match=r"model\.layers\.0\.mlp\.gate\.scales"):
        load(model.path)
