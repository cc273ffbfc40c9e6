"""A worker process of `stamping_daemon`: pins experts, and compares every word of their slots.

With --stop-at it makes one expert resident, pins it once more, and there stops itself (SIGSTOP) after a
line `stopped WORD`: at `look` between its look and the hazard, at `use` with the pin complete and
nothing read. Without, it pins at random --passes times, sleeping now and then where it hurts most. A
--fault is left out. Ends with `done words=N wrong=N mismatches=N`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from expertd_client import Client
from expertd_protocol.layout import Header, Ints, Phase, unpack_word
from tests.pin_protocol.careless import Fault, Row, stamp
from tests.system.daemon import demo_source

LAYERS, EXPERTS, QUOTA = 6, 32, 2


class StampedWorker:
    def __init__(self, client: Client, fault: Fault | None) -> None:
        self.client = client
        self.fault = fault
        self.words = self.wrong = 0
        self.at_look: Callable[[], object] = nothing
        self.at_use: Callable[[], object] = nothing
        pins = client._pins
        assert pins is not None
        if fault is Fault.PUBLISH:  # into a page that nobody scans
            pins._hazards = np.zeros_like(pins._hazards)
        pins._rows = tuple(
            Row(row, lambda: self.at_look(), looks_again=fault is not Fault.SECOND_LOOK)
            for row in client.arena.directory
        )

    def pin_and_use(self, layer: int, experts: Ints) -> None:
        """One layer as `expertd_mlx` has it: pin, compute, verify, unpin."""
        words = self.client.pin(layer, experts, Phase.DECODE)
        if self.fault is Fault.EVALUATED:
            self.client.unpin()
        self.at_use()
        for expert, word in zip(experts.tolist(), words.tolist(), strict=True):
            generation, slab, slot = unpack_word(word)
            for part in range(len(self.client.arena.slabs[slab].layout.parts)):
                row = self.client.arena.slabs[slab].plane(part)[slot].view(np.uint32)
                self.words += len(row)
                self.wrong += int(np.count_nonzero(row != stamp(layer, expert, generation)))
        self.client.verify()
        self.client.unpin()

    def stop(self) -> None:
        """Stand still until somebody sends SIGCONT."""
        self.at_look = self.at_use = nothing
        word = int(self.client.arena.directory[0, 0])
        print(f"stopped {word}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--fault", choices=[fault.name for fault in Fault])
    parser.add_argument("--stop-at", choices=["look", "use"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=0)
    args = parser.parse_args()
    with Client.connect(args.run_dir, name=f"worker-{args.seed}") as client:
        client.attach(demo_source(), quota_min=QUOTA, quota_wanted=QUOTA)
        worker = StampedWorker(client, Fault[args.fault] if args.fault else None)
        if args.stop_at:
            first = np.zeros(1, np.intp)
            worker.pin_and_use(0, first)
            setattr(worker, f"at_{args.stop_at}", worker.stop)
            worker.pin_and_use(0, first)
        else:
            dice = random.Random(args.seed)
            worker.at_look = partial(doze, dice, 0.3)
            worker.at_use = partial(doze, dice, 0.05)
        for _ in range(args.passes):
            experts = dice.sample(range(EXPERTS), dice.randint(1, QUOTA))
            worker.pin_and_use(dice.randrange(LAYERS), np.array(experts, np.intp))
        mismatches = int(client.arena.page.header[Header.MISMATCHES])
        print(f"done words={worker.words} wrong={worker.wrong} mismatches={mismatches}", flush=True)


def nothing() -> None:
    """What happens where nobody stops."""


def doze(dice: random.Random, odds: float) -> None:
    if dice.random() < odds:
        time.sleep(dice.random() * 0.02)


if __name__ == "__main__":
    main()
