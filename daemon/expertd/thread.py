"""A thread for one call that may block. Knows the event loop, nothing of what is called.

`asyncio.to_thread` shares a small pool, which a few reads from a dead disk would fill for ever, and the
end of the loop waits for that pool, so that the daemon would never exit. Nobody waits for these threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return or raise what `call` does in a thread of its own; the loop serves others meanwhile."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():  # cancelled: nobody waits any more
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return await result
