"""Hypothesis strategies: messages, parts, layers. A new message type is covered without a line here."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import annotated_types
from hypothesis import strategies as st
from pydantic import BaseModel

from expertd_protocol.errors import ErrorCode
from expertd_protocol.layout import DTYPE_BYTES, Part
from expertd_protocol.messages import AnyMessage, Message, Miss, MissError, MissReply, Wish

#: Every class that `codec.decode` can return.
MESSAGE_CLASSES: tuple[type[Message], ...] = typing.get_args(typing.get_args(AnyMessage)[0])

_WIRE_INT_MAX = (1 << 63) - 1


def instances(cls: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Return sound instances of a pydantic model, made from its fields."""
    fields = {
        name: _values(field.annotation, field.metadata)
        for name, field in cls.model_fields.items()
        if name not in ("kind", "version") or field.is_required()
    }
    return st.builds(cls, **fields)


def _values(annotation: Any, metadata: Sequence[Any]) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    least = max(
        (m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)), default=0
    )
    if origin is typing.Annotated:
        return _values(args[0], [*args[1:], *metadata])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(_values(args[0], ()), min_size=least, max_size=3).map(tuple)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return instances(annotation)
    positive = any(isinstance(m, annotated_types.Gt) for m in metadata)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(1 if positive else 0, _WIRE_INT_MAX),
        float: st.floats(0, 1e12),
        str: st.text(min_size=least, max_size=30),
        bytes: st.binary(max_size=16),
    }
    assert not isinstance(annotation, types.UnionType), annotation
    return plain[annotation]


messages = st.one_of(*(instances(cls) for cls in MESSAGE_CLASSES))

_words = st.integers(0, (1 << 64) - 1)
_small = st.integers(0, 1 << 20)
misses = st.builds(
    Miss,
    seq=st.integers(1, _WIRE_INT_MAX),
    layer=_small,
    phase=st.sampled_from((0, 1)),
    experts=st.lists(_small, min_size=1, max_size=20).map(tuple),
)
wishes = st.builds(Wish, layer=_small, experts=st.lists(_small, min_size=1, max_size=64).map(tuple))
replies = st.one_of(
    st.builds(
        MissReply,
        seq=st.integers(1, _WIRE_INT_MAX),
        words=st.lists(_words, max_size=20).map(tuple),
        joined=_small,
        missed=_small,
    ),
    st.builds(
        MissError,
        seq=st.integers(0, _WIRE_INT_MAX),
        code=st.sampled_from([str(c) for c in ErrorCode]) | st.text(max_size=20),
        message=st.text(max_size=100),
    ),
)

#: Anything msgpack can carry.
wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=20,
)


@st.composite
def mutated(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Return sound bytes with one to four bytes changed, cut out or put in."""
    data = bytearray(draw(sound))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("change", "cut", "insert", "truncate"))):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + 1]
            case "insert":
                data.insert(at, draw(st.integers(0, 255)))
            case "truncate":
                del data[at:]
    return bytes(data)


def parts(largest_axis: int = 4096) -> st.SearchStrategy[tuple[Part, ...]]:
    """Return the parts of one expert: a list, never a fixed three by three."""
    one = st.builds(
        Part,
        name=st.sampled_from(("gate_proj.weight", "down_proj.scales", "up_proj.bias", "x")),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        shape=st.lists(st.integers(1, largest_axis), max_size=2).map(tuple),
    )
    return st.lists(one, min_size=1, max_size=9).map(tuple)


@st.composite
def model_layers(draw: st.DrawFn, largest_axis: int = 4096) -> tuple[tuple[Part, ...], ...]:
    """Return the layers of a model: a few kinds of layer in any order."""
    kinds = draw(st.lists(parts(largest_axis), min_size=1, max_size=3))
    pattern = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    return tuple(pattern) * draw(st.integers(1, 12))
