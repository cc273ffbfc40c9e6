"""What workers hold, read from their pages. The pages are hostile input: every word is range-checked.

A hazard word is the directory word of an expert that its worker may be reading. Only the proven death
of the process ends it (rule 4 scans, `sessions.py` proves); nothing here waits for one to end.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from expertd_protocol.layout import U64, Ints, word_generations, word_slabs, word_slots


def held_slots(pages: Iterable[U64], slab: int, generations: U64) -> Ints:
    """Return the slots of `slab` that some hazard names with the slot's present generation.

    Args:
        pages: one u64[quota] array of hazard words per worker.
        slab: number of the slab.
        generations: u64[slots] of the slab.
    """
    words = _all_words(pages)
    if not len(words):
        return words.astype(np.intp)
    slots = word_slots(words)
    good = (word_slabs(words) == slab) & (slots >= 0) & (slots < len(generations))
    words, slots = words[good], slots[good]
    # a stale generation names something that is gone already, and keeps nothing alive
    held = np.zeros(len(generations), bool)  # np.unique: 8 us, this: 4
    held[slots[word_generations(words) == generations[slots]]] = True
    return np.flatnonzero(held)


def held_words(pages: Iterable[U64]) -> set[int]:
    """Return all hazard words of all pages: a slot is held when its own word is among them."""
    return set(_all_words(pages).tolist())


def count_held(page: U64) -> int:
    """Return how many experts one worker holds now."""
    return int(np.count_nonzero(page))


def _all_words(pages: Iterable[U64]) -> U64:
    # copied once, so that a worker that writes meanwhile cannot change what was checked
    words: U64 = np.concatenate([*pages, np.empty(0, np.uint64)])
    set_words: U64 = words[words != 0]
    return set_words
