"""A run directory with a short path, a fake daemon in it, and a client attached to a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd_client import Client
from expertd_client.testing import FakeDaemon, tiny_source


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xd-") as parent:
        yield Path(parent) / "run"


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(run_dir) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon, run_dir: Path) -> Iterator[Client]:
    with Client.connect(run_dir, name="test") as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        yield client
