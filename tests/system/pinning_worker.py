"""A worker process without MLX: pins random experts of the bundled model and compares every byte.

Prints `pinned` when it holds its first pin, then a line `checked N` now and then; with --hold it keeps
its first pin for ever; with --ask it sends a miss request, says `asked` and waits; with --attach-loop it
attaches and detaches for ever. Ends with `done checked=N mismatches=M` after --passes pins.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from expertd_client import Client
from expertd_protocol.layout import Phase, word_slots
from tests.system.daemon import DEMO_MODEL, demo_index, demo_source


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=10**9)
    parser.add_argument("--quota", type=int, default=4)
    parser.add_argument("--experts", default="0:32", help="range of expert ids to ask for")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--attach-loop", action="store_true")
    args = parser.parse_args()
    if args.attach_loop:
        while True:
            with Client.connect(args.run_dir, name="looper") as client:
                say("connected")
                client.attach(demo_source(args.model), quota_min=args.quota, quota_wanted=32)
    with Client.connect(args.run_dir, name=f"worker-{args.seed}") as client:
        source = demo_source(args.model)
        client.attach(source, quota_min=args.quota, quota_wanted=args.quota)
        run(client, args)


def run(client: Client, args: argparse.Namespace) -> None:
    index = demo_index(args.model)
    files = [shard.path.read_bytes() for shard in index.index.shards]
    low, high = map(int, args.experts.split(":"))
    rng = np.random.default_rng(args.seed)
    checked = mismatches = 0
    for n in range(args.passes):
        client.begin_pass()
        layer = int(rng.integers(6))
        count = int(rng.integers(1, args.quota + 1))
        experts = low + rng.choice(high - low, count, replace=False).astype(np.intp)
        words = client.pin(layer, experts, Phase.DECODE)
        if n == 0:
            say("pinned")
        while args.hold:
            time.sleep(1)
        slots = word_slots(words)
        slab = client.arena.slabs[client.arena.slab_of_layer[layer]]
        for part in range(9):
            plane = slab.plane(part)
            for expert, slot in zip(experts[: len(words)], slots, strict=True):
                where = index.ranges(layer, int(expert))[part]
                wanted = files[where.shard][where.offset : where.offset + where.nbytes]
                if plane[slot].tobytes() != wanted:
                    mismatches += 1
                    say(f"WRONG layer={layer} expert={expert} part={part}")
                checked += 1
            del plane
        mismatches += not client.verify()
        client.unpin()
        client.end_pass(1, Phase.DECODE)
        client.drop_old_arenas()
        if n % 50 == 0:
            say(f"checked {checked}")
    say(f"done checked={checked} mismatches={mismatches}")
    sys.exit(1 if mismatches else 0)


if __name__ == "__main__":
    main()
