"""What several tests of the daemon need: a short run directory, and both event loops."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name; pytest's own is too long on macOS."""
    path = Path(tempfile.mkdtemp(prefix="x", dir="/tmp")).resolve()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=[uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine in a new loop: the one that the daemon uses, and Python's own."""
    runner: Run = request.param
    return runner
