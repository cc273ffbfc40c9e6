"""Pin rules 1, 2, 3 and 6 from the worker's side, against real shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd_client import Client, pins
from expertd_client.testing import FakeDaemon, FakeSession, holds, tiny_source
from expertd_protocol.errors import ProtocolError, QuotaExceeded
from expertd_protocol.fence import fence as real_fence
from expertd_protocol.layout import U64, Counter, Header, Ints, Phase
from expertd_protocol.messages import Miss

DECODE = Phase.DECODE


def ids(*experts: int) -> Ints:
    return np.array(experts, np.intp)


def counted(client: Client, phase: Phase = DECODE) -> dict[str, int]:
    assert client._pins is not None
    client._pins.publish()
    row = client.arena.page.counters[phase]
    return {counter.name.lower(): int(row[counter]) for counter in Counter if row[counter]}


def all_right(client: Client, layer: int, experts: Ints, words: U64) -> bool:
    return all(
        holds(client.arena, layer, expert, word)
        for expert, word in zip(experts.tolist(), words.tolist(), strict=True)
    )


def test_a_hit_sends_no_message(client: Client, daemon: FakeDaemon) -> None:
    words = daemon.fill(1, 4, 7)

    assert client.pin(1, ids(7, 4), DECODE).tolist() == words[::-1]
    assert daemon.requests == []
    nbytes = client.arena.source.expert_bytes[1]
    assert counted(client) == {"lookups": 2, "hits": 2, "hit_bytes": 2 * nbytes}


def test_all_misses_of_a_pin_go_out_in_one_message_B14(client: Client, daemon: FakeDaemon) -> None:
    daemon.fill(2, 5)
    experts = ids(9, 5, 3, 0)
    words = client.pin(2, experts, DECODE)

    assert all_right(client, 2, experts, words)
    assert daemon.requests == [Miss(1, 2, DECODE, (9, 3, 0))]
    counts, nbytes = counted(client), client.arena.source.expert_bytes[2]
    assert counts.pop("wait_ns") > 0
    assert counts == {
        "lookups": 4,
        "hits": 1,
        "misses": 3,
        "requests": 1,
        "hit_bytes": nbytes,
        "miss_bytes": 3 * nbytes,
    }


def test_hits_stay_pinned_while_the_misses_are_fetched(run_dir: Path) -> None:
    seen: list[list[int]] = []

    class Watching(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            assert session.page is not None
            seen.append(session.page.hazards.tolist())
            return super().answer(session, miss)

    with Watching(run_dir, slots=3, layers_per_slab=1) as daemon, Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=3, quota_wanted=3)
        first, second = 0, 1
        client.pin(0, ids(first, second, 2), DECODE)
        client.unpin()
        with daemon.lock:
            kept = [daemon.model.words[0, first], daemon.model.words[0, second]]
        words = client.pin(0, ids(first, second, 9), DECODE)

        assert seen[-1] == [*kept, 0]
        assert words.tolist()[:2] == kept
        assert all_right(client, 0, ids(first, second, 9), words)


def test_pinned_words_are_hazards_until_unpin(client: Client) -> None:
    words = client.pin(0, ids(1, 2, 3), DECODE)
    more = client.pin(1, ids(4, 5), DECODE)

    assert client.arena.page.hazards.tolist() == [*words, *more, 0, 0, 0]
    assert client.verify()
    client.unpin()
    assert not client.arena.page.hazards.any()


def test_the_page_says_which_pin_used_an_expert_last(client: Client) -> None:
    uses = client.arena.page.uses
    seen = []
    for layer, experts in ((1, ids(2, 6)), (1, ids(2, 6)), (0, ids(3)), (1, ids(6))):
        client.pin(layer, experts, DECODE)  # the second one and the last are hits
        client.unpin()
        seen.append((uses[0, 3], *uses[1, [2, 6]].tolist()))

    assert seen == [(0, 1, 1), (0, 2, 2), (3, 2, 2), (3, 2, 4)]
    assert np.count_nonzero(uses) == 3


def test_the_number_of_a_pin_wraps_at_32_bits(client: Client) -> None:
    uses, mine = client.arena.page.uses, client._pins
    assert mine is not None
    mine._pinned = 0xFFFF_FFFE
    seen = []
    for _ in range(3):
        client.pin(0, ids(3), DECODE)
        client.unpin()
        seen.append(int(uses[0, 3]))

    assert seen == [0xFFFF_FFFF, 0, 1]


def test_many_experts_are_counted_like_few(run_dir: Path) -> None:
    with FakeDaemon(run_dir), Client.connect(run_dir) as client:
        client.attach(tiny_source(experts=64), quota_min=2, quota_wanted=40)
        experts = ids(*range(0, 64, 2))
        words = client.pin(1, experts, Phase.PREFILL)

        assert client.verify()
        assert all_right(client, 1, experts, words)
        assert np.flatnonzero(client.arena.page.uses[1]).tolist() == experts.tolist()
        assert counted(client, Phase.PREFILL)["lookups"] == 32
        assert counted(client) == {}


class Blind:
    """A directory row whose second read shows what the first one saw: rule 1 without its re-check."""

    def __init__(self, row: U64) -> None:
        self._row = row
        self._seen: U64 | None = None

    def take(self, experts: Ints, axis: None, out: U64, mode: str) -> None:
        self._row.take(experts, axis, out, "clip")
        self._seen = out.copy()

    def __getitem__(self, experts: Ints) -> U64:
        assert self._seen is not None
        return self._seen


@pytest.mark.parametrize("recheck", [True, False], ids=["with re-check", "control without"])
def test_an_eviction_between_look_and_hazard_is_seen_by_the_recheck(
    run_dir: Path, recheck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        FakeDaemon(run_dir, slots=5, layers_per_slab=1) as daemon,
        Client.connect(run_dir) as client,
    ):
        client.attach(tiny_source(), quota_min=3, quota_wanted=3)
        daemon.fill(0, 0, 1, 2, 3, 4)
        mine = client._pins
        assert mine is not None
        if not recheck:
            mine._rows = (Blind(client.arena.directory[0]),)

        def reuse_the_slot_first() -> None:
            monkeypatch.setattr(pins, "fence", real_fence)
            daemon.evict(0, 1)
            daemon.fill(0, 9)
            real_fence()

        monkeypatch.setattr(pins, "fence", reuse_the_slot_first)
        experts = ids(0, 1, 2)
        words = client.pin(0, experts, DECODE)

        assert all_right(client, 0, experts, words) == recheck
        assert client.verify() == recheck
        assert client.arena.page.header[Header.MISMATCHES] == (0 if recheck else 1)
        assert len(daemon.requests) == (1 if recheck else 0)


def test_verify_fails_when_a_pinned_slot_is_reused(client: Client, daemon: FakeDaemon) -> None:
    client.pin(0, ids(1, 2), DECODE)
    client.pin(1, ids(3), DECODE)
    assert client.verify()
    daemon.evict(0, 2)

    assert not client.verify()
    assert client.arena.page.header[Header.MISMATCHES] == 1
    client.unpin()
    assert client.verify()


def test_a_reply_is_acknowledged_only_after_its_words_are_hazards(
    client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = client.arena.page
    trail: list[tuple[bool, int]] = []

    def watch() -> None:
        real_fence()
        trail.append((bool(page.hazards[:2].all()), int(page.header[Header.ACK])))

    monkeypatch.setattr(pins, "fence", watch)
    client.pin(0, ids(1, 2), DECODE)

    assert int(page.header[Header.ACK]) == 1
    assert (True, 0) in trail  # a fence stands between the hazards and the ack
    assert (False, 1) not in trail
    assert daemon.busy() == set(page.hazards[:2].tolist())


def test_counters_are_never_seen_half_written(
    client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = client.arena.page
    looks: list[bool] = []

    def look() -> None:
        real_fence()
        row = page.counters[DECODE]
        parts = row[[Counter.HITS, Counter.JOINS, Counter.MISSES]].sum()
        if page.header[Header.COUNTER_VERSION] % 2 == 0:
            looks.append(int(parts) == int(row[Counter.LOOKUPS]))

    monkeypatch.setattr(pins, "fence", look)
    for experts in (ids(1, 2), ids(2, 3, 4), ids(1, 2, 3)):
        client.pin(0, experts, DECODE)
        client.unpin()
        client.end_pass(1, DECODE)

    assert looks
    assert all(looks)
    assert page.header[Header.COUNTER_VERSION] % 2 == 0
    assert counted(client)["passes"] == 3


def test_counters_that_an_interrupt_left_half_written_are_written_whole_by_the_next_count(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = client.arena.page
    client.pin(0, ids(1, 2), DECODE)
    client.unpin()
    client.pin(0, ids(1, 2), DECODE)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pins, "fence", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.end_pass(1, DECODE)
    monkeypatch.setattr(pins, "fence", real_fence)

    assert page.header[Header.COUNTER_VERSION] % 2 == 1  # nobody reads it
    counts = counted(client)
    assert page.header[Header.COUNTER_VERSION] % 2 == 0
    assert (counts["lookups"], counts["hits"], counts["misses"], counts["passes"]) == (4, 2, 2, 1)


@pytest.mark.parametrize(
    "then",
    [
        lambda client: client.pin(1, ids(3), DECODE),
        lambda client: client.end_pass(1, DECODE),
        lambda client: client.stats(),
        lambda client: client.close(),
    ],
    ids=["a miss", "the end of a pass", "stats", "close"],
)
def test_hits_reach_the_page_with(
    client: Client, daemon: FakeDaemon, then: Callable[[Client], object]
) -> None:
    daemon.fill(0, 1, 2)
    row = client.arena.page.counters[DECODE]
    client.pin(0, ids(1, 2), DECODE)
    client.unpin()
    then(client)

    assert row[Counter.HITS] == 2
    assert row[Counter.LOOKUPS] == 2 + row[Counter.MISSES]


def test_a_grant_that_is_gone_again_is_asked_for_again_and_counted_once(run_dir: Path) -> None:
    class Hasty(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            reply = self.grant(session, miss)
            if miss.seq == 1:
                self.evict(miss.layer, miss.experts[-1])
            return [reply]

    with Hasty(run_dir) as daemon, Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        experts = ids(3, 4, 5)
        words = client.pin(0, experts, DECODE)

        assert all_right(client, 0, experts, words)
        assert [miss.experts for miss in daemon.requests] == [(3, 4, 5), (5,)]
        counts = counted(client)
        assert (counts["lookups"], counts["misses"], counts["requests"]) == (3, 3, 2)
        assert client.arena.page.header[Header.ACK] == 2


def test_grants_that_never_match_the_directory_end_in_an_error(run_dir: Path) -> None:
    class Lying(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            reply = self.grant(session, miss)
            self.evict(miss.layer, *miss.experts)
            return [reply]

    with Lying(run_dir), Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        with pytest.raises(ProtocolError, match="directory does not have"):
            client.pin(0, ids(3), DECODE)

        assert not client.arena.page.hazards.any()


def test_an_expert_that_another_worker_is_getting_is_a_join(run_dir: Path) -> None:
    class Sharing(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            self.fill(miss.layer, miss.experts[0])
            return super().answer(session, miss)

    with Sharing(run_dir), Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        client.pin(0, ids(3, 4), DECODE)

        counts = counted(client)
        assert (counts["joins"], counts["misses"], counts["lookups"]) == (1, 1, 2)
        assert counts["miss_bytes"] == 2 * client.arena.source.expert_bytes[0]


def test_wrong_layers_and_experts_are_refused_and_leave_no_hazard(client: Client) -> None:
    for layer, experts in ((0, ids(1, 16)), (0, ids(-1)), (3, ids(1)), (-1, ids(1))):
        with pytest.raises(ProtocolError, match="the model has 3 MoE layers of 16 experts"):
            client.pin(layer, experts, DECODE)

    assert not client.arena.page.hazards.any()
    assert counted(client) == {}
    assert client.arena.page.header[Header.COUNTER_VERSION] % 2 == 0


def test_more_than_the_quota_is_refused_with_the_numbers(client: Client) -> None:
    with pytest.raises(QuotaExceeded, match="9 experts cannot be pinned at once: the quota is 8"):
        client.pin(0, ids(*range(9)), DECODE)
    client.pin(0, ids(*range(8)), DECODE)
    with pytest.raises(QuotaExceeded, match="8 are held"):
        client.pin(1, ids(1), DECODE)


def test_pinning_nothing_pins_nothing(client: Client) -> None:
    assert client.pin(0, ids(), DECODE).tolist() == []
    assert counted(client) == {}


def test_resident_shows_what_is_in_memory(client: Client, daemon: FakeDaemon) -> None:
    daemon.fill(1, 2, 15)

    assert np.flatnonzero(client.resident(1)).tolist() == [2, 15]
    assert not client.resident(0).any()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sets(st.integers(0, 15), min_size=1, max_size=6)),
        min_size=1,
        max_size=20,
    )
)
def test_whatever_is_pinned_has_its_bytes_and_the_counts_add_up(
    pinned: list[tuple[int, set[int]]],
) -> None:
    with tempfile.TemporaryDirectory(prefix="xd-") as parent:
        run_dir = Path(parent) / "run"
        with FakeDaemon(run_dir, slots=8) as daemon, Client.connect(run_dir) as client:
            client.attach(tiny_source(), quota_min=2, quota_wanted=6)
            for layer, chosen in pinned:
                experts = ids(*chosen)
                words = client.pin(layer, experts, DECODE)
                assert all_right(client, layer, experts, words)
                assert client.verify()
                client.unpin()
            client.end_pass(1, DECODE)
            row = client.arena.page.counters[DECODE].tolist()

            assert row[Counter.LOOKUPS] == sum(len(chosen) for _, chosen in pinned)
            assert row[Counter.LOOKUPS] == sum(row[Counter.HITS : Counter.MISSES + 1])
            assert row[Counter.REQUESTS] == len(daemon.requests)
            assert row[Counter.REQUESTS] <= len(pinned)
            assert daemon.busy() == set()
