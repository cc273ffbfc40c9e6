"""Bytes <-> messages: every message survives the trip, and nothing but `ProtocolError` comes of garbage."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd_protocol import codec
from expertd_protocol.errors import ProtocolError, VersionMismatch
from expertd_protocol.messages import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    Message,
    Miss,
    MissError,
    MissReply,
    Wish,
)
from tests.strategies import (
    MESSAGE_CLASSES,
    instances,
    messages,
    misses,
    mutated,
    replies,
    wire_values,
    wishes,
)


@pytest.mark.parametrize("cls", MESSAGE_CLASSES, ids=lambda c: c.__name__)
def test_every_message_survives_the_trip(cls: type[Message]) -> None:
    @given(instances(cls))
    def check(message: Message) -> None:
        data = codec.encode(message)
        assert codec.decode(data) == message
        assert type(codec.decode(memoryview(data))) is cls
        assert not codec.is_miss(data)
        assert not codec.is_wish(data)

    check()


@given(misses)
def test_a_miss_survives_the_trip_and_is_told_from_control_messages(miss: Miss) -> None:
    data = codec.encode_miss(miss)

    assert codec.is_miss(data)
    assert not codec.is_wish(data)
    assert codec.decode_miss(data) == miss


@given(wishes)
def test_a_wish_survives_the_trip_and_is_told_from_everything_else(wish: Wish) -> None:
    data = codec.encode_wish(wish)

    assert codec.is_wish(data)
    assert codec.decode_wish(data) == wish


@given(replies)
def test_a_reply_survives_the_trip(reply: MissReply | MissError) -> None:
    decoded = codec.decode_reply(codec.encode_reply(reply))

    assert decoded == reply
    assert type(decoded) is type(reply)


def test_the_largest_request_fits_one_router_message() -> None:
    experts = tuple(range(1 << 31, (1 << 31) + codec.MAX_EXPERTS_PER_REQUEST))
    miss = Miss((1 << 63) - 1, 1 << 31, 1, experts)

    data = codec.encode_miss(miss)

    assert len(data) <= codec.ROUTER_MAX_BYTES
    assert codec.decode_miss(data) == miss


def _short(error: ProtocolError) -> bool:
    return 0 < len(error.message) < 700


def _decode_all(data: bytes) -> None:
    """Each decoder returns what it promises or raises `ProtocolError`, nothing else."""
    refusals = []
    try:
        assert isinstance(codec.decode(data), MESSAGE_CLASSES)
    except ProtocolError as exc:
        refusals.append(exc)
    try:
        miss = codec.decode_miss(data)
        assert all(type(n) is int for n in (miss.seq, miss.layer, miss.phase, *miss.experts))
        assert 0 < len(miss.experts) <= codec.MAX_EXPERTS_PER_REQUEST
    except ProtocolError as exc:
        refusals.append(exc)
    try:
        reply = codec.decode_reply(data)
        words = (reply.joined, reply.missed, *reply.words) if isinstance(reply, MissReply) else ()
        assert all(type(n) is int for n in (reply.seq, *words))
    except ProtocolError as exc:
        refusals.append(exc)
    try:
        wish = codec.decode_wish(data)
        assert all(type(n) is int for n in (wish.layer, *wish.experts))
        assert 0 < len(wish.experts) <= codec.MAX_EXPERTS_PER_WISH
    except ProtocolError as exc:
        refusals.append(exc)
    assert len(refusals) >= 3  # no bytes are two kinds of message
    assert all(map(_short, refusals))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error_D34(data: bytes) -> None:
    _decode_all(data)


@given(
    mutated(
        st.one_of(
            messages.map(codec.encode),
            misses.map(codec.encode_miss),
            replies.map(codec.encode_reply),
        )
    )
)
def test_damaged_messages_are_a_protocol_error_or_another_sound_message_D34(data: bytes) -> None:
    _decode_all(data)


@given(wire_values)
def test_any_other_msgpack_value_is_a_protocol_error_D34(value: object) -> None:
    _decode_all(msgpack.packb(value))


@given(
    st.sampled_from([c.model_fields["kind"].default for c in MESSAGE_CLASSES]) | wire_values,
    st.dictionaries(st.text(max_size=8) | st.just("version"), wire_values, max_size=4),
)
def test_maps_with_a_known_kind_and_wrong_fields_are_a_protocol_error_D34(
    kind: object, fields: dict[str, object]
) -> None:
    _decode_all(msgpack.packb({"kind": kind, **fields}))


@given(st.integers(1, 5), st.lists(wire_values, max_size=5))
def test_arrays_with_a_known_tag_and_wrong_items_are_a_protocol_error_D34(
    tag: int, rest: list[object]
) -> None:
    _decode_all(msgpack.packb([tag, *rest]))


@pytest.mark.parametrize(
    "value",
    [
        [1, 0, 0, 1, [3]],  # seq 0 is "could not be parsed"
        [1, -1, 0, 1, [3]],
        [1, 1, 0, 2, [3]],
        [1, 1, 0, 1, []],
        [1, 1, 0, 1, list(range(codec.MAX_EXPERTS_PER_REQUEST + 1))],
        [1, 1, 0, 1, [3.0]],
        [1, 1, 0, 1, [True]],
        [1, True, 0, 1, [3]],
        [1, 1, 0, 1, [3], 0],
        [2, 1, 0, 1, [3]],
    ],
)
def test_a_miss_outside_its_form_is_refused_D34(value: list[object]) -> None:
    with pytest.raises(ProtocolError, match="a miss request is"):
        codec.decode_miss(msgpack.packb(value))


@pytest.mark.parametrize("value", [[2, 1, ["x"], 0, 0], [2, 1, [1], True, 0], [3, 1, 2, "x"], []])
def test_a_reply_outside_its_form_is_refused(value: list[object]) -> None:
    with pytest.raises(ProtocolError, match="neither a reply nor an error"):
        codec.decode_reply(msgpack.packb(value))


def test_a_deep_nest_is_a_protocol_error() -> None:
    _decode_all(b"\x91" * 100_000)


def test_a_length_far_beyond_the_message_is_refused_before_it_is_allocated() -> None:
    for head in (b"\xdb", b"\xc6", b"\xdd", b"\xdf"):
        with pytest.raises(ProtocolError):
            codec.decode(head + b"\xff\xff\xff\xff")


@pytest.mark.parametrize("kind", ["hello", "welcome"])
@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, None, "1.5", "v" * 60_000])
def test_another_version_is_named_whatever_else_is_in_the_message(
    kind: str, version: object
) -> None:
    data = msgpack.packb({"kind": kind, "version": version, "a_field_of_the_future": [1, 2]})

    with pytest.raises(VersionMismatch, match=f"version.*{PROTOCOL_VERSION}") as caught:
        codec.decode(data)

    assert len(caught.value.message) < 700
    assert "upgrade both" in caught.value.message


def test_a_version_that_is_missing_is_a_mismatch() -> None:
    with pytest.raises(VersionMismatch, match="None"):
        codec.decode(msgpack.packb({"kind": "hello", "role": "worker", "pid": 1}))


def test_an_unknown_field_is_refused_and_named() -> None:
    hello = Hello(role="worker", pid=1).model_dump() | {"rolle": "x"}

    with pytest.raises(ProtocolError, match=r"bad 'hello': hello\.rolle"):
        codec.decode(msgpack.packb(hello))


def test_a_kind_of_any_length_gives_a_short_sentence() -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode(msgpack.packb({"kind": "k" * 60_000}))

    assert len(caught.value.message) < 700


def test_a_sentence_that_names_a_file_which_is_not_utf_8_can_be_sent() -> None:
    error = ProtocolError("shard /models/\udcff.safetensors is missing")

    failure = codec.decode(codec.encode(Failure(code=error.code, message=error.message)))

    assert isinstance(failure, Failure)
    assert failure.message == "shard /models/\\udcff.safetensors is missing"


def test_the_sentence_about_a_list_of_20000_missing_files_can_be_sent() -> None:
    error = ProtocolError(", ".join(f"model-{n:05}-of-20000.safetensors" for n in range(20_000)))

    assert codec.decode(codec.encode(Failure(code=error.code, message=error.message)))
