"""Rule 21 with a real daemon: read ahead, exact, within the budget, and every expert accounted for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlx.nn as nn
import msgpack
import numpy as np
import pytest
from mlx_lm.utils import load_model

from expertd_client import Client
from expertd_client.session import WISHES_MOST
from expertd_mlx import stream_of, streamed_classes
from expertd_mlx.stream import Stream
from expertd_protocol import codec
from expertd_protocol.errors import DeadlineExceeded
from expertd_protocol.layout import Phase
from expertd_protocol.messages import Wish
from expertd_protocol.stats import Prefetched
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.client.expertd_mlx.test_foresight import Always
from tests.system.daemon import (
    DEMO_MODEL,
    RealDaemon,
    demo_index,
    demo_minimum,
    demo_source,
    real_daemon,
    wait_until,
)

#: A little more than half of the experts, and what is kept beside them.
HALF = demo_minimum() + demo_index().total_bytes // 2
STEPS = 40


@contextmanager
def looking_ahead(daemon: RealDaemon) -> Iterator[tuple[nn.Module, Stream]]:
    classes = partial(streamed_classes, path=DEMO_MODEL)
    ours = load_model(DEMO_MODEL, lazy=True, get_model_classes=classes)[0]
    stream = stream_of(ours)
    stream.foresight.trial = Always()
    stream.attach(Client.connect(daemon.run_dir), DEMO_MODEL)
    try:
        yield ours, stream
    finally:
        stream.close()


def prefetched(daemon: RealDaemon) -> Prefetched:
    (model,) = daemon.stats().models
    assert daemon.stats().prefetch == model.prefetch
    return model.prefetch


def is_settled(early: Prefetched) -> bool:
    return early.useful + early.late + early.wasted == early.prefetched


def test_experts_are_read_ahead_and_logits_are_those_of_plain_mlx_lm() -> None:
    plain = load_model(DEMO_MODEL)[0]
    prompts = [prompt(length, 1, seed) for seed, length in enumerate((5, 70, 1, 20))]
    expected = [greedy(plain, p, STEPS) for p in prompts]

    with real_daemon(str(HALF), "--poison-free-slots") as daemon:
        with looking_ahead(daemon) as (ours, _):
            got = [greedy(ours, p, STEPS) for p in prompts]
            stats = daemon.stats()
        wait_until("every early expert is settled", lambda: is_settled(prefetched(daemon)))
        early = prefetched(daemon)

    assert [first_difference(*pair) for pair in zip(got, expected, strict=True)] == [None] * 4
    assert stats.sessions[0].mismatches == 0
    assert stats.peak_committed_bytes <= HALF
    assert early.prefetched > 0
    assert early.prefetched_bytes == early.prefetched * stats.models[0].expert_bytes
    assert early.useful > 0


def test_two_workers_that_look_ahead_are_exact_and_all_is_settled_when_one_goes() -> None:
    plain = load_model(DEMO_MODEL)[0]
    prompts = [prompt(9, 1, seed) for seed in range(2)]
    with (
        real_daemon(str(HALF), "--poison-free-slots") as daemon,
        looking_ahead(daemon) as (first, _),
    ):
        with looking_ahead(daemon) as (second, _):
            for _ in range(3):
                for one, text in zip((first, second), prompts, strict=True):
                    assert first_difference(greedy(one, text, 8), greedy(plain, text, 8)) is None
        before = daemon.stats()
        assert before.prefetch.prefetched > 0
        # the one that is left hears nothing of the other's end
        assert first_difference(greedy(first, prompts[1], 8), greedy(plain, prompts[1], 8)) is None
        assert daemon.stats().sessions[0].mismatches == 0


def test_with_prefetch_off_no_worker_wishes_for_anything() -> None:
    with real_daemon(str(HALF), "--prefetch", "off") as daemon:
        with looking_ahead(daemon) as (ours, stream):
            greedy(ours, prompt(5, 1), 8)
            assert not stream.client.takes_wishes()
        assert daemon.stats().prefetch == Prefetched()


def test_a_model_that_fits_is_not_looked_ahead_in() -> None:
    with real_daemon("64MiB", "--no-warm") as daemon, looking_ahead(daemon) as (ours, stream):
        greedy(ours, prompt(5, 1), 8)
        assert not stream.client.takes_wishes()


@pytest.fixture(scope="module")
def half() -> Iterator[RealDaemon]:
    with real_daemon(str(HALF)) as daemon:
        yield daemon


@pytest.fixture
def client(half: RealDaemon) -> Iterator[Client]:
    with Client.connect(half.run_dir, name="wishing") as client:
        client.attach(demo_source(), quota_min=4, quota_wanted=8)
        yield client


@pytest.mark.parametrize(
    "wish",
    [
        [4, -1, [0]], [4, 6, [0]], [4, 0, [32]], [4, 0, [-1]], [4, 0, []], [4, 0, "no"], [4, 0],
        [4, 1 << 63, [0]], [4, 0, [1 << 63]], [4, 0, [True]], [4, None, [0]],
        [4, 0, list(range(65))], [4, 0, [[0]]], [4, 0, [0], 0],
    ],
)  # fmt: skip
def test_a_bad_wish_is_dropped_and_the_next_miss_is_served_D34(
    wish: object, client: Client, half: RealDaemon
) -> None:
    before = half.stats().prefetch
    client._session.dealer.send(msgpack.packb(wish))

    words = client.pin(0, np.array([1, 2], np.intp), Phase.DECODE)

    assert len(words) == 2
    assert half.stats().prefetch == before


def test_a_flood_of_wishes_from_one_stops_no_other_F8(client: Client, half: RealDaemon) -> None:
    taken = 0
    with Client.connect(half.run_dir, name="honest") as honest:
        honest.attach(demo_source(), quota_min=4, quota_wanted=8)
        for n in range(2000):
            with contextlib.suppress(DeadlineExceeded):  # its own queue is full
                experts = (n % 32, n // 7 % 32)
                client._session.dealer.send(codec.encode_wish(Wish(n % 6, experts)))
                taken += 1
            if n % 50 == 0:
                first = n % 28
                wanted = np.arange(first, first + 4)
                assert len(honest.pin(n % 6, wanted, Phase.DECODE)) == 4
                honest.unpin()
    assert taken > 100


def test_a_daemon_that_is_stopped_gets_few_wishes_so_that_misses_have_room(
    client: Client, half: RealDaemon
) -> None:
    assert client.takes_wishes()
    absent = np.flatnonzero(~client.resident(5))[:1]
    os.kill(half.pid, signal.SIGSTOP)
    try:
        for _ in range(100):
            client.wish(5, absent)
        assert not client.takes_wishes()
        assert client._session.wishes == WISHES_MOST
    finally:
        os.kill(half.pid, signal.SIGCONT)

    wait_until("the daemon has taken them", client.takes_wishes)
    assert len(client.pin(0, np.array([1, 2], np.intp), Phase.DECODE)) == 2
