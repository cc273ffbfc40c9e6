"""A worker process: one agent of the demo, or its fully resident counterpart.

`python -m expertctl.demo.agent` reads a job from stdin and writes events to stdout (see events.py). Both
kinds go through the same prompts, the same sampler and the same ban on ending early, so that their
tokens can be compared. It never outlives the command that started it: the end of stdin ends it.
"""

from __future__ import annotations

import importlib.metadata
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO

from expertctl.demo.events import GO, Done, Event, Failed, Job, Ready, Text, dump, parse_job
from expertd_protocol.errors import ErrorCode, ExitCode, ExpertdError

_VERSIONS_OF = ("mlx", "mlx-lm", "numpy", "pyzmq")


class _Orders:
    """Lines from the command. The end of them before the work is done ends the process at once."""

    def __init__(self, fd: int) -> None:
        self.finished = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._fd = fd
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        # os.read: a daemon thread inside a buffered read of sys.stdin is fatal at interpreter exit
        rest = b""
        while data := os.read(self._fd, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line.decode())
        if not self.finished:
            # nobody reads the results any more, and the generation loop would not notice
            os._exit(ExitCode.INTERRUPTED)
        self._lines.put(None)

    def next(self) -> str | None:
        return self._lines.get()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def work(job: Job, orders: _Orders, say: IO[str]) -> None:
    """Load, wait for `go`, generate, and stay attached until the command lets go."""
    from expertd_mlx import text

    def tell(event: Event) -> None:
        print(dump(event), file=say, flush=True)

    if job.socket is None:
        model, tokenizer = text.load_resident(job.model)
    else:
        import expertd_mlx

        model, tokenizer = expertd_mlx.load(
            job.model, socket=Path(job.socket), arena_view=job.arena_view, name=job.name
        )
    tell(Ready(versions()))
    while orders.next() != GO:
        pass
    started = time.perf_counter()
    for number, prompt in enumerate(job.prompts):
        ids = text.encode(tokenizer, prompt, chat=False)
        for piece in text.pieces(model, tokenizer, ids, max_tokens=job.tokens, ignore_eos=True):
            tell(Text(number, piece.token, piece.text))
    orders.finished = True
    tell(Done(time.perf_counter() - started))
    orders.next()
    if job.socket is not None:
        expertd_mlx.close(model)


def main() -> int:
    # libraries print to stdout now and then; the events keep the pipe for themselves
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    orders = _Orders(0)
    try:
        work(parse_job(orders.next() or ""), orders, say)
    except ExpertdError as error:
        print(dump(Failed(error.code, str(error), int(error.exit_code))), file=say, flush=True)
        return int(error.exit_code)
    except Exception as error:
        failed = Failed(
            ErrorCode.INTERNAL, f"{type(error).__name__}: {error}", int(ExitCode.FAILURE)
        )
        print(dump(failed), file=say, flush=True)
        raise  # its stderr goes to the command's log, with the traceback
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
