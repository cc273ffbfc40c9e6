"""Recorder: the routing of one model's forward passes, into one file, until a limit.

Sees the routed ids where the family's block calls its expert layer, and the router weights among the
locals of that very call, since no family hands them on: every one has them by then. Changes nothing,
only reads; what a pass routed is kept until the pass has succeeded, so a pass that is done again is
recorded once. Ends by itself: after so many tokens, at a time, when its file is removed, or with the
model. A file that cannot be written ends the recording and never a forward pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from expertd_client.recording import End, RecordingFile, Shape
from expertd_protocol.layout import Phase

log = logging.getLogger(__name__)

#: Ids and weights by layer, each [..., k].
Seen = dict[int, tuple[mx.array, mx.array | None]]


def gate_weights(block: FrameType, indices: mx.array) -> mx.array | None:
    """Return the router weights of `indices` out of the running block that chose them, or None.

    Blocks differ in the names, not in the shapes. The last local of that shape counts, in the order
    in which the code names them: gpt_oss has the chosen logits first, longcat the weights of experts that do
    not exist.
    """
    found = None
    for value in block.f_locals.values():
        if (
            isinstance(value, mx.array)
            and value.shape == indices.shape
            and mx.issubdtype(value.dtype, mx.floating)
        ):
            found = value
    return found


def starts_anew(cache: Any) -> bool:
    """Tell whether a pass with this cache (a list of mlx-lm's caches, or None) is the first of its text."""
    if not cache:
        return True
    try:
        return all(one.empty() for one in cache if one is not None)
    except (AttributeError, NotImplementedError, TypeError):  # a cache of a family's own
        return False


class Recorder:
    """Records into `file` until `tokens` went through, or `until_ns` of `clock` is over."""

    def __init__(
        self,
        file: RecordingFile,
        experts: int,
        expert_bytes: tuple[int, ...],
        *,
        tokens: int,
        until_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.path = file.path
        self._file = file
        self._experts = experts
        self._expert_bytes = expert_bytes
        self._left = tokens
        self._until_ns = until_ns
        self._clock = clock
        self._shape: Shape | None = None
        self._seen: Seen = {}
        self._lazy: list[mx.array] = []
        #: The sequence of the batch's first row; the other rows have the next numbers.
        self._sequence = self._batch = 0
        self._fresh = True

    def goes_on(self) -> bool:
        """Tell whether the next pass is to be recorded; the end, when it has come, is written here."""
        if self._file.removed():
            self._file.close()
        elif self._left == 0:
            self.end(End.TOKENS)
        elif self._clock() >= self._until_ns:
            self.end(End.SECONDS)
        else:
            return True
        return False

    # --- one pass --------------------------------------------------------------------------------
    def begin(self, fresh: bool) -> None:
        """Forget what a failed pass left behind; `fresh`: nothing is in the cache yet."""
        self._seen.clear()
        self._lazy.clear()
        self._fresh = fresh

    def see(self, layer: int, indices: mx.array, weights: mx.array | None) -> None:
        """Remember what one layer routed: ids and weights [..., k], evaluated or not."""
        if weights is not None:
            weights = weights.astype(mx.float16)
            self._lazy.append(weights)
        self._lazy.append(indices)
        self._seen[layer] = (indices, weights)

    def unevaluated(self) -> list[mx.array]:
        """Return what was seen since the last call, for an evaluation that is due anyway."""
        lazy, self._lazy = self._lazy, []
        return lazy

    def commit(self, tokens: int, batch: int, phase: Phase) -> None:
        """Write the pass: `batch` sequences of as many tokens each, `tokens` in all, row after row."""
        mx.eval(self.unevaluated())
        if self._fresh or batch != self._batch:
            self._sequence, self._batch = self._sequence + self._batch, batch
        seen, self._seen = self._seen, {}
        if not seen or not tokens:
            return
        try:
            rows = self._rows(seen, tokens, batch, phase)
            self._file.append(rows)
        except OSError as exc:
            log.warning("recording failed path=%s error=%s", self.path, exc)
            self.end(End.FAILED)
            return
        self._left -= len(rows)
        self.goes_on()

    def _rows(self, seen: Seen, tokens: int, batch: int, phase: Phase) -> npt.NDArray[np.void]:
        # not the config's word for k: in some families layers differ
        shape = self._shape or self._begin_file(max(ids.shape[-1] for ids, _ in seen.values()))
        n = min(tokens, self._left)
        rows = shape.rows(n)
        rows["phase"] = phase
        rows["sequence"] = self._sequence + np.arange(n) // (tokens // batch)
        for layer, (indices, weights) in seen.items():
            k = indices.shape[-1]
            if (
                indices.size == tokens * k and k <= shape.k
            ):  # else nobody knows which tokens these are
                rows["ids"][:, layer, :k] = np.array(indices).reshape(tokens, k)[:n]
                if weights is not None:
                    rows["weights"][:, layer, :k] = np.array(weights).reshape(tokens, k)[:n]
        return rows

    def _begin_file(self, k: int) -> Shape:
        layers = len(self._expert_bytes)
        self._shape = Shape(layers, k, self._experts, self._expert_bytes)
        self._file.begin(self._shape)
        return self._shape

    def end(self, why: End) -> None:
        """Write why, and stop; idempotent."""
        try:
            if self._shape is None and not self._file.removed():
                self._begin_file(1)
        except OSError as exc:
            log.warning("recording failed path=%s error=%s", self.path, exc)
        self._file.end(why)
