"""Stream: one model's connection to its experts, and the rules of a forward pass.

Owns the client, the view of the arena and the one output that still reads pinned slots. A plain
object, never stored as a module's array: mlx-lm walks modules to evaluate and to wire what it
finds. Pins are given back only after what reads them was evaluated (rule 3); a token is handed on
only after the generations of its experts were checked (rule 6). Belongs to the generation thread,
like every MLX array.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import expertd_client
from expertd_client.recording import End, RecordingFile
from expertd_mlx import limits
from expertd_mlx.foresight import Foresight
from expertd_mlx.planes import PlaneView, open_view
from expertd_mlx.recorder import Recorder, starts_anew
from expertd_mlx.snapshot import CacheSnapshot
from expertd_mlx.waves import SORT_PAIRS
from expertd_protocol.errors import BadConfig, StaleExperts
from expertd_protocol.layout import U64, Ints, Phase
from expertd_protocol.messages import LayerSource, Record

if TYPE_CHECKING:
    from expertd_client import Arena, ModelSource

log = logging.getLogger(__name__)

#: A pass (or a wave) whose slots changed underneath is done again; more often than this is a bug.
MAX_TRIES = 3


class Experts(Protocol):
    """What a model needs of `expertd_client.Client`."""

    @property
    def arena(self) -> Arena: ...
    @property
    def quota(self) -> int: ...
    def attach(self, source: ModelSource, *, quota_min: int, quota_wanted: int) -> Arena: ...
    def resident(self, layer: int) -> npt.NDArray[np.bool_]: ...
    def is_whole(self, layer: int) -> bool: ...
    def pin(self, layer: int, experts: Ints, phase: Phase) -> U64: ...
    def takes_wishes(self) -> bool: ...
    def wish(self, layer: int, experts: Ints) -> None: ...
    def verify(self) -> bool: ...
    def unpin(self) -> None: ...
    def begin_pass(self) -> None: ...
    def records(self) -> Sequence[Record]: ...
    def end_pass(self, tokens: int, phase: Phase, hits: int = 0, hit_bytes: int = 0) -> None: ...
    def drop_old_arenas(self) -> None: ...
    def report_resident_bytes(self, n: int) -> None: ...
    def close(self) -> None: ...


class Stream:
    """The streamed experts of one model."""

    def __init__(self, layers: tuple[LayerSource, ...], experts: int, top_k: int) -> None:
        self.layers = layers
        self.experts = experts
        self.top_k = top_k
        self.phase = Phase.PREFILL
        #: Where to attach when the first pass finds no daemon yet; set by `load` and `prepare`.
        self.path: Path | None = None
        self.arena_view = os.environ.get("EXPERTD_ARENA_VIEW", "auto")
        #: Bytes of the weights that stay in this process.
        self.resident_bytes = 0
        self._client: Experts | None = None
        self._view: PlaneView | None = None
        self._part_names = [[part.name for part in layer.parts] for layer in layers]
        self._outstanding: mx.array | None = None
        self._holds_pins = False
        #: Outputs of complete layers, one of each of the last passes: what reads the arena and may
        #: not be evaluated yet. mlx-lm builds one pass while another runs, never more.
        self._lazy: deque[mx.array] = deque(maxlen=4)
        self._whole_output: mx.array | None = None
        self._whole_hits = self._whole_bytes = self._whole_layers = 0
        #: Whether the last pass ran on complete layers alone: such a pass has nothing to be redone.
        self._all_whole = False
        #: Called when the arena goes: every layer lets go of its arrays.
        self.unbind: list[Callable[[], None]] = []
        #: What the next layer will choose; set by `models.stream_experts`.
        self.foresight = Foresight(())
        #: Sees what every layer routes, while somebody wants it recorded.
        self.recorder: Recorder | None = None

    # --- attach ------------------------------------------------------------------------------
    @property
    def client(self) -> Experts:
        if self._client is None:
            self._connect()
        assert self._client is not None
        return self._client

    @property
    def view(self) -> PlaneView:
        """The arena as MLX sees it, rebuilt when the daemon was replaced."""
        arena = self.client.arena
        if self._view is None or self._view.serial != arena.serial:
            self._close_view()
            self._view = open_view(self.arena_view, arena, self._part_names, self.client.quota)
            self.client.drop_old_arenas()
        return self._view

    def attach(self, client: Experts, path: Path) -> None:
        """Attach through `client`, which is this stream's from now on."""
        limits.bound_free_buffers()
        limits.cap_wired_memory(self.resident_bytes)
        source = expertd_client.ModelSource(path=path, experts=self.experts, layers=self.layers)
        quota_min = min(self.top_k, self.experts)
        client.attach(source, quota_min=quota_min, quota_wanted=self.experts)
        self._client, self.path = client, path
        client.report_resident_bytes(self.resident_bytes)
        log.info(
            "attached path=%s layers=%d experts=%d quota=%d view=%s",
            path, len(self.layers), self.experts, client.quota, self.view.name,
        )  # fmt: skip

    def _connect(self) -> None:
        """Attach at the first pass: mlx-lm's own loaders give no later chance, and may build twice."""
        if self.path is None:
            raise BadConfig(
                "the model does not know its folder; load it with expertd_mlx.load, "
                "or through a folder written by expertd_mlx.prepare"
            )
        client = expertd_client.Client.connect()
        try:
            self.attach(client, self.path)
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """Give every pin back and detach. The model cannot be used any more."""
        client, self._client = self._client, None
        if self.recorder is not None:
            self.recorder.end(End.CLOSED)
            self.recorder = None
        if client is not None:
            self._outstanding = None
            client.unpin()
            self._close_view()
            client.close()

    def _close_view(self) -> None:
        mx.eval(list(self._lazy))
        self._lazy.clear()
        self._all_whole = False
        for unbind in self.unbind:
            unbind()
        if self._view is not None:
            self._view.close()
            self._view = None

    # --- pins --------------------------------------------------------------------------------
    def read_back(self, indices: mx.array, guess: mx.array | None = None) -> Ints:
        """Return the routed ids, and be done with the layer before: one evaluation for both.

        And for the guess at the next layer's ids, when there is one.
        """
        due = [a for a in (indices, self._outstanding, guess) if a is not None]
        if self.recorder is not None:
            due += self.recorder.unevaluated()
        mx.eval(due)
        self.settle()
        return np.array(indices).astype(np.intp, copy=False)

    def pin(self, layer: int, experts: Ints) -> U64:
        """Pin and return the words, fewer than asked only when the quota shrank meanwhile."""
        self._holds_pins = True
        return self.client.pin(layer, experts, self.phase)

    def wish(self, layer: int, guess: mx.array | None) -> None:
        """Tell the daemon what `layer` will probably choose: ids that were read back with others."""
        if guess is not None:
            self.client.wish(layer, np.array(guess).reshape(-1).astype(np.intp, copy=False))

    def hold(self, output: mx.array) -> mx.array:
        """Remember that `output` reads the pinned slots and is not evaluated yet."""
        self._outstanding = output
        return output

    def settle(self) -> None:
        """Evaluate what reads the pinned slots, check them (rule 6), give them back (rule 3).

        Raises:
            StaleExperts: a slot was reused while it was pinned; what was computed is worthless.
        """
        if self._outstanding is not None:
            mx.eval(self._outstanding)
            self._outstanding = None
        if not self._holds_pins:
            return
        fresh = self.client.verify()
        self.release()
        if not fresh:
            raise StaleExperts(
                f"slots changed while pinned ({self.path}); the pass is done again, at most "
                f"{MAX_TRIES} times; please report it"
            )

    def release(self) -> None:
        """Give the pins back; nothing unevaluated reads them."""
        self._holds_pins = False
        self.client.unpin()

    # --- complete layers (rule 20) -------------------------------------------------------------
    def whole(self, layer: int) -> Sequence[mx.array] | None:
        """Return the layer's experts as one array per part when all are in memory for good."""
        return self.view.whole(layer) if self.client.is_whole(layer) else None

    def note_whole(self, output: mx.array, pairs: int, expert_bytes: int) -> mx.array:
        """Remember the lazy output of a complete layer, and count what it used."""
        self._whole_output = output
        self._whole_hits += pairs
        self._whole_bytes += pairs * expert_bytes
        self._whole_layers += 1
        return output

    # --- recording -----------------------------------------------------------------------------
    def record(self, path: Path, tokens: int, until_ns: int) -> None:
        """Record what is routed into the empty file `path`, unless a recording is under way.

        Args:
            tokens: it ends when so many went through the model,
            until_ns: and at this `time.monotonic_ns` at the latest.

        Raises:
            OSError: the file is gone, or is not one of `make_recording`.
        """
        source = expertd_client.ModelSource(path, self.experts, self.layers)
        recorder = Recorder(
            RecordingFile(path),
            self.experts,
            source.expert_bytes,
            tokens=tokens,
            until_ns=until_ns,
        )
        if self._is_recording():
            recorder.end(End.BUSY)
        else:
            self.recorder = recorder
            log.info("recording path=%s tokens=%d", path, tokens)

    def _is_recording(self) -> bool:
        if self.recorder is not None and not self.recorder.goes_on():
            log.info("recorded path=%s", self.recorder.path)
            self.recorder = None
        return self.recorder is not None

    def _take_up(self, wanted: Sequence[Record]) -> None:
        for one in wanted:
            try:
                self.record(Path(one.path), one.tokens, one.until_ns)
            except OSError as exc:  # who wanted it has gone, most likely
                log.warning("not recorded path=%s error=%s", one.path, exc)

    # --- passes ------------------------------------------------------------------------------
    def run_pass(
        self,
        forward: Callable[[], Any],
        cache: Any,
        tokens: int,
        phase: Phase,
        batch: int = 1,
    ) -> Any:
        """Run one forward pass so that its result is exact, or raise.

        Ends with the last layer's experts evaluated, checked and given back. Not with the logits
        evaluated: mlx-lm drops those of a prefill.

        Args:
            tokens: of all `batch` sequences together.
        """
        client = self.client
        self.phase = phase
        client.begin_pass()
        if wanted := client.records():
            self._take_up(wanted)
        fresh = self._is_recording() and starts_anew(cache)
        before = CacheSnapshot(None if self._all_whole else cache)
        started, sight = time.perf_counter(), self.foresight
        few = phase is Phase.DECODE and tokens * self.top_k < SORT_PAIRS
        on_trial = few and sight.works and client.takes_wishes()
        sight.begin(on_trial and sight.trial.looks_ahead)
        for last in (False,) * (MAX_TRIES - 1) + (True,):
            if self.recorder is not None:
                self.recorder.begin(fresh)
            try:
                output = forward()
                self.settle()
            except StaleExperts:
                self._abandon()
                before.restore()
                if last:
                    raise
                log.warning("stale slots, forward pass repeated path=%s", self.path)
                continue
            except BaseException:
                self._abandon()
                before.restore()
                raise
            client.end_pass(tokens, phase, self._whole_hits, self._whole_bytes)
            if self._whole_output is not None:
                self._lazy.append(self._whole_output)
            self._all_whole = self._whole_layers == len(self.layers)
            self._forget_whole()
            if self.recorder is not None:
                self.recorder.commit(tokens, batch, phase)
            if on_trial:
                sight.trial.took(time.perf_counter() - started, tokens)
            return output
        raise AssertionError("unreachable")

    def _forget_whole(self) -> None:
        self._whole_output = None
        self._whole_hits = self._whole_bytes = self._whole_layers = 0

    def _abandon(self) -> None:
        """End a pass that failed: nothing it built may read a slot after its pin is gone."""
        outstanding, self._outstanding = self._outstanding, None
        self._forget_whole()
        try:
            if outstanding is not None:
                mx.eval(outstanding)
        finally:
            if self._holds_pins:
                self.release()
