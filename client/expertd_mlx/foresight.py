"""Foresight: which experts the next MoE layer will probably choose, before its attention has run (rule 21).

The hidden state changes little from layer to layer. So the module that routes for the next layer is
asked with what its neighbour in this layer was just called with, and stopped where it would use its
experts: what it was about to use is the guess. That is the family's own routing, corrections and groups
included, whatever it is called. A guess is lazy, is evaluated together with ids that are read back
anyway, and never reaches the model: it only names experts that the daemon may read early.

Being right is not being faster: a guess costs time in every layer, and is worth nothing where the
device has no idle time. `Trial` compares passes with and without, and believes only the clock.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

log = logging.getLogger(__name__)

#: Passes before the first trial: a cold cache says nothing about a warm one.
BEFORE_FIRST = 32
#: A side wins when it was faster in this many pairs of passes more than the other. A guess that makes
#: 45 % of the pairs faster and the others slower wins a trial in 8 % of the cases.
LEAD = 12
#: Passes until the next trial: after a win, and after a first loss; each further loss doubles it.
AFTER_WIN, AFTER_LOSS, AFTER_LOSSES_MOST = 2048, 1024, 16384


class Decides(Protocol):
    """Whether the next pass looks ahead."""

    @property
    def looks_ahead(self) -> bool: ...
    def took(self, seconds: float, tokens: int) -> None: ...


class Trial:
    """Looks ahead in every other pass until it is clear whether that is faster; then does what won.

    Two passes in a row make a pair, in turns with the one that looks ahead first and second: what
    slows the machine down, or a text that grows, hits both. Pure: the caller has the clock.
    """

    def __init__(self) -> None:
        self.pays = False
        self._rest = BEFORE_FIRST
        self._losses = 0
        self._lead = 0
        self._pairs = 0
        self._first: tuple[float, int] | None = None

    @property
    def looks_ahead(self) -> bool:
        if self._rest:
            return self.pays
        return (self._first is None) == (self._pairs % 2 == 0)

    def took(self, seconds: float, tokens: int) -> None:
        """Take in how long the pass took that `looks_ahead` was asked for, and what it processed."""
        if self._rest:
            self._rest -= 1
            return
        if self._first is None:
            self._first = seconds, tokens
            return
        first, self._first = self._first, None
        if first[1] == tokens:
            first_was_faster = first[0] < seconds
            self._lead += 1 if first_was_faster == (self._pairs % 2 == 0) else -1
        self._pairs += 1
        if abs(self._lead) == LEAD:
            self._decide()

    def _decide(self) -> None:
        self.pays = self._lead > 0
        self._losses = 0 if self.pays else self._losses + 1
        self._rest = AFTER_WIN
        if not self.pays:
            self._rest = min(AFTER_LOSS << (self._losses - 1), AFTER_LOSSES_MOST)
        log.info("prefetch pays=%s pairs=%d", self.pays, self._pairs)
        self._lead = self._pairs = 0

    def __repr__(self) -> str:
        return f"Trial(pays={self.pays}, rest={self._rest}, lead={self._lead}, pairs={self._pairs})"


class _Stopped(Exception):
    """A router was about to use its experts; only raised while it is asked."""

    def __init__(self, layer: int, indices: mx.array) -> None:
        super().__init__(layer)
        self.layer, self.indices = layer, indices


class Foresight:
    """The routing modules of one model's MoE layers, in order.

    Args:
        routers: what `router_of` found for each layer. One that is missing, or that routes for two
            layers, means that this model is not looked ahead in.
    """

    def __init__(self, routers: Sequence[nn.Module | None]) -> None:
        self.trial: Decides = Trial()
        #: Whether this pass looks ahead.
        self.on = False
        self._asking = False
        self._called: tuple[int, tuple[Any, ...], dict[str, Any]] | None = None
        found = [router for router in routers if router is not None]
        self._routers: Sequence[nn.Module] = found
        if len({id(router) for router in found}) < max(len(routers), 2):
            self._give_up("not every layer has a router of its own")
            return
        for layer, router in enumerate(found):
            router.__class__ = _watched_class(type(router))
            router._foresight, router._foresight_layer = self, layer

    @property
    def works(self) -> bool:
        """Whether this model can be looked ahead in, as far as is known."""
        return bool(self._routers)

    def begin(self, on: bool) -> None:
        """Begin or end a pass; `on`: it looks ahead."""
        self.on = on and self.works
        self._called = None

    def see(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what the router of a layer was called with."""
        if not self._asking:
            self._called = layer, args, kwargs

    def reached(self, layer: int, indices: mx.array) -> None:
        """Note that the experts of a layer are about to be used: further than a guess may go."""
        if self._asking:
            raise _Stopped(layer, indices)

    def guess(self, layer: int) -> mx.array | None:
        """Return the experts that `layer + 1` would choose by now, int[..., k], not evaluated; or None."""
        called, self._called = self._called, None
        if called is None or called[0] != layer or layer + 1 >= len(self._routers):
            return None
        _, args, kwargs = called
        if not all(a is None or isinstance(a, mx.array) for a in (*args, *kwargs.values())):
            # anything else could be a cache, and would be written into
            self._give_up(f"layer {layer} routes by more than arrays")
            return None
        self._asking = True
        try:
            answer = self._routers[layer + 1](*args, **kwargs)
        except _Stopped as stopped:
            return stopped.indices if stopped.layer == layer + 1 else None
        except Exception as exc:  # whatever a family's code does not like, it costs no pass
            self._give_up(f"layer {layer + 1}: {exc!r:.200}")
            return None
        finally:
            self._asking = False
        ids = answer[0] if isinstance(answer, tuple) and answer else None
        if isinstance(ids, mx.array) and mx.issubdtype(ids.dtype, mx.integer):
            return ids  # a router that only routes: (ids, weights)
        self._give_up(f"the router of layer {layer + 1} did not say which experts it chooses")
        return None

    def _give_up(self, reason: str) -> None:
        self._routers = ()
        self.on = False
        log.debug("no prefetch for this model: %s", reason)


class _Watched(nn.Module):
    """Mixed into the class of a router, in place."""

    _foresight: Foresight
    _foresight_layer: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._foresight.on:
            self._foresight.see(self._foresight_layer, args, kwargs)
        return super().__call__(*args, **kwargs)


@cache
def _watched_class(family: type[nn.Module]) -> type[nn.Module]:
    return type(family.__name__, (_Watched, family), {"__module__": family.__module__})


def router_of(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    """Return the module that chooses the experts of the expert layer at `path`, or None.

    It is the outermost module around them that knows no cache, so that asking it changes nothing; or,
    where that has no weights to choose by, what stands beside it as `router` or `gate` (gemma4).
    """
    block: nn.Module | None = None
    while path := path.rpartition(".")[0]:
        module = modules.get(path)
        if module is None:  # a list
            continue
        if "cache" in inspect.signature(type(module).__call__).parameters:
            break
        block = module
    if block is None or tree_flatten(block.parameters()):
        return block
    return modules.get(f"{path}.router") or modules.get(f"{path}.gate")
