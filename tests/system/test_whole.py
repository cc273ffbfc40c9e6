"""Models that fit (rule 20): the resident run itself, lazy, without pins or messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from expertd_client import Client
from expertd_mlx import stream_of, streamed_classes
from expertd_mlx.stream import Stream
from expertd_protocol.layout import Phase
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.system.daemon import RealDaemon, real_daemon, wait_until
from tests.tiny_models import TinyModel, write_tiny_model

ROOMY = "32MiB"
PROMPTS = ((1, 1), (3, 3), (64, 1), (300, 1))
STEPS = 8


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    mx.random.seed(7)
    quantization = "mxfp4" if request.param == "gpt_oss" else "affine4"
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, quantization)


@contextmanager
def streamed(model: TinyModel, daemon: RealDaemon) -> Iterator[tuple[nn.Module, Stream]]:
    classes = partial(streamed_classes, path=model.path)
    ours = load_model(model.path, lazy=True, get_model_classes=classes)[0]
    stream = stream_of(ours)
    stream.arena_view = "map"
    stream.attach(Client.connect(daemon.run_dir), model.path)
    try:
        yield ours, stream
    finally:
        stream.close()


def all_resident(daemon: RealDaemon) -> bool:
    (model,) = daemon.stats().models
    return model.resident_bytes == model.total_expert_bytes


def test_a_model_that_fits_is_read_in_the_background_and_then_runs_without_read_backs(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_model(model.path)[0]
    with real_daemon(ROOMY) as daemon, streamed(model, daemon) as (ours, stream):
        wait_until("all experts are resident", lambda: all_resident(daemon))
        before = daemon.stats()

        def no_read_back(indices: mx.array) -> None:
            raise AssertionError("routed ids were read back")

        monkeypatch.setattr(stream, "read_back", no_read_back)
        differing = [
            p
            for p in PROMPTS
            if first_difference(greedy(ours, prompt(*p), STEPS), greedy(plain, prompt(*p), STEPS))
            is not None
        ]
        after = daemon.stats()

    assert differing == []
    assert after.total.requests == before.total.requests
    assert after.total.misses == before.total.misses == 0
    pairs = len(stream.layers) * model.top_k
    tokens = sum(length * batch for length, batch in PROMPTS)
    assert after.prefill.tokens + after.decode.tokens == tokens + STEPS * 6
    assert after.total.hits == after.total.lookups == pairs * (tokens + STEPS * 6)


def test_what_was_built_and_not_evaluated_survives_the_daemon_D08(model: TinyModel) -> None:
    plain = load_model(model.path)[0]
    tokens = prompt(7, 1)
    with real_daemon(ROOMY) as daemon, streamed(model, daemon) as (ours, stream):
        wait_until("all experts are resident", lambda: all_resident(daemon))
        cache = make_prompt_cache(ours)
        lazy = ours(tokens, cache=cache)
        daemon.kill()
        daemon.start()
        serial = stream.client.arena.serial
        again = ours(tokens)  # attaches to the new daemon, whose arena is cold

        assert stream.client.arena.serial == serial + 1
        assert mx.array_equal(lazy, plain(tokens))
        assert mx.array_equal(again, plain(tokens))
        assert stream.phase is Phase.PREFILL
