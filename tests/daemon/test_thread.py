"""A thread for one call: its end reaches the loop, and nobody waits for one that hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from expertd.thread import in_thread
from tests.daemon.conftest import Run


def test_what_the_call_returns_or_raises_comes_back(run: Run) -> None:
    def fail() -> None:
        raise OSError("no disk")

    async def main() -> None:
        assert await in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(OSError, match="no disk"):
            await in_thread(fail)

    run(main())


def test_many_calls_that_hang_keep_no_other_from_its_thread_D35(run: Run) -> None:
    gate = threading.Event()

    async def main() -> None:
        hung = [asyncio.create_task(in_thread(lambda: gate.wait(20))) for _ in range(64)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(in_thread(lambda: 7), 5) == 7
        hung[0].cancel()
        gate.set()
        assert all(await asyncio.gather(*hung[1:]))

    run(main())


HUNG = """
import asyncio, threading, uvloop
from expertd.thread import in_thread

async def main():
    asyncio.create_task(in_thread(threading.Event().wait))
    await asyncio.sleep(0)

uvloop.run(main())
print("ended")
"""


def test_a_call_that_hangs_does_not_keep_the_process_alive_D35() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=30,
        env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
