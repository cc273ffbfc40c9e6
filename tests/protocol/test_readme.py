"""protocol/README.md says what the code does: its tables and numbers are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from expertd_protocol import codec
from expertd_protocol.endpoints import SOCKET_PATH_MAX_BYTES
from expertd_protocol.errors import ErrorCode, ExpertdError, from_wire
from expertd_protocol.layout import (
    MAX_SLABS,
    MAX_SLOTS_PER_SLAB,
    PLANE_ALIGN_BYTES,
    Counter,
    Header,
    PageLayout,
    pack_word,
)
from expertd_protocol.messages import PROTOCOL_VERSION, Attached, Hello, Welcome
from expertd_protocol.stats import METRICS, Stats
from tests.strategies import MESSAGE_CLASSES

README = (Path(__file__).parents[2] / "protocol" / "README.md").read_text(encoding="utf-8")


def _section(title: str) -> str:
    """Return the text under one `##` heading."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert match, title
    return match[1]


def _table(text: str, first_column: str) -> list[list[str]]:
    """Return the rows of the table whose first column has that heading, without backticks."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_the_stat_table_is_the_one_of_the_code() -> None:
    assert [tuple(row) for row in _table(_section("Stats"), "name")] == list(METRICS)


def test_every_stat_of_the_table_is_in_the_snapshot() -> None:
    schema = Stats.model_json_schema()
    names = set(schema["properties"])
    for part in schema["$defs"].values():
        names |= set(part["properties"])

    assert {name for name, _, _ in METRICS} <= names
    assert {kind for _, kind, _ in METRICS} == {"counter", "gauge"}


def test_the_error_table_has_every_code_with_its_class_and_exit_code() -> None:
    rows = _table(_section("Error codes"), "code")

    assert [row[0] for row in rows] == [str(code) for code in ErrorCode]
    for code, name, exit_code, meaning in rows:
        error = from_wire(code, "x")
        assert type(error).__name__ == name
        assert int(error.exit_code) == int(exit_code), code
        assert meaning
    assert type(from_wire("not_in_the_table", "x")) is ExpertdError


def test_every_message_kind_is_described() -> None:
    for cls in MESSAGE_CLASSES:
        assert f"`{cls.model_fields['kind'].default}`" in README, cls


def test_the_version_and_the_messages_that_carry_it() -> None:
    assert f"This is protocol version {PROTOCOL_VERSION}," in README
    with_version = [c for c in MESSAGE_CLASSES if "version" in c.model_fields]
    assert with_version == [Hello, Welcome]
    assert "fds" not in Attached.model_fields  # they come beside the message


def test_the_limits() -> None:
    for number in (
        codec.ATTACH_MAX_BYTES, codec.ROUTER_MAX_BYTES, codec.MAX_EXPERTS_PER_REQUEST,
        PLANE_ALIGN_BYTES, MAX_SLABS - 1, MAX_SLOTS_PER_SLAB,
    ):  # fmt: skip
        assert f"{number:,}" in README, number
    assert f"at most {SOCKET_PATH_MAX_BYTES} bytes" in README


def test_the_bits_of_a_directory_word() -> None:
    rows = _table(_section("Shared memory"), "bits")
    fields = [tuple(map(int, bits.split("-"))) for bits, _ in rows]

    for (high, low), word in zip(
        fields,
        (pack_word((1 << 32) - 1, 0, 0) - 1, pack_word(0, MAX_SLABS - 1, 0) - 1,
         pack_word(0, 0, MAX_SLOTS_PER_SLAB - 1)),
        strict=True,
    ):  # fmt: skip
        assert word == ((1 << (high - low + 1)) - 1) << low


@pytest.mark.parametrize(("quota", "layers", "experts"), [(1, 1, 1), (8, 3, 5), (64, 48, 128)])
def test_the_offsets_of_a_worker_page(quota: int, layers: int, experts: int) -> None:
    layout = PageLayout(quota, layers, experts)
    buffer = bytearray(layout.nbytes)
    base = np.frombuffer(buffer, np.uint8).ctypes.data
    expected = {
        "0": 0,
        "64": 64,
        "64 + 8 H": 64 + 8 * quota,
        "224 + 8 H": 224 + 8 * quota,
    }
    regions = ("header", "hazards", "counters", "uses")

    rows = _table(_section("Shared memory"), "region")

    assert [row[0] for row in rows] == list(regions)
    for name, (_, _, offset) in zip(regions, rows, strict=True):
        assert getattr(layout, name)(buffer).ctypes.data - base == expected[offset], name


def test_the_words_of_the_header_and_the_columns_of_the_counters() -> None:
    rows = _table(_section("Shared memory"), "header word")
    columns = re.findall(r"(\d+) `([A-Z_]+)`", README.split("Counter columns:")[1].split("\n\n")[0])

    assert [row[0] for row in rows] == [f"{word.value} {word.name}" for word in Header]
    assert columns == [(str(c.value), c.name) for c in Counter]
    assert f"u64[2][{len(Counter)}]" in README
