"""StreamedExperts: routed ids -> pinned slots -> the family's own expert layer.

The family's SwitchGLU or SwitchMLP keeps its code: activations, biases and quantisation modes come
for free and cannot drift. Only the arrays behind its projections and the ids it is called with
change. Promises that routing is never changed, and that each expert is pinned once per layer and
batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from expertd_mlx.recorder import gate_weights
from expertd_mlx.stream import MAX_TRIES, Stream
from expertd_mlx.waves import (
    MAX_ROWS,
    SORT_PAIRS,
    Waves,
    plan,
    rows_for_sorted_kernel,
    takes_sorted_kernel,
)
from expertd_protocol.errors import ExpertdError, StaleExperts
from expertd_protocol.layout import Ints

log = logging.getLogger(__name__)

#: A wave gathers its experts into arrays of its own; this bounds what they take beside the arena.
MAX_WAVE_BYTES = 512 << 20

Run = Callable[[mx.array, mx.array], mx.array]


class Projection:
    """Stands where the family expects a SwitchLinear, outside of MLX's parameter tree.

    Passes on to the real one, with the `sorted_indices` that the resident run would effectively
    get: the family decides by the pairs of one call, and a wave has fewer than the layer. `promise`
    None leaves the decision to the family, for calls that are those of the resident run.
    """

    def __init__(self, linear: nn.Module, quantized: bool) -> None:
        self.linear = linear
        self.quantized = quantized
        self.promise: bool | None = False

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        promise = sorted_indices if self.promise is None else self.promise
        out: mx.array = self.linear(x, indices, sorted_indices=promise)
        return out


class StreamedLayer:
    """One MoE layer: its number, its projections and where their arrays go."""

    def __init__(
        self,
        stream: Stream,
        index: int,
        projections: Sequence[Projection],
        targets: Sequence[tuple[nn.Module, str]],
        dtypes: frozenset[Any],
        expert_bytes: int,
    ) -> None:
        self.stream = stream
        self.index = index
        self.projections = projections
        #: (module, tensor name) of each part, in the order of the layer's parts.
        self._targets = targets
        #: Dtypes that MLX would convert, for every slot and on every call, to the activations'
        #: dtype.
        self._dtypes = dtypes
        self._expert_bytes = expert_bytes
        self._wave_experts = max(1, MAX_WAVE_BYTES // expert_bytes)
        self._bound: Sequence[mx.array] | None = None
        self._rows = np.zeros(stream.experts, np.uint32)
        self._warned = False
        stream.unbind.append(self._unbind)

    def __call__(self, run: Run, x: mx.array, indices: mx.array) -> mx.array:
        """Return `run(x, indices)` as if all experts were resident."""
        stream = self.stream
        if (whole := stream.whole(self.index)) is not None:
            # All of them are, for good (rule 20): the resident run itself, lazy and unpinned.
            self._bind(whole)
            for projection in self.projections:
                projection.promise = None
            return stream.note_whole(run(x, indices), indices.size, self._expert_bytes)
        guess = stream.foresight.guess(self.index) if stream.foresight.on else None
        ids = stream.read_back(indices, guess)
        counts = self._count(ids)
        if ids.size < SORT_PAIRS and self._dtypes <= {x.dtype}:
            # No routed pair at all still needs arrays of the right shape to run on: expert 0.
            experts = np.flatnonzero(counts) if ids.size else np.zeros(1, np.intp)
            if len(experts) <= stream.client.quota:
                words = stream.pin(self.index, experts)
                if len(words) == len(experts):
                    stream.wish(self.index + 1, guess)
                    arrays, rows = stream.view.pinned(self.index, words)
                    self._rows[experts] = rows
                    self._bind(arrays)
                    self._promise(None)
                    return stream.hold(run(x, mx.array(self._rows[ids])))
                stream.release()  # re-attached with a smaller quota
        elif not self._dtypes <= {x.dtype} and not self._warned:
            self._warned = True
            log.warning(
                "activations are %s, experts of layer %d %s: gathered and converted on every call",
                x.dtype, self.index, ", ".join(map(str, self._dtypes)),
            )  # fmt: skip
        waves = plan(ids.reshape(-1), counts, stream.client.resident(self.index))
        return self._run_waves(run, x, indices, waves)

    def _count(self, ids: Ints) -> Ints:
        experts = self.stream.experts
        if ids.size and not (ids.min() >= 0 and ids.max() < experts):
            raise ExpertdError(
                f"the router of MoE layer {self.index} chose expert {ids.min()} to {ids.max()}, "
                f"the model has 0 to {experts - 1}; its files and its config disagree"
            )
        return np.bincount(ids.reshape(-1), minlength=experts)

    def _bind(self, arrays: Sequence[mx.array]) -> None:
        if arrays is not self._bound:
            for (module, name), array in zip(self._targets, arrays, strict=True):
                module[name] = array
            self._bound = arrays

    def _promise(self, waves: Waves | None) -> None:
        for projection in self.projections:
            projection.promise = waves is not None and takes_sorted_kernel(
                waves.pairs, self.stream.experts, projection.quantized
            )

    def _unbind(self) -> None:
        """Let go of the arrays: a wave's are as large as its experts, the arena's may go away."""
        for module, name in self._targets:
            module.pop(name, None)
        self._bound = None

    # --- waves -------------------------------------------------------------------------------
    def _run_waves(self, run: Run, x: mx.array, indices: mx.array, waves: Waves) -> mx.array:
        stream = self.stream
        flat = x.reshape(-1, x.shape[-1])
        n, first, tries = len(waves.experts), 0, 0
        pieces: list[mx.array] = []
        while first < n:
            most = min(n - first, stream.client.quota, self._wave_experts)
            words = stream.pin(self.index, waves.experts[first : first + most])
            stop = first + len(words)
            arrays = stream.view.compact(self.index, words)
            self._bind(arrays)
            self._promise(waves)
            try:
                piece = self._run_rows(run, flat, indices.shape[-1], waves, first, stop)
            finally:
                self._unbind()
            if stop < n:
                stream.hold(piece)
                try:
                    stream.settle()
                except StaleExperts:
                    tries += 1
                    if tries == MAX_TRIES:
                        raise
                    continue
            pieces.append(piece)
            first, tries = stop, 0
        out = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
        out = out[mx.array(waves.unsort())]
        return stream.hold(out.reshape(*indices.shape, out.shape[-1]))

    def _run_rows(
        self, run: Run, flat: mx.array, top_k: int, waves: Waves, first: int, stop: int
    ) -> mx.array:
        """Run the pairs of ranks first to stop - 1 on arrays that hold exactly those experts."""
        pairs = waves.slice(first, stop)
        ids = (waves.ranks[pairs] - first).astype(np.uint32)
        tokens = (waves.order[pairs] // top_k).astype(np.uint32)
        enough = 0
        if any(p.promise and p.quantized for p in self.projections):
            # Few rows for many experts would send this wave, alone of its layer, to Metal's other
            # kernel. More of the last row do not change the rest; their results are dropped.
            enough = rows_for_sorted_kernel(stop - first)
        outputs = []
        for at in range(0, len(ids), MAX_ROWS):
            call_ids, call_tokens = ids[at : at + MAX_ROWS], tokens[at : at + MAX_ROWS]
            rows = len(call_ids)
            if rows < enough:
                call_ids = np.pad(call_ids, (0, enough - rows), mode="edge")
                call_tokens = np.pad(call_tokens, (0, enough - rows), mode="edge")
            out = run(flat[mx.array(call_tokens)], mx.array(call_ids)[:, None])
            outputs.append(out[:rows].squeeze(-2))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


class StreamedExperts(nn.Module):
    """Mixed into a family's expert layer; `models.stream_experts` turns a layer into one in place."""

    _expertd: StreamedLayer

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        layer = self._expertd
        layer.stream.foresight.reached(layer.index, indices)
        if (recorder := layer.stream.recorder) is not None:
            recorder.see(layer.index, indices, gate_weights(sys._getframe(1), indices))
        return layer(super().__call__, x, indices)


@cache
def streamed_class(family: type[nn.Module]) -> type[nn.Module]:
    """Return the streamed subclass of a family's expert layer."""
    return type(f"Streamed{family.__name__}", (StreamedExperts, family), {})
