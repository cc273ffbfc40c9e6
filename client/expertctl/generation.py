"""One generation in this process: find or start the daemon, load, check the prompt, write.

Owns the order of these steps, so that a mistake is told before anything is generated.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertctl import figures, render
from expertctl.connection import ANSWER_SECONDS, attach_socket
from expertctl.context import check_context, context_length, tokens_left
from expertctl.private_daemon import private_daemon
from expertd_client import Admin
from expertd_client.model_folder import model_folder, read_config
from expertd_protocol.errors import DaemonUnavailable
from expertd_protocol.stats import Counters, Stats

if TYPE_CHECKING:
    from expertd_mlx.text import Piece


#: A run is recorded to its end.
_FOREVER_NS = 10**9 * 365 * 86_400


@dataclass(frozen=True)
class Request:
    """What to generate, and how."""

    model: str
    prompt: str
    max_tokens: int
    temp: float
    top_p: float
    seed: int | None
    chat: bool
    arena_view: str
    #: Where to record what is routed.
    trace: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The text and the figures."""

    text: str
    last: Piece | None
    counters: Counters
    budget_bytes: int
    daemon: str

    def as_json(self) -> dict[str, Any]:
        last, c = self.last, self.counters
        return {
            "text": self.text,
            "prompt_tokens": last.prompt_tokens if last else 0,
            "prompt_tokens_per_second": last.prompt_tps if last else 0.0,
            "tokens": last.tokens if last else 0,
            "tokens_per_second": last.tps if last else 0.0,
            "finish_reason": last.finish_reason if last else None,
            "lookups": c.lookups,
            "hits": c.hits,
            "joins": c.joins,
            "misses": c.misses,
            "hit_rate": c.hit_rate,
            "hit_bytes": c.hit_bytes,
            "miss_bytes": c.miss_bytes,
            "wait_seconds": c.wait_ns / 1e9,
            "budget_bytes": self.budget_bytes,
            "daemon": self.daemon,
        }

    def line(self) -> str:
        """Return the one line of figures."""
        last, c, count = self.last, self.counters, figures.count
        if last is None:
            return "0 tokens"
        return (
            f"{count(last.tokens)} tokens · {last.tps:.1f} tokens/s · "
            f"prompt {count(last.prompt_tokens)} at {last.prompt_tps:.1f} tokens/s · "
            f"hits {count(c.hits)}, {figures.size(c.hit_bytes)} · joins {count(c.joins)} · "
            f"misses {count(c.misses)}, {figures.size(c.miss_bytes)} read · "
            f"waited {figures.waited(c.wait_ns)} · "
            f"{self.daemon} daemon, budget {figures.size(self.budget_bytes)}"
        )


def own_counters(stats: Stats, pid: int) -> Counters:
    return sum((render.counters_of(s) for s in stats.sessions if s.pid == pid), Counters())


@contextmanager
def daemon_for(
    budget: str, run_dir: Path | None, socket: Path | None
) -> Iterator[tuple[Path, str]]:
    """Yield the attach socket of the running daemon, else of a private one, and which it is.

    Raises:
        DaemonUnavailable: a daemon was named and does not answer.
    """
    path = attach_socket(run_dir, socket)
    try:
        Admin.connect(path, deadline_seconds=ANSWER_SECONDS).close()
    except DaemonUnavailable:
        if run_dir is not None or socket is not None:
            raise
    else:
        if budget != "auto":
            _say("run: the running daemon is used, with its own budget; --budget has no effect")
        yield path, "shared"
        return
    _say(f"run: no daemon is running; a private one with budget {budget} lives for this command")
    with private_daemon(budget) as daemon:
        yield daemon.socket, "private"


@contextmanager
def recording_into(out: Path | None, model: str) -> Iterator[Path | None]:
    """Yield the file that the model is to be recorded into; on the way out it becomes the trace `out`.

    What there is is kept, however it ends.

    Raises:
        BadTrace: there is such a file, or it cannot be made there.
    """
    if out is None:
        yield None
        return
    from expertctl.recordings import Recording

    texts = {"model": render.model_name(model), "source": "expertctl run --trace"}
    recording = Recording(out.expanduser().absolute(), os.getpid(), "this run", texts)
    recording.make()
    try:
        yield recording.file
    finally:
        finished = recording.finish()
        if finished.trace is not None:
            _say(f"run: {finished.summary()}")


def generate(
    request: Request, budget: str, run_dir: Path | None, socket: Path | None, *, echo: bool
) -> Outcome:
    """Generate once; with `echo` the text is written to stdout as it comes."""
    path = model_folder(request.model)
    context = context_length(read_config(path))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with (
        recording_into(request.trace, str(path)) as file,
        daemon_for(budget, run_dir, socket) as (attach, which),
    ):
        import expertd_mlx
        from expertd_client.recording import MOST_TOKENS
        from expertd_mlx import text

        model, tokenizer = expertd_mlx.load(
            str(path), socket=attach, arena_view=request.arena_view, name="expertctl run"
        )
        try:
            ids = text.encode(tokenizer, request.prompt, chat=request.chat)
            check_context(len(ids), context)
            written: list[str] = []
            last: Piece | None = None
            if file is not None:
                until_ns = time.monotonic_ns() + _FOREVER_NS
                expertd_mlx.stream_of(model).record(file, MOST_TOKENS, until_ns)
            for piece in text.pieces(
                model,
                tokenizer,
                ids,
                max_tokens=tokens_left(request.max_tokens, len(ids), context),
                temp=request.temp,
                top_p=request.top_p,
                seed=request.seed,
            ):
                last = piece
                written.append(piece.text)
                if echo:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
            if echo:
                print(flush=True)
            with Admin.connect(attach, deadline_seconds=ANSWER_SECONDS) as admin:
                stats = admin.stats()
        finally:
            expertd_mlx.close(model)
    counters = own_counters(stats, os.getpid())
    return Outcome("".join(written), last, counters, stats.budget_bytes, which)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
