"""Stats as text and as JSON."""

import json

from expertctl import render
from expertd_protocol.stats import Prefetched, Stats

GOLDEN = """\
daemon   0.1.0, pid 99, up 3m05s, in /run/user/1/expertd
budget   128 KiB: 96.0 KiB committed (75.0%), 112 KiB at most so far
memory   slabs 64.0 KiB, read buffers 16.0 KiB, directories 4.00 KiB, worker pages 12.0 KiB
experts  43.0 KiB resident, 8.00 KiB pinned, 187 evictions
slots    48: 43 ready, 1 filling, 1 retired, 3 free; 8 pinned
device   230 reads, 512 KiB; saved by sharing 110 reads, 110 KiB; 2 queued

of            phase    tokens  lookups   hits  joins  misses  hit rate  hit bytes  miss bytes   waited
total         all          84    1,600  1,260    110     230     78.8%   1.23 MiB     340 KiB   1.52 s
              prefill      20      100     60     10      30     60.0%   60.0 KiB    40.0 KiB  20.0 ms
              decode       64    1,500  1,200    100     200     80.0%   1.17 MiB     300 KiB   1.50 s
org/tiny-moe  all          84    1,600  1,260    110     230     78.8%   1.23 MiB     340 KiB   1.52 s
              prefill      20      100     60     10      30     60.0%   60.0 KiB    40.0 KiB  20.0 ms
              decode       64    1,500  1,200    100     200     80.0%   1.17 MiB     300 KiB   1.50 s
agent-1       all          84    1,600  1,260    110     230     78.8%   1.23 MiB     340 KiB   1.52 s
              prefill      20      100     60     10      30     60.0%   60.0 KiB    40.0 KiB  20.0 ms
              decode       64    1,500  1,200    100     200     80.0%   1.17 MiB     300 KiB   1.50 s
pid 4243      all           0        0      0      0       0         -        0 B         0 B   0.0 ms
              prefill       0        0      0      0       0         -        0 B         0 B   0.0 ms
              decode        0        0      0      0       0         -        0 B         0 B   0.0 ms

time of a miss, at the daemon
of            requests      p50      p95      p99      max
total              102  0.21 ms  0.84 ms  1.50 ms  3.25 ms
org/tiny-moe       102  0.21 ms  0.84 ms  1.50 ms  3.25 ms
agent-1            102  0.21 ms  0.84 ms  1.50 ms  3.25 ms
pid 4243             0        -        -        -        -

model         state  layers  experts    expert  all experts  resident    pinned  slots  evictions  device reads  device bytes  saved reads  saved bytes
org/tiny-moe  ready       6       32  1.00 KiB      192 KiB  43.0 KiB  8.00 KiB  43/48        187           230       512 KiB          110      110 KiB

file                                                             read mode  reads    bytes  errors
/cache/models--org--tiny-moe/snapshots/abc123/model.safetensors  direct       230  512 KiB       0

name     model         state      pid  quota  pinned  tokens  hit bytes  miss bytes  waited     age
agent-1  org/tiny-moe  serving   4242      8       4      84   1.23 MiB     340 KiB  1.52 s   1m15s
-        org/tiny-moe  detached  4243      8       0       0        0 B         0 B  0.0 ms  3.00 s"""  # noqa: E501


def test_the_text_has_every_figure_by_total_model_and_worker(stats: Stats) -> None:
    assert render.stats_text(stats) == GOLDEN


def test_a_hit_rate_never_stands_without_bytes_and_waiting() -> None:
    assert {"hit rate", "hit bytes", "miss bytes", "waited"} <= set(render._LOOKUPS)


def test_json_is_the_snapshot_and_its_derived_figures(stats: Stats) -> None:
    value = json.loads(json.dumps(render.as_json(stats)))
    derived = value.pop("derived")

    assert Stats.model_validate(value) == stats
    assert derived["total"]["lookups"] == 1600
    assert derived["total"]["hit_rate"] == 1260 / 1600
    assert derived["total"]["wait_seconds"] == 1.52
    assert derived["total"]["byte_hit_rate"] == 1260 / 1600
    assert derived["budget_used"] == 0.75
    assert [s["pid"] for s in derived["sessions"]] == [4242, 4243]
    assert [m["path"] for m in derived["models"]] == [stats.models[0].path]


def test_read_errors_are_shown_when_there_are_any(stats: Stats) -> None:
    assert "read errors" not in render.stats_text(stats)
    assert "3 read errors" in render.stats_text(stats.model_copy(update={"read_errors": 3}))


def test_prefetch_is_shown_when_something_was_prefetched(stats: Stats) -> None:
    early = Prefetched(prefetched=1200, prefetched_bytes=3 << 20, useful=700, late=100, wasted=350)

    assert "prefetch" not in render.stats_text(stats)
    assert (
        "prefetch 1,200 experts, 3.00 MiB: 700 useful, 100 late, 350 wasted\n"
        in render.stats_text(stats.model_copy(update={"prefetch": early}))
    )


def test_a_daemon_without_models_is_short(stats: Stats) -> None:
    empty = stats.model_copy(update={"models": (), "sessions": ()})

    assert "read mode" not in render.stats_text(empty)
    assert render.workers_text(empty) == "no worker is attached"


def test_a_model_is_named_by_its_folder_or_its_hub_id() -> None:
    assert render.model_name("/home/me/models/Qwen3-30B") == "Qwen3-30B"
    assert render.model_name("/c/models--a--b-c/snapshots/0f") == "a/b-c"
    assert render.model_name("/") == "/"
