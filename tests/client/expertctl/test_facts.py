"""Facts of a model from its headers."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from expertctl import bundled, facts
from expertd_client.model_folder import read_config
from expertd_protocol.errors import DenseModel, UnsupportedLayout
from expertd_protocol.layout import Part


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = 0


def stack(owner: str, experts: int, *projections: str) -> dict[str, Header]:
    return {f"{owner}.{p}.weight": Header("F32", (experts, 4, 8)) for p in projections}


def test_the_facts_of_the_bundled_model_add_up() -> None:
    found = facts.read_facts(bundled.FOLDER)

    assert (found.family, found.experts, found.top_k, len(found.layers)) == ("qwen3_moe", 32, 4, 6)
    assert found.largest_expert_bytes == 23_040
    assert found.all_experts_bytes == 6 * 32 * 23_040
    assert found.token_bytes == 6 * 4 * 23_040
    assert found.all_experts_bytes + found.other_bytes == found.total_bytes
    assert [n for _, n in found.kinds] == [6] * 9
    assert found.layers[0].path == "model.layers.0.mlp.switch_mlp"


def test_packed_weights_say_how_many_bits_they_have() -> None:
    config = read_config(bundled.FOLDER)
    layer = facts.read_facts(bundled.FOLDER).layers[0]
    bits = {part.name: facts.part_bits(layer, part, config) for part in layer.parts}

    assert bits["gate_proj.weight"] == bits["down_proj.weight"] == 4
    assert bits["gate_proj.scales"] is None


def test_a_module_s_own_group_size_decides_its_bits() -> None:
    parts = (Part("fc1.scales", "U8", (8, 4)), Part("fc1.weight", "U32", (8, 16)))
    layer = facts.ExpertLayer("m.0.x", 4, parts)
    config = {"quantization": {"group_size": 64, "bits": 2, "m.0.x.fc1": {"group_size": 32}}}

    assert facts.part_bits(layer, parts[1], config) == 4
    assert facts.part_bits(layer, parts[1], {}) is None


def test_the_least_budget_is_the_daemon_s_own_and_below_all_experts() -> None:
    found = facts.read_facts(bundled.FOLDER)
    least = facts.minimum_budget(found)

    assert least is not None
    assert 5 * 23_040 < least < found.all_experts_bytes


def test_layers_come_in_the_order_of_their_numbers() -> None:
    tensors: dict[str, Header] = {}
    for i in (10, 2, 0):
        tensors |= stack(f"model.layers.{i}.mlp.switch_mlp", 4, "gate_proj", "up_proj", "down_proj")

    assert [layer.path.split(".")[2] for layer in facts.expert_layers(tensors)] == ["0", "2", "10"]


def test_two_projections_and_any_owner_name_are_experts_too() -> None:
    tensors = stack("backbone.layers.1.mixer.switch_mlp", 8, "fc1", "fc2")
    tensors |= stack("model.layers.3.mlp.experts", 16, "gate_proj", "up_proj", "down_proj")

    assert [(x.experts, len(x.parts)) for x in facts.expert_layers(tensors)] == [(8, 2), (16, 3)]


def test_shared_experts_and_attention_are_not_streamed() -> None:
    tensors = {
        "model.layers.0.mlp.shared_experts.gate_proj.weight": Header("F32", (4, 8)),
        "model.layers.0.mlp.shared_experts.up_proj.weight": Header("F32", (4, 8)),
        "model.layers.0.self_attn.o_a_proj.weight": Header("F32", (8, 4, 8)),
    }

    assert facts.expert_layers(tensors) == ()


def test_a_dense_model_is_told_to_use_mlx_lm() -> None:
    tensors = {"model.layers.0.mlp.gate_proj.weight": Header("F32", (4, 8))}
    with pytest.raises(DenseModel, match="plain mlx-lm runs it"):
        facts.model_facts(Path("/m"), {"model_type": "llama"}, tensors)


def test_one_tensor_per_expert_is_refused_with_the_command_that_fixes_it() -> None:
    tensors = {"model.layers.0.mlp.experts.0.gate_proj.weight": Header("BF16", (4, 8))}
    with pytest.raises(UnsupportedLayout, match="one tensor per expert") as caught:
        facts.model_facts(Path("/m"), {"num_experts": 32}, tensors)
    assert caught.value.__notes__ == ["mlx_lm.convert --hf-path /m --mlx-path CONVERTED"]


def test_where_the_names_say_nothing_the_rule_is_told_and_that_run_may_work() -> None:
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": Header("BF16", (32, 4, 8))}
    rule = r"declares 32 experts per layer.* stacks \[experts, out, in\] named gate_proj, .*, fc2; "
    with pytest.raises(UnsupportedLayout, match=rule + "expertctl run .* may still work"):
        facts.model_facts(Path("/m"), {"num_local_experts": 32}, tensors)
