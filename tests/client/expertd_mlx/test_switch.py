"""The streamed layer: what reaches the kernels, and what never changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from expertd_mlx import planes, stream_of, switch
from expertd_mlx.switch import StreamedExperts
from expertd_mlx.waves import rows_for_sorted_kernel
from expertd_protocol.errors import ExpertdError
from expertd_protocol.layout import Phase
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel, write_shards


class Spy:
    """Stands between a projection and its linear, and remembers what passes."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear
        self.calls: list[tuple[np.ndarray, bool, int, int]] = []

    def __call__(self, x: mx.array, ids: mx.array, sorted_indices: bool = False) -> mx.array:
        experts = self.linear["weight"].shape[0]
        self.calls.append((np.array(ids), sorted_indices, ids.size, experts))
        return self.linear(x, ids, sorted_indices=sorted_indices)


def switch_layers(model: nn.Module) -> list[Any]:
    return [m for _, m in model.named_modules() if isinstance(m, SwitchGLU)][::-1]


def spy_on(layer: StreamedExperts) -> list[Spy]:
    spies = []
    for projection in layer._expertd.projections:
        projection.linear = Spy(projection.linear)
        spies.append(projection.linear)
    return spies


@pytest.mark.parametrize("quantization", ["float32", "affine4"])
@pytest.mark.parametrize("pairs", [60, 64, 256])
@pytest.mark.parametrize("quota", [3, 8])
@pytest.mark.parametrize("view", ["map", "copy"])
def test_ids_promised_as_sorted_are_sorted_B08(
    view: str,
    quota: int,
    pairs: int,
    quantization: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    """The promise is the resident run's, by the pairs of the layer and the experts of the model."""
    model = tiny("mixtral", quantization)
    layer = switch_layers(streamed(model, FakeExperts(10, quota, hostile=True), view))[0]
    spies = spy_on(layer)
    x = mx.random.normal((1, pairs // 2, 64))
    ids = mx.random.randint(0, 8, (1, pairs // 2, 2)).astype(mx.uint32)

    out = layer(x, ids)

    assert mx.array_equal(out, switch_layers(resident(model.path))[0](x, ids))
    promised = pairs >= 64 and (quantization == "float32" or pairs // 8 >= 4)
    for spy in spies:
        assert sum(rows for *_, rows, _ in spy.calls) >= pairs
        for passed, is_promised, rows, experts in spy.calls:
            assert is_promised == promised
            if promised:
                assert (np.diff(passed.reshape(-1).astype(int)) >= 0).all()
            if promised and quantization == "affine4":
                assert rows >= rows_for_sorted_kernel(experts)


def test_a_wave_with_few_rows_still_reaches_the_sorted_kernel(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    """All pairs but one go to expert 0: the wave of the other experts has one row for each."""
    model = tiny("mixtral", "affine4")
    layer = switch_layers(streamed(model, FakeExperts(16, 1)))[0]
    spies = spy_on(layer)
    x = mx.random.normal((1, 40, 64))
    ids = mx.array([[[0, 0]] * 39 + [[0, 5]]], mx.uint32)

    out = layer(x, ids)

    assert mx.array_equal(out, switch_layers(resident(model.path))[0](x, ids))
    assert [(rows, promised) for _, promised, rows, _ in spies[0].calls] == [(79, True), (16, True)]


@pytest.mark.parametrize("shape", [(8200, 4), (8191, 4), (8192, 4)])
def test_no_call_has_more_rows_than_every_gpu_gets_right_B05(
    shape: tuple[int, int],
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("mixtral", "affine4")
    layer = switch_layers(streamed(model, FakeExperts(16, 8)))[0]
    spies = spy_on(layer)
    x = mx.random.normal((1, shape[0], 64))
    ids = mx.random.randint(0, 8, (1, *shape)).astype(mx.uint32)

    out = layer(x, ids)

    pairs = shape[0] * shape[1]
    rows = [rows for *_, rows, _ in spies[0].calls]
    assert sum(rows) == pairs
    assert all(n <= 32768 or n % 64 == 0 for n in rows)
    assert mx.array_equal(out, switch_layers(resident(model.path))[0](x, ids))


@pytest.mark.parametrize("tokens", [(5,), (40,), (2, 3), (2, 40), (2, 3, 4), (3, 5, 6)])
@pytest.mark.parametrize("quota", [2, 8])
def test_any_rank_of_tokens(
    quota: int,
    tokens: tuple[int, ...],
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("mixtral")
    layer = switch_layers(streamed(model, FakeExperts(8, quota, hostile=True)))[0]
    x = mx.random.normal((*tokens, 64))
    ids = mx.random.randint(0, 8, (*tokens, 2)).astype(mx.uint32)

    out = layer(x, ids)

    theirs = switch_layers(resident(model.path))[0](x, ids)
    assert out.shape == theirs.shape == (*tokens, 2, 64)
    assert mx.array_equal(out, theirs)


def test_a_wave_is_never_larger_than_its_limit(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its experts are gathered into memory of the worker's own, beside the arena."""
    monkeypatch.setattr(switch, "MAX_WAVE_BYTES", 2 * 3 * 64 * 96 * 4 + 1)
    model = tiny("mixtral")
    client = FakeExperts(16, 8)
    ours = streamed(model, client)

    logits = greedy(ours, prompt(64, 1), 0)

    assert first_difference(logits, greedy(resident(model.path), prompt(64, 1), 0)) is None
    assert max(len(experts) for _, experts, _ in client.pinned_experts) == 2


def test_a_router_beyond_the_experts_is_one_clear_error(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    layer = switch_layers(streamed(tiny("mixtral"), FakeExperts(8, 8)))[0]

    with pytest.raises(ExpertdError, match=r"layer 0 chose expert 1 to 8, the model has 0 to 7"):
        layer(mx.zeros((1, 1, 64)), mx.array([[[1, 8]]], mx.uint32))


def test_no_token_at_all(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    layer = switch_layers(streamed(tiny("mixtral"), FakeExperts(8, 8)))[0]

    assert layer(mx.zeros((1, 0, 64)), mx.zeros((1, 0, 2), mx.uint32)).shape == (1, 0, 2, 64)


def test_top_k_and_the_chosen_experts_are_the_models_own_B17(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("olmoe")
    client = FakeExperts(model.top_k, model.top_k)  # the less memory, the greater the temptation
    ours = streamed(model, client)
    routed: dict[str, list[list[int]]] = {"ours": [], "theirs": []}
    family_call = SwitchGLU.__call__

    def remember(self: SwitchGLU, x: mx.array, ids: mx.array) -> mx.array:
        routed["theirs"].append(np.array(ids).reshape(-1).tolist())
        return family_call(self, x, ids)

    streamed_call = StreamedExperts.__call__

    def remember_ours(self: StreamedExperts, x: mx.array, ids: mx.array) -> mx.array:
        routed["ours"].append(np.array(ids).reshape(-1).tolist())
        return streamed_call(self, x, ids)

    monkeypatch.setattr(StreamedExperts, "__call__", remember_ours)
    greedy(ours, prompt(9, 1), 5)
    monkeypatch.setattr(SwitchGLU, "__call__", remember)
    greedy(resident(model.path), prompt(9, 1), 5)

    assert routed["ours"] == routed["theirs"]
    assert [len(ids) for ids in routed["ours"]] == [9 * 4] * 2 + [4] * 2 * 5


def test_one_pin_per_layer_and_token_and_each_expert_once_in_a_prefill_B14_B39(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(6, 6, hostile=True)
    ours = streamed(model, client)

    greedy(ours, prompt(256, 1), 0)
    prefill = list(client.pinned_experts)
    client.pinned_experts.clear()
    greedy(ours, prompt(1, 1), 7)

    for layer in range(model.layers):
        experts = [e for i, es, _ in prefill if i == layer for e in es]
        assert len(experts) == len(set(experts)) > 6
    assert {phase for *_, phase in prefill} == {Phase.PREFILL}
    assert [i for i, *_ in client.pinned_experts] == [0, 1] * 8
    assert client.passes == [(256, Phase.PREFILL)] + [(1, Phase.DECODE)] * 8


@pytest.mark.parametrize("view", ["map", "copy"])
def test_decoding_makes_no_array_of_experts_C12(
    view: str,
    tiny: Callable[..., TinyModel],
    streamed: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3_moe", "affine4")
    ours = streamed(model, FakeExperts(8, 8), view)
    cache = make_prompt_cache(ours)
    mx.eval(ours(prompt(4, 1), cache=cache))

    def targets() -> list[int]:
        return [
            id(module[name])
            for layer in switch_layers(ours)
            for module, name in layer._expertd._targets
        ]

    before = targets()
    monkeypatch.setattr(planes, "shaped", None)
    monkeypatch.setattr(mx, "take", None)
    mx.eval(ours(mx.array([[1]]), cache=cache))
    memory = mx.get_active_memory()
    for _ in range(20):
        mx.eval(ours(mx.array([[1]]), cache=cache))

    assert targets() == before
    assert mx.get_active_memory() - memory < 4096  # the context's own pages are there already


@pytest.mark.parametrize("view", ["map", "copy"])
def test_everything_happens_on_the_thread_that_generates_B18(
    view: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    """As in mlx-lm's server: load and generate in one thread, and nothing of ours in another."""
    model = tiny("qwen3_moe", "affine4")
    theirs = greedy(resident(model.path), prompt(70, 1), 3)
    mx.eval(theirs)
    found: list[Any] = []

    def generate() -> None:
        before = threading.active_count()
        ours = streamed(model, FakeExperts(5, 5, hostile=True), view)
        logits = greedy(ours, prompt(70, 1), 3)
        found.append([np.array(one) for one in logits])
        found.append(threading.active_count() - before)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()

    logits, threads = found
    assert threads == 0
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(logits, theirs, strict=True))


def test_activations_of_another_dtype_are_right_and_said_once(
    tiny: Callable[..., TinyModel],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MLX would convert the scales of every slot on every call, so only a wave's are converted."""
    from dataclasses import replace

    from mlx_lm.utils import load_model

    source = tiny("mixtral", "affine4")
    weights: dict[str, mx.array] = {}
    for file in source.path.glob("*.safetensors"):
        weights.update(mx.load(str(file)))
    weights = tree_map_with_path(
        lambda name, w: w.astype(mx.bfloat16) if name.endswith((".scales", ".biases")) else w,
        weights,
    )
    write_shards(tmp_path, weights)
    (tmp_path / "config.json").write_bytes((source.path / "config.json").read_bytes())
    model = replace(source, path=tmp_path)
    client = FakeExperts(16, 8)
    ours = streamed(model, client)
    spies = spy_on(switch_layers(ours)[0])
    caplog.set_level(logging.WARNING)

    logits = greedy(ours, prompt(3, 1), 4)

    assert first_difference(logits, greedy(load_model(tmp_path)[0], prompt(3, 1), 4)) is None
    assert max(experts for *_, experts in spies[0].calls) <= 6  # never the 16 slots of the plane
    assert sum("gathered and converted" in r.getMessage() for r in caplog.records) == 2  # layers


def test_a_closed_model_gives_everything_back(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module]
) -> None:
    client = FakeExperts(8, 8)
    ours = streamed(tiny("mixtral"), client)
    greedy(ours, prompt(4, 1), 1)

    stream_of(ours).close()
    stream_of(ours).close()

    assert client.closed
    layers = switch_layers(ours)
    assert not any(name in module for one in layers for module, name in one._expertd._targets)
