"""The routing of plain mlx-lm, found without any code of ours: for the recorder to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

SWITCHES = (SwitchGLU, SwitchMLP)


class PlainRouting:
    """Watches the expert layers of a resident model while `run` calls it.

    `ids` and `weights` are [tokens, layers, k], in the order in which tokens went through. A weight is
    how much the block's output grows when its expert says 1 in place of 0: the block is run once more on
    its own input, with experts that answer a unit vector each, then with experts that answer nothing.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        modules = dict(model.named_modules())
        paths = [path for path, module in modules.items() if isinstance(module, SWITCHES)]
        paths.sort(key=lambda path: [int(t) for t in path.split(".") if t.isdigit()])
        layers = {id(modules[path]): layer for layer, path in enumerate(paths)}
        blocks = {id(modules[path.rpartition(".")[0]]): layer for layer, path in enumerate(paths)}
        classes = {type(modules[path.rpartition(".")[0]]) for path in paths}
        calls: list[tuple[int, Callable[[], mx.array]]] = []
        seen: list[mx.array] = []

        def block_call(original: Any) -> Any:
            def call(module: nn.Module, *args: Any) -> Any:
                calls.append((blocks[id(module)], lambda: original(module, *args)))
                return original(module, *args)

            return call

        def switch_call(original: Any) -> Any:
            def call(module: nn.Module, x: mx.array, ids: mx.array) -> mx.array:
                assert layers[id(module)] == calls[-1][0]
                seen.append(ids)
                return original(module, x, ids)

            return call

        with ExitStack() as stack:
            for cls in classes:
                stack.enter_context(patch.object(cls, "__call__", block_call(cls.__call__)))
            for cls in SWITCHES:
                stack.enter_context(patch.object(cls, "__call__", switch_call(cls.__call__)))
            run()
        each: list[list[np.ndarray]] = [[] for _ in paths]
        gates: list[list[np.ndarray]] = [[] for _ in paths]
        for (layer, again), ids in zip(calls, seen, strict=True):
            k = ids.shape[-1]
            each[layer].append(np.array(ids).reshape(-1, k))
            grown = _answering(again, 1.0) - _answering(again, 0.0)
            gates[layer].append(np.array(grown).reshape(-1, grown.shape[-1])[:, :k])
        self.ids = np.stack([np.concatenate(one) for one in each], axis=1)
        self.weights = np.stack([np.concatenate(one) for one in gates], axis=1)


def _answering(block: Callable[[], mx.array], value: float) -> mx.array:
    """Run a block whose chosen experts answer `value` in one dimension each, and 0 in all others."""

    def answer(module: nn.Module, x: mx.array, ids: mx.array) -> mx.array:
        one = value * mx.eye(ids.shape[-1], x.shape[-1])
        return mx.broadcast_to(one, (*ids.shape, x.shape[-1]))

    with ExitStack() as stack:
        for cls in SWITCHES:
            stack.enter_context(patch.object(cls, "__call__", answer))
        return block()
