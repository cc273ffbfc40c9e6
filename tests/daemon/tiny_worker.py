"""A model folder of two layers, and a worker of it: in a thread of the test, or as a process.

As a process: `python -m tests.daemon.tiny_worker RUN_DIR FOLDER [hold] [fork]` attaches, with `hold` pins
two experts, with `fork` leaves its sockets to a child of its own, and says the child's pid or -1. Then
each line of stdin is a command: `hang up` or `pin`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from expertd_client import Client, ModelSource
from expertd_protocol.layout import Phase, word_slots
from expertd_protocol.messages import LayerSource, PartSource
from tests.safetensors_files import Raw, expert_tensors, write_model

LAYERS, EXPERTS = 2, 8


@cache
def tensors(layer: int) -> dict[str, Raw]:
    """Return the tensors of a layer, large enough that a few slots are not rounded up to many."""
    return expert_tensors(layer, experts=EXPERTS, hidden=256, width=64)


def write(folder: Path) -> Path:
    return write_model(folder, [tensors(n) for n in range(LAYERS)])


def source(folder: Path) -> ModelSource:
    """Say what a worker says of the folder."""
    layers = []
    for layer in range(LAYERS):
        path = f"model.layers.{layer}.mlp.switch_mlp"
        parts = tuple(
            PartSource(
                name=name.removeprefix(f"{path}."),
                tensor=name,
                dtype=raw.dtype,
                shape=raw.shape[1:],
            )
            for name, raw in tensors(layer).items()
        )
        layers.append(LayerSource(path=path, parts=parts))
    return ModelSource(folder, EXPERTS, tuple(layers))


@contextmanager
def attached(run_dir: Path, folder: Path, quota: int = 2) -> Iterator[Client]:
    with Client.connect(run_dir, daemon_deadline_seconds=2.0) as client:
        client.attach(source(folder), quota_min=quota, quota_wanted=quota)
        yield client


def pin(client: Client, layer: int, *experts: int) -> None:
    """Pin, and compare every byte with the model's own."""
    words = client.pin(layer, np.array(experts, np.intp), Phase.DECODE)
    arena = client.arena
    slab = arena.slabs[arena.slab_of_layer[layer]]
    for number, part in enumerate(arena.source.layers[layer].parts):
        whole, plane = tensors(layer)[part.tensor].data, slab.plane(number)
        size = len(whole) // EXPERTS
        for expert, slot in zip(experts, word_slots(words), strict=True):
            assert plane[slot].tobytes() == whole[expert * size : (expert + 1) * size]


def main() -> None:
    run_dir, folder, *how = sys.argv[1:]
    with attached(Path(run_dir), Path(folder)) as client:
        if "hold" in how:
            pin(client, 0, 1, 2)
        child = os.fork() if "fork" in how else -1
        if child:
            print(child, flush=True)
        for line in sys.stdin:
            if line == "hang up\n":
                client._session.attach._sock.shutdown(2)
            else:
                client.unpin()
                pin(client, 0, 1, 2)
        os._exit(0)  # not `close`: it may be a forked child, or have hung up


if __name__ == "__main__":
    main()
