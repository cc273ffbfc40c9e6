"""What a hit costs: pin and unpin 8 resident experts, against one ZeroMQ round trip.

    python bench/hit_path.py [--json] [--save]

The daemon side is the client's `FakeDaemon` in a process of its own; a hit never reaches it, which is
checked. One sample is a pass over 48 layers and its end, which counts, divided by 48. The round trip is
the message that a hit saves, with nothing else behind it: a request for 8 experts encoded, sent over ipc
(about 60 bytes with its routing id), decoded by a ROUTER in another process, and its reply of 8 words on
the same way back.
`zmq_bare_rtt_us` is the same with bytes that nobody encodes or decodes. Rounds of all three alternate, so
that whatever else runs here hits all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("client", "protocol")]  # works uninstalled

# ruff: noqa: E402
import numpy as np
import zmq
from record import circumstances, finish

from expertd_client import Client
from expertd_client.testing import tiny_source
from expertd_protocol import codec
from expertd_protocol.layout import Phase
from expertd_protocol.messages import Miss

EXPERTS = 8
LAYERS = 48
ROUNDS, PASSES_PER_ROUND, TRIPS_PER_ROUND = 50, 40, 100

SERVER = """
import sys, zmq
from expertd_protocol import codec
from expertd_protocol.messages import MissReply
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print("ready", flush=True)
words = tuple((1 << 32) + n for n in range(8))
while True:
    worker, data = router.recv_multipart()
    if codec.is_miss(data):
        miss = codec.decode_miss(data)
        data = codec.encode_reply(MissReply(miss.seq, words, 0, len(words)))
    router.send_multipart([worker, data])
"""
BARE = b"b" * 44


def started(*args: str) -> subprocess.Popen[str]:
    """Start a Python process and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{args} did not start")
    return process


def each_us(call: Callable[[], int]) -> float:
    """Return the microseconds of one of the operations that `call` does and counts."""
    start = time.perf_counter_ns()
    count = call()
    return (time.perf_counter_ns() - start) / 1000 / count


def measure(run_dir: Path) -> dict[str, float]:
    """Return medians over all rounds."""
    rng = np.random.default_rng(0)
    url = f"ipc://{run_dir}/echo.sock"
    server = started("-c", SERVER, url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, b"S" * 16)
    dealer.connect(url)
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    try:
        with Client.connect(run_dir, name="hit_path") as client:
            client.attach(
                tiny_source(layers=LAYERS, experts=128), quota_min=EXPERTS, quota_wanted=EXPERTS
            )
            wanted = [
                (layer, rng.choice(128, EXPERTS, replace=False).astype(np.intp))
                for layer in range(LAYERS)
            ]
            for layer, experts in wanted:
                client.pin(layer, experts, Phase.DECODE)
                client.unpin()
            requests = client.arena.page.counters[Phase.DECODE][9]
            ids = tuple(wanted[0][1].tolist())

            def one_pass() -> int:
                for layer, experts in wanted:
                    client.pin(layer, experts, Phase.DECODE)
                    client.unpin()
                client.end_pass(1, Phase.DECODE)
                return len(wanted)

            def one_trip() -> int:
                dealer.send(codec.encode_miss(Miss(1_000_000, 47, 1, ids)))
                poller.poll(1000)
                codec.decode_reply(dealer.recv(zmq.NOBLOCK))
                return 1

            def one_bare_trip() -> int:
                dealer.send(BARE)
                poller.poll(1000)
                dealer.recv(zmq.NOBLOCK)
                return 1

            hits: list[float] = []
            trips: list[float] = []
            bare: list[float] = []
            for _ in range(ROUNDS):
                hits += [each_us(one_pass) for _ in range(PASSES_PER_ROUND)]
                trips += [each_us(one_trip) for _ in range(TRIPS_PER_ROUND)]
                bare += [each_us(one_bare_trip) for _ in range(TRIPS_PER_ROUND)]
            if client.arena.page.counters[Phase.DECODE][9] != requests:
                raise SystemExit("a pin of resident experts sent a message")
    finally:
        dealer.close(0)
        context.term()
        server.kill()
        server.wait()
    hit, rtt = statistics.median(hits), statistics.median(trips)
    return {
        "hit_us": round(hit, 2),
        "zmq_rtt_us": round(rtt, 2),
        "ratio": round(rtt / hit, 1),
        "zmq_bare_rtt_us": round(statistics.median(bare), 2),
        "hit_p10_us": round(statistics.quantiles(hits, n=10)[0], 2),
        "hit_p90_us": round(statistics.quantiles(hits, n=10)[8], 2),
        "zmq_rtt_p10_us": round(statistics.quantiles(trips, n=10)[0], 2),
        "zmq_rtt_p90_us": round(statistics.quantiles(trips, n=10)[8], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write bench/results/hit_path.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="xd-") as parent:
        run_dir = Path(parent) / "run"
        daemon = started("-m", "expertd_client.testing", str(run_dir))
        try:
            figures: dict[str, object] = {**measure(run_dir)}
        finally:
            daemon.kill()
            daemon.wait()
    figures |= {
        "experts": EXPERTS,
        "rounds": ROUNDS,
        "samples": {"hit": ROUNDS * PASSES_PER_ROUND * LAYERS, "zmq_rtt": ROUNDS * TRIPS_PER_ROUND},
        "libzmq": zmq.zmq_version(),
        **circumstances(load),
    }
    finish("hit_path", figures, as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
