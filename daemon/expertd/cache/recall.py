"""Recall: which earlier passes looked like this one, and what they used next.

Owns a ring of the last passes of all sessions of one model, as sets of experts per layer. A session
scores every remembered pass by how many experts it shares with the layers of its own pass so far; the
best ones are its neighbours. What a neighbour used in the layers still to come, and in the pass that
followed it, is a guess at what the session will use. Plain arrays, a fixed size, no clock. Never looks
at what is resident.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertd_protocol.layout import Ints

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: Passes to remember. 1,024 passes of 94 layers x 8 experts are 4.6 MB.
PASSES = 1024
#: Most experts of one layer that are remembered; a larger set is a batch or a prefill and says little.
WIDTH_MOST = 32
#: A layer further back counts this much less: the last six or seven layers decide.
LAYER_FADE = 0.85
#: Neighbours that are asked.
NEIGHBOURS = 16
#: The weight of a neighbour is exp(-SHARPNESS x the share of experts it did not have in common).
SHARPNESS = 6.0


@dataclass
class Place:
    """Where a session is: its pass, its layer, and how well each remembered pass fits."""

    scores: F32
    #: Score that a pass equal to this one would have.
    perfect: float = 0.0
    #: The pass being written; -1 before the first.
    row: int = -1
    #: The layer visited last; -1 before the first.
    layer: int = -1


class Recall:
    """The ring of passes of one model."""

    def __init__(self, layers: int, experts: int, passes: int = PASSES) -> None:
        self.layers, self.experts, self.passes = layers, experts, passes
        #: The pass that followed each one in its session; -1 when none did yet.
        self.following = np.full(passes, -1, np.intp)
        self.places: list[Place] = []
        self._begun = 0
        self._width = min(8, experts)
        self._bits = np.zeros((layers, -(-experts // 64), passes), np.uint64)
        self._keys = self._no_keys(self._width)
        self._layer = np.arange(layers)

    def place(self) -> Place:
        """Return the place of a new session."""
        place = Place(np.zeros(self.passes, np.float32))
        self.places.append(place)
        return place

    def forget(self, place: Place) -> None:
        """The session is over; its passes stay."""
        self.places = [other for other in self.places if other is not place]

    def see(self, place: Place, rows: Ints, used: Bools) -> None:
        """Take in the next layers of a session.

        Args:
            rows: layers in the order they were visited, at most one round of them.
            used: bool[len(rows), experts].
        """
        later = int(np.count_nonzero(rows > place.layer))
        if place.row < 0:
            self._begin(place)
        if later:
            self._see(place, rows[:later], used[:later])
        if later < len(rows):
            self._begin(place)
            self._see(place, rows[later:], used[later:])

    def guess(self, place: Place) -> tuple[F64, F64]:
        """Return what the neighbours did on the next visit of each layer, and on the one after it.

        Returns:
            Votes f64[2, layers, experts] and the votes cast f64[2, layers, 1]; at most NEIGHBOURS.
        """
        best = np.argpartition(place.scores, -NEIGHBOURS)[-NEIGHBOURS:]
        best = best[place.scores[best] > 0]
        missed = 1 - place.scores[best] / max(place.perfect, 1e-9)
        weights = np.exp(-SHARPNESS * missed.astype(np.float64))
        second = self.following[best]
        third = np.where(second >= 0, self.following[second], -1)
        # a layer still to come in this pass is visited next in it, any other in the pass after it
        passes = np.where(
            self._layer > place.layer,
            np.array((best, second))[..., None],
            np.array((second, third))[..., None],
        )  # [visit, neighbour, layer]
        cast = np.where(passes >= 0, weights[:, None], 0.0)
        chosen = self._keys[passes, self._layer]
        n = self.layers * self.experts + 1
        chosen[1] += n
        votes = np.bincount(chosen.ravel(), np.repeat(cast, self._width), 2 * n).astype(np.float64)
        shape = (2, self.layers, self.experts)
        total: F64 = cast.sum(1)[..., None]
        return votes.reshape(2, n)[:, :-1].reshape(shape), total

    def _see(self, place: Place, rows: Ints, used: Bools) -> None:
        place.layer = int(rows[-1])
        row, expert = np.nonzero(used)
        sizes = np.bincount(row, minlength=len(rows))
        most = min(WIDTH_MOST, max(self.experts // 2, 1))
        if int(sizes.max()) > most:
            known = sizes <= most
            rows, used, sizes = rows[known], used[known], sizes[known]
            row, expert = np.nonzero(used)
        if not len(row):
            return
        if (widest := int(sizes.max())) > self._width:
            self._widen(widest)
        self._compare(place, rows, used)
        layers = rows[row]
        nth = np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
        self._keys[place.row, layers, nth] = layers * self.experts + expert

    def _compare(self, place: Place, rows: Ints, used: Bools) -> None:
        bits = self._words(used)
        shared = np.bitwise_count(self._bits[rows] & bits[..., None]).sum(1, np.uint8)
        fades = _fades(len(rows))
        place.scores *= LAYER_FADE ** len(rows)
        place.scores += fades @ shared
        place.scores[place.row] = 0
        perfect = fades @ np.bitwise_count(bits).sum(1)
        place.perfect = place.perfect * LAYER_FADE ** len(rows) + float(perfect)
        self._bits[rows, :, place.row] = bits

    def _words(self, used: Bools) -> npt.NDArray[np.uint64]:
        """Sets as bits, u64[sets, words]."""
        padded = np.zeros((len(used), self._bits.shape[1] * 64), np.uint8)
        padded[:, : self.experts] = used
        return np.packbits(padded, 1).view(np.uint64)

    def _begin(self, place: Place) -> None:
        row = self._begun % self.passes
        self._begun += 1
        self.following[self.following == row] = -1
        self.following[row] = -1
        self._bits[:, :, row] = 0
        self._keys[row] = self.layers * self.experts
        for other in self.places:
            other.scores[row] = 0
            if other.row == row:  # it has stood still for a whole ring
                other.row = -1
        place.scores[:] = place.perfect = 0
        if place.row >= 0:
            self.following[place.row] = row
        place.row = row

    def _widen(self, width: int) -> None:
        keys = self._no_keys(width)
        keys[:, :, : self._width] = self._keys
        self._keys, self._width = keys, width

    def _no_keys(self, width: int) -> npt.NDArray[np.int32]:
        """Room for what each pass used, i32[passes, layers, width]: layer x experts + expert."""
        return np.full((self.passes, self.layers, width), self.layers * self.experts, np.int32)


def _fades(rows: int) -> F32:
    """What each of the last layers counts, the latest 1."""
    return (LAYER_FADE ** np.arange(rows - 1, -1, -1)).astype(np.float32)
