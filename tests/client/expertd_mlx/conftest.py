"""Tiny models made once per run, and who holds their experts."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from expertd_mlx import stream_of, streamed_classes
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel, write_tiny_model


class Budget(Enum):
    """How much of a model's experts may be in memory."""

    MINIMUM = "minimum"  # the top-k of one layer: every layer evicts the one before
    QUARTER = "quarter"
    ALL = "all"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Return a tiny model; equal arguments give the same folder."""
    made: dict[Any, TinyModel] = {}

    def make(family: str, quantization: str = "float32", **changes: Any) -> TinyModel:
        key = (family, quantization, *sorted(changes.items(), key=str))
        if str(key) not in made:
            path = tmp_path_factory.mktemp(f"{family}-{quantization}-")
            made[str(key)] = write_tiny_model(path, family, quantization, **changes)
        return made[str(key)]

    return make


@pytest.fixture(scope="session")
def resident() -> Callable[[Path], nn.Module]:
    """Return the model of a folder as plain mlx-lm loads it."""
    loaded: dict[Path, nn.Module] = {}

    def load(path: Path) -> nn.Module:
        if path not in loaded:
            loaded[path] = load_model(path)[0]
        return loaded[path]

    return load


@pytest.fixture
def experts() -> Callable[[TinyModel, Budget], Any]:
    """Return someone who serves a model's experts with that much memory, not attached yet."""

    def serve(model: TinyModel, budget: Budget) -> FakeExperts:
        slots = {
            Budget.MINIMUM: model.top_k,
            Budget.QUARTER: max(model.top_k, -(-model.layers * model.experts // 4)),
            Budget.ALL: model.layers * model.experts,
        }[budget]
        return FakeExperts(slots, min(slots, model.experts), hostile=budget is Budget.MINIMUM)

    return serve


@pytest.fixture
def streamed() -> Any:
    """Load a model's folder streamed through a client."""
    streams = []

    def load(model: TinyModel, client: Any, view: str = "map") -> nn.Module:
        classes = partial(streamed_classes, path=model.path)
        loaded = load_model(model.path, get_model_classes=classes)[0]
        stream = stream_of(loaded)
        stream.arena_view = view
        stream.attach(client, model.path)
        streams.append(stream)
        return loaded

    yield load
    for stream in streams:
        stream.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    mx.random.seed(7)
