"""The header parser: sound files are read exactly, broken ones get one sentence each."""

from __future__ import annotations

import errno
import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from expertd.store import header as header_module
from expertd.store.header import HEADER_MAX_BYTES, Identity, read_header
from expertd_protocol.errors import (
    BadHeader,
    DuplicateTensor,
    ExpertdError,
    GitLfsPointer,
    ModelChanged,
    ModelNotFound,
    NotAModel,
    ReadFailed,
    TruncatedFile,
    UnreadableFile,
)
from tests.safetensors_files import LFS_POINTER, Raw, pattern, write_file, write_header


def entry(dtype: object = "F32", shape: object = (1,), span: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def refused(error: type[ExpertdError], path: Path, *words: str) -> str:
    """Read the header, expect `error`, and check that its one sentence names the file."""
    with pytest.raises(error) as caught:
        read_header(path)
    message = caught.value.message
    assert type(caught.value) is error
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_a_sound_file_gives_every_tensor_its_place(tmp_path: Path) -> None:
    tensors = {
        "a": Raw("U8", (3,), b"abc"),
        "b": Raw("BF16", (2, 2), b"12345678"),
        "empty": Raw("F32", (0, 7), b""),
    }
    path = write_file(tmp_path / "model.safetensors", tensors, metadata={"format": "mlx"})

    header = read_header(path)

    content = path.read_bytes()
    for name, raw in tensors.items():
        info = header.tensors[name]
        assert (info.dtype, info.shape) == (raw.dtype, raw.shape)
        assert content[info.offset : info.offset + info.nbytes] == raw.data
    assert header.nbytes == len(content)
    assert header.identity == Identity.of(path)


def test_data_at_odd_addresses_is_accepted_A14(tmp_path: Path) -> None:
    tensors = {"odd": Raw("U8", (5,), b"12345"), "words": Raw("U32", (3,), pattern(12))}
    for pad in range(8):
        path = write_file(tmp_path / f"model-{pad}.safetensors", tensors, pad_header=pad)
        info = read_header(path).tensors["words"]
        assert path.read_bytes()[info.offset : info.offset + info.nbytes] == pattern(12)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("BF16", (4, 2), 16),
        ("F8_E4M3", (4,), 4),
        ("F8_E8M0", (3,), 3),
        ("F8_E5M2FNUZ", (3,), 3),
        ("F4", (2, 3), 3),
        ("F6_E2M3", (4,), 3),
        ("C64", (2,), 16),
        ("BOOL", (3,), 3),
        ("F64", (), 8),
    ],
)
def test_dtypes_that_numpy_lacks_are_bytes_with_a_name_A15(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": Raw(dtype, shape, bytes(nbytes))})

    info = read_header(path).tensors["t"]

    assert (info.dtype, info.shape, info.nbytes) == (dtype, shape, nbytes)


def test_a_git_lfs_pointer_is_named_as_such_A01(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(LFS_POINTER)

    refused(GitLfsPointer, path, "git-lfs pointer, not weights", "git lfs pull")


def test_a_length_field_is_never_believed_before_it_is_checked_A01_A02(tmp_path: Path) -> None:
    for length in (1 << 63, (1 << 64) - 1, HEADER_MAX_BYTES + 1, HEADER_MAX_BYTES):
        path = write_header(tmp_path / "model.safetensors", b"{}", length=length)
        error = BadHeader if length > HEADER_MAX_BYTES else TruncatedFile
        tracemalloc.start()
        try:
            refused(error, path, str(length if error is BadHeader else length + 8))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_a_header_above_100_MB_is_refused_without_being_read_A02(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    length = 101_000_000
    with path.open("wb") as file:  # sparse, so that the test is fast
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(8 + length)
    asked: list[int] = []

    def pread(fd: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return os.pread(fd, count, offset)

    with pytest.raises(BadHeader, match="at most 100000000 are allowed"):
        read_header(path, pread=pread)
    assert sum(asked) <= 64


def test_an_empty_file_is_named_A31(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()

    refused(TruncatedFile, path, "empty (0 bytes)")


def test_a_file_of_seven_bytes_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1234567")

    refused(TruncatedFile, path, "7 bytes")


def test_a_truncated_file_says_expected_and_actual_bytes_A03(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "model-00002-of-00002.safetensors", {"t": Raw("U8", (1000,), pattern(1000))}
    )
    whole = path.stat().st_size
    os.truncate(path, whole - 400)

    refused(TruncatedFile, path, f"need {whole} bytes", f"has {whole - 400}", "400 are missing")


def test_a_file_cut_inside_its_header_is_truncated_A03(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "model.safetensors", {"t": Raw("U8", (9,), bytes(9))}, keep_bytes=20
    )

    refused(TruncatedFile, path, "the file has 20")


def test_a_key_that_stands_twice_is_a_duplicate_tensor_A10(tmp_path: Path) -> None:
    one = json.dumps(entry())
    path = write_header(tmp_path / "model.safetensors", f'{{"a.w":{one},"a.w":{one}}}', bytes(4))

    refused(DuplicateTensor, path, "duplicate tensor", "'a.w'")


@pytest.mark.parametrize(
    "shape",
    [[1000], [1 << 40, 1 << 40], [1 << 62, 4], [(1 << 63) - 1] * 50_000, [7]],
    ids=["too large", "overflow", "wraps to 0", "long product", "too small"],
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused_A12(
    tmp_path: Path, shape: list[int]
) -> None:
    path = write_header(
        tmp_path / "model.safetensors", {"t": entry("F32", shape, (0, 32))}, bytes(32)
    )

    message = refused(BadHeader, path, "'t'")
    assert len(message) < 500


@pytest.mark.parametrize(
    ("what", "tensors", "nbytes", "words"),
    [
        ("overlap", {"a": entry(), "b": entry(span=(2, 6))}, 6, ["overlaps", "2 bytes"]),
        ("same place", {"a": entry(), "b": entry()}, 4, ["overlaps", "4 bytes"]),
        ("hole", {"a": entry(), "b": entry(span=(6, 10))}, 10, ["hole of 2 bytes"]),
        ("hole at the start", {"a": entry(span=(1, 5))}, 5, ["hole of 1 bytes"]),
        ("bytes behind", {"a": entry()}, 9, ["5 bytes after"]),
        ("data without tensors", {}, 3, ["3 bytes after the header"]),
        ("unknown dtype", {"a": entry("I4", (8,))}, 4, ["unknown dtype 'I4'"]),
        ("dtype is a number", {"a": entry(32)}, 4, ["unknown dtype 32"]),
        ("dtype is a list", {"a": entry(["F32"])}, 4, ["unknown dtype"]),
        ("negative offset", {"a": entry(span=(-4, 0))}, 4, ["[-4, 0]"]),
        ("offsets swapped", {"a": entry(span=(4, 0))}, 4, ["end before they begin"]),
        ("one offset", {"a": entry(span=(4,))}, 4, ["not [begin, end]"]),
        ("float offset", {"a": entry(span=(0, 4.0))}, 4, ["not [begin, end]"]),
        ("huge offset", {"a": entry(span=(0, 1 << 64))}, 4, ["not [begin, end]"]),
        ("negative size", {"a": entry(shape=(-1, -1))}, 4, ["not a list of sizes"]),
        ("huge size", {"a": entry(shape=(1 << 70, 0), span=(0, 0))}, 0, ["not a list of sizes"]),
        ("bool size", {"a": entry(shape=(True,))}, 4, ["not a list of sizes"]),
        ("float size", {"a": entry(shape=(1.0,))}, 4, ["not a list of sizes"]),
        ("shape is text", {"a": entry(shape="1")}, 4, ["not a list of sizes"]),
        ("half a byte", {"a": entry("F4", (3,), (0, 1))}, 1, ["needs 1.5 bytes"]),
        ("entry is a list", {"a": [1]}, 4, ["not a JSON object"]),
        ("entry is empty", {"a": {}}, 4, ["unknown dtype None"]),
        ("metadata number", {"__metadata__": {"a": 1}}, 0, ["__metadata__"]),
        ("metadata list", {"__metadata__": []}, 0, ["__metadata__"]),
    ],
)
def test_an_inconsistent_header_is_refused_with_its_reason(
    tmp_path: Path, what: str, tensors: dict[str, object], nbytes: int, words: list[str]
) -> None:
    path = write_header(tmp_path / "model.safetensors", tensors, bytes(nbytes))

    refused(BadHeader, path, *words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"hello", ["not JSON"]),
        (b"", ["not JSON"]),
        (b"[]", ["not a JSON object"]),
        (b'{"a":NaN}', ["NaN"]),
        (b"{}\0\0", ["not JSON"]),
        (b'{"a\xff":1}', ["not UTF-8 at byte 3"]),
        (b'{"a":' + b"[" * 200_000, ["nested too deeply"]),
        (b'{"a":' + b'{"a":' * 200_000, ["nested too deeply"]),
        (b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", ["malformed"]),
    ],
    ids=["text", "nothing", "list", "NaN", "NUL", "latin-1", "[[[[", "{{{{", "long number"],
)
def test_a_header_that_is_not_a_json_object_is_refused(
    tmp_path: Path, raw: bytes, words: list[str]
) -> None:
    path = write_header(tmp_path / "model.safetensors", raw)

    refused(BadHeader, path, *words)


def test_a_web_page_saved_as_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("<!DOCTYPE html><html>Sign in</html>")

    refused(BadHeader, path, "not a usable safetensors file")


def test_a_missing_file_a_directory_and_a_fifo_are_told_apart(tmp_path: Path) -> None:
    refused(ModelNotFound, tmp_path / "none.safetensors", "does not exist")
    (tmp_path / "folder.safetensors").mkdir()
    refused(NotAModel, tmp_path / "folder.safetensors", "a directory")
    os.mkfifo(tmp_path / "fifo.safetensors")  # opening it must not wait for a writer
    refused(NotAModel, tmp_path / "fifo.safetensors", "not a regular file")


def test_a_file_without_read_permission_says_so() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        os.chmod(folder, 0o755)
        path = write_file(Path(folder) / "model.safetensors", {"t": Raw("U8", (1,), b"1")})
        path.chmod(0)
        as_root = os.geteuid() == 0
        if as_root:  # root may read anything
            os.seteuid(65534)
        try:
            refused(UnreadableFile, path, "Permission denied", "permissions")
        finally:
            if as_root:
                os.seteuid(0)


def test_a_device_error_is_a_read_failure_with_offset_and_reason(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": Raw("U8", (1,), b"1")})

    def pread(fd: int, count: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(ReadFailed) as caught:
        read_header(path, pread=pread)
    assert str(path) in caught.value.message
    assert "offset 0: Input/output error" in caught.value.message


def test_short_reads_are_continued(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": Raw("U8", (3,), b"abc")})

    def pread(fd: int, count: int, offset: int) -> bytes:
        return os.pread(fd, min(count, 3), offset)

    assert read_header(path, pread=pread) == read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_not_believed(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": Raw("U8", (3,), b"abc")})

    def pread(fd: int, count: int, offset: int) -> bytes:
        os.truncate(path, 4)
        return os.pread(fd, count, offset)

    with pytest.raises(TruncatedFile, match="ended at byte 4"):
        read_header(path, pread=pread)


def test_a_file_that_is_rewritten_while_it_is_read_is_not_believed(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": Raw("U8", (3,), b"abc")})

    def pread(fd: int, count: int, offset: int) -> bytes:
        got = os.pread(fd, count, offset)
        os.utime(path, ns=(0, 0))
        return got

    with pytest.raises(ModelChanged, match="changed while its header was read"):
        read_header(path, pread=pread)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_means_the_same_as_in_the_library(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever byte is changed: a typed error, or exactly what the safetensors library reads."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_file(path, {"a": Raw("U8", (3,), b"abc"), "b": Raw("F32", (1, 2), bytes(8))})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 12))
        content[at] = data.draw(st.sampled_from([*b'019{}[],:" ', 0, 255]))
    path.write_bytes(content)

    try:
        tensors = read_header(path).tensors
    except ExpertdError as exc:
        message = exc.message
    else:
        message = ""
    if message:
        assert str(path) in message
        return
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, info in tensors.items():
            assert tuple(file.get_slice(name).get_shape()) == info.shape


def test_every_dtype_with_whole_bytes_has_the_same_size_in_the_shared_memory_layout() -> None:
    from expertd_protocol.layout import DTYPE_BYTES

    known = {name: bits // 8 for name, bits in header_module.DTYPE_BITS.items()}
    assert all(known[name] == nbytes for name, nbytes in DTYPE_BYTES.items())


def test_no_file_stays_open(tmp_path: Path) -> None:
    good = write_file(tmp_path / "model.safetensors", {"t": Raw("U8", (3,), b"abc")})
    bad = write_header(tmp_path / "bad.safetensors", b"hello")

    def is_closed(read: Callable[[], object]) -> bool:
        before = os.open("/dev/null", os.O_RDONLY)
        os.close(before)
        read()
        after = os.open("/dev/null", os.O_RDONLY)
        os.close(after)
        return before == after

    assert is_closed(lambda: read_header(good))
    assert is_closed(lambda: refused(BadHeader, bad))
    assert is_closed(lambda: refused(NotAModel, tmp_path))
