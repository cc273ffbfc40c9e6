"""The end of a model: what is still read goes on to its end, and then every byte is given back."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd import models as models_module
from expertd.cache.budget import GIB
from expertd.cache.ledger import Ledger
from expertd.cache.requests import Holder
from expertd.models import Ended, Model, ModelOptions, Models
from expertd.store.reader import Reader
from expertd_protocol.errors import ModelChanged
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import PageLayout
from expertd_protocol.messages import Attach, LayerSource, Miss
from tests.daemon.conftest import Run
from tests.daemon.store.test_index import layer_source
from tests.safetensors_files import expert_tensors, write_model

EXPERTS = 8
SESSION = SessionId(b"s" * 16)


class Disk:
    """Reads that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, fd: int, views: Sequence[Any], offset: int) -> int:
        self.entered.set()
        assert self.open.wait(20)
        return os.preadv(fd, views, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(models_module, "Reader", lambda **how: Reader(**how, preadv=disk))
    return disk


def models_of(ledger: Ledger) -> Models:
    def on_done(model: Model, ended: Sequence[Ended]) -> None:
        for order, error in ended:
            if error is None:
                model.cache.filled(order, time.monotonic())
            else:
                model.cache.failed(order, error, time.monotonic())

    options = ModelOptions("buffered", 1, 0.005, 4, poison_free_slots=False)
    return Models(ledger, options, asyncio.get_running_loop(), on_done)


def attach(folder: Path) -> Attach:
    layers: tuple[LayerSource, ...] = (layer_source(0),)
    return Attach(
        path=str(folder), experts=EXPERTS, layers=layers, quota_min=2, quota_wanted=EXPERTS
    )


def begin_read(models: Models, model: Model) -> None:
    """Let a worker ask for two experts, and die at once."""
    layout = PageLayout(2, 1, EXPERTS)
    page = bytearray(layout.nbytes)
    holder = Holder(2, layout.header(page), layout.hazards(page), layout.uses(page))
    model.cache.add(SESSION, holder)
    model.cache.request(SESSION, Miss(1, 0, 1, (1, 2)), time.monotonic())
    orders, model.cache.fills = model.cache.fills, []
    assert models.submit(model, orders) == []
    model.cache.remove(SESSION, time.monotonic())


def rewrite(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(0, 1))


@pytest.mark.parametrize("same_folder", [True, False], ids=["changed folder", "another folder"])
def test_a_model_that_is_still_read_gives_way_when_its_reads_have_ended(
    same_folder: bool, disk: Disk, tmp_path: Path, run: Run
) -> None:
    first = write_model(tmp_path / "a", [expert_tensors(0)])
    second = first if same_folder else write_model(tmp_path / "b", [expert_tensors(0)])

    async def main() -> None:
        ledger = Ledger(1 << 20)
        models = models_of(ledger)
        old = await models.open(attach(first))
        begin_read(models, old)
        assert await asyncio.to_thread(disk.entered.wait, 10)
        if same_folder:
            rewrite(first)
        opening = asyncio.create_task(models.open(attach(second)))
        done, _ = await asyncio.wait([opening], timeout=0.1)
        assert not done
        disk.open.set()
        new = await opening
        assert list(models.by_path.values()) == [new]
        assert new is not old
        assert ledger.committed_bytes == new.arena.nbytes + ledger.held("read_buffer")
        await asyncio.to_thread(models.close, 5.0)
        assert await models._close(new)

    run(main())


def test_a_model_whose_read_hangs_is_refused_and_stays(
    disk: Disk, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "REST_SECONDS", 0.02)
    folder = write_model(tmp_path / "a", [expert_tensors(0)])

    async def main() -> None:
        models = models_of(Ledger(1 << 20))
        model = await models.open(attach(folder))
        begin_read(models, model)
        rewrite(folder)
        with pytest.raises(ModelChanged, match="still being read"):
            await models.open(attach(folder))
        assert list(models.by_path.values()) == [model]
        disk.open.set()
        await asyncio.to_thread(models.close, 5.0)

    run(main())


def test_the_loop_serves_while_a_folder_hangs_and_others_open(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead disk keeps only those waiting who want something from it (rule 19)."""
    dead, alive = (write_model(tmp_path / name, [expert_tensors(0)]) for name in ("dead", "alive"))
    gate, real = threading.Event(), models_module.build_index

    def build_index(path: Path) -> Any:
        assert path != dead or gate.wait(20)
        return real(path)

    monkeypatch.setattr(models_module, "build_index", build_index)

    async def main() -> None:
        models = models_of(Ledger(1 << 20))
        hung = asyncio.create_task(models.open(attach(dead)))
        await asyncio.sleep(0)
        model = await asyncio.wait_for(models.open(attach(alive)), 10)
        assert not hung.done()
        gate.set()
        assert (await hung).path == dead  # nobody uses the other one, so it gave way
        assert model.path not in models.by_path
        models.close(5.0)
        (last,) = models.by_path.values()
        assert await models._close(last)

    run(main())


def test_freeing_memory_does_not_stop_the_loop(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "a", [expert_tensors(0)])
    threads: list[int] = []
    real = Model.close

    def close(model: Model) -> None:
        threads.append(threading.get_ident())
        real(model)

    monkeypatch.setattr(Model, "close", close)

    async def main() -> None:
        ledger = Ledger(GIB)
        models = models_of(ledger)
        model = await models.open(attach(folder))
        assert np.count_nonzero(model.arena.directory) == 0
        assert await models._close(model)
        assert threads[-1] != threading.get_ident()
        assert ledger.committed_bytes == ledger.held("read_buffer")
        models.close(5.0)

    run(main())
