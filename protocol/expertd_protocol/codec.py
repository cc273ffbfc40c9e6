"""Bytes <-> messages. The only user of msgpack; every size is limited before it is allocated."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from expertd_protocol.errors import ProtocolError, VersionMismatch
from expertd_protocol.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Message,
    Miss,
    MissError,
    MissReply,
    Wish,
)

#: One ZeroMQ message (also set as MAXMSGSIZE).
ROUTER_MAX_BYTES = 1 << 20
#: One message on the attach socket: the tensor names of a 94-layer model take about 100 kB.
ATTACH_MAX_BYTES = 16 << 20
#: Most experts one request may name.
MAX_EXPERTS_PER_REQUEST = 4096
#: Most experts one wish may name: those of a few tokens.
MAX_EXPERTS_PER_WISH = 64

_MISS, _REPLY, _ERROR, _WISH = 1, 2, 3, 4
_adapter: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def encode(message: Message) -> bytes:
    """Return the msgpack map of a control message."""
    return _pack(message.model_dump(mode="python"))


def decode(data: bytes | memoryview) -> AnyMessage:
    """Return the control message in `data`.

    Raises:
        VersionMismatch: a `Hello` or `Welcome` of another protocol version, whatever else is in it.
        ProtocolError: anything that is not exactly one known message.
    """
    value = _unpack(data)
    if not isinstance(value, dict):
        raise ProtocolError(f"a message is a map, got {type(value).__name__}")
    if value.get("kind") in ("hello", "welcome") and value.get("version") != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the other side speaks protocol version {value.get('version')!r:.40}, this one "
            f"{PROTOCOL_VERSION}; upgrade both to the same expertd release and restart the daemon"
        )
    try:
        return _adapter.validate_python(value)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "message"
        # both come from the sender, and pydantic repeats what it was given
        raise ProtocolError(
            f"bad {value.get('kind', 'message')!r:.40}: {where:.200}: {first['msg']:.300}"
        ) from exc


def encode_miss(miss: Miss) -> bytes:
    return _pack((_MISS, miss.seq, miss.layer, miss.phase, miss.experts))


def encode_wish(wish: Wish) -> bytes:
    return _pack((_WISH, *wish))


def encode_reply(reply: MissReply | MissError) -> bytes:
    return _pack((_REPLY if isinstance(reply, MissReply) else _ERROR, *reply))


def is_miss(data: bytes | memoryview) -> bool:
    """Tell the miss path (a msgpack array) from control messages (a map) by the first byte."""
    return len(data) > 0 and (data[0] & 0xF0 == 0x90 or data[0] in (0xDC, 0xDD))


def is_wish(data: bytes | memoryview) -> bool:
    """Tell a wish from everything else by the first number of its array: it gets no answer."""
    return len(data) > 1 and data[0] & 0xF0 == 0x90 and data[1] == _WISH


def decode_miss(data: bytes | memoryview) -> Miss:
    """Return the request in `data`; ranges of layer and expert are the daemon's to check."""
    value = _unpack(data)
    match value:
        case [int(tag), int(seq), int(layer), int(phase), [*experts]] if (
            tag == _MISS
            and seq > 0
            and phase in (0, 1)
            and 0 < len(experts) <= MAX_EXPERTS_PER_REQUEST
            and all(type(e) is int for e in experts)
            and bool not in (type(seq), type(layer), type(phase))
        ):
            return Miss(seq, layer, phase, tuple(experts))
    raise ProtocolError("a miss request is [1, seq > 0, layer, phase 0 or 1, [expert, ...]]")


def decode_wish(data: bytes | memoryview) -> Wish:
    """Return the wish in `data`; ranges of layer and expert are the daemon's to check."""
    value = _unpack(data)
    match value:
        case [int(tag), int(layer), [*experts]] if (
            tag == _WISH
            and type(layer) is int
            and 0 < len(experts) <= MAX_EXPERTS_PER_WISH
            and all(type(e) is int for e in experts)
        ):
            return Wish(layer, tuple(experts))
    raise ProtocolError(
        f"a wish is [4, layer, [expert, ...]] of 1 to {MAX_EXPERTS_PER_WISH} experts"
    )


def decode_reply(data: bytes | memoryview) -> MissReply | MissError:
    value = _unpack(data)
    match value:
        case [int(tag), int(seq), [*words], int(joined), int(missed)] if (
            tag == _REPLY
            and all(type(w) is int for w in words)
            and bool not in (type(seq), type(joined), type(missed))
        ):
            return MissReply(seq, tuple(words), joined, missed)
        case [int(tag), int(seq), str(code), str(message)] if (
            tag == _ERROR and type(seq) is not bool
        ):
            return MissError(seq, code, message)
    raise ProtocolError("the daemon sent neither a reply nor an error to a miss request")


def _pack(value: object) -> bytes:
    # a file name that is not UTF-8 stays readable in a sentence about it
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def _unpack(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=1 << 16,
            max_array_len=1 << 16,
            max_map_len=1 << 12,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as exc:
        raise ProtocolError(f"{len(data)} bytes are not one msgpack value: {exc}") from exc
