"""Safetensors files for tests: sound ones, and ones that are broken in exactly one way.

Independent of the code under test, and of the safetensors library, which refuses to write most.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4cac19622fc3ada9c0fdeadb33f88f367b541f38b89102a3f1261ac81fd5bcb5\n"
    b"size 5368709120\n"
)


@dataclass(frozen=True)
class Raw:
    """A tensor as bytes: any dtype name, also those numpy does not have."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def entries_of(tensors: Mapping[str, Raw]) -> dict[str, object]:
    """Return the header entries of tensors that lie back to back in the given order."""
    entries: dict[str, object] = {}
    at = 0
    for name, raw in tensors.items():
        entries[name] = {
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "data_offsets": [at, at + len(raw.data)],
        }
        at += len(raw.data)
    return entries


def write_file(
    path: Path,
    tensors: Mapping[str, Raw],
    *,
    metadata: Mapping[str, str] | None = None,
    pad_header: int = 0,
    keep_bytes: int | None = None,
) -> Path:
    """Write a sound file: tensors back to back, `pad_header` spaces behind the JSON (mlx: none).

    `keep_bytes` cuts the file to that size afterwards.
    """
    entries = entries_of(tensors)
    if metadata is not None:
        entries = {"__metadata__": dict(metadata), **entries}
    header = json.dumps(entries, separators=(",", ":")).encode() + b" " * pad_header
    content = struct.pack("<Q", len(header)) + header + b"".join(t.data for t in tensors.values())
    path.write_bytes(content if keep_bytes is None else content[:keep_bytes])
    return path


def write_header(
    path: Path, header: bytes | str | object, data: bytes = b"", *, length: int | None = None
) -> Path:
    """Write any header (bytes, text, or a value for JSON), any data and any length field."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", length) + header + data)
    return path


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes in which every short window is different, so that a shifted read shows."""
    words = (nbytes + 3) // 4
    return b"".join(
        struct.pack("<I", (i * 2654435761 + seed * 40503) & 0xFFFFFFFF) for i in range(words)
    )[:nbytes]


def write_model(
    folder: Path,
    shards: Sequence[Mapping[str, Raw]],
    *,
    config: Mapping[str, object] | None = None,
    index: bool = True,
    pad_header: int = 0,
) -> Path:
    """Write a model folder as mlx-lm does: config.json, shards and, if wanted, the index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3_moe"}))
    names = shard_names(len(shards))
    weight_map = {}
    for name, tensors in zip(names, shards, strict=True):
        write_file(folder / name, tensors, metadata={"format": "mlx"}, pad_header=pad_header)
        weight_map.update(dict.fromkeys(tensors, name))
    if index:
        write_index(folder, weight_map)
    return folder


def shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, weight_map: Mapping[str, str]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}))
    return path


def expert_tensors(
    layer: int, *, experts: int = 8, hidden: int = 64, width: int = 32, seed: int = 0
) -> dict[str, Raw]:
    """Return the tensors of one 4-bit layer as mlx-lm stacks them: `[E, out, in]` each."""
    tensors = {}
    for number, (projection, out, into) in enumerate(
        (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width))
    ):
        base = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
        for kind, dtype, shape, bits in (
            ("weight", "U32", (experts, out, into // 8), 32),
            ("scales", "BF16", (experts, out, into // 32), 16),
            ("biases", "BF16", (experts, out, into // 32), 16),
        ):
            nbytes = experts * out * shape[2] * bits // 8
            tensors[f"{base}.{kind}"] = Raw(
                dtype, shape, pattern(nbytes, seed=seed + 100 * layer + 10 * number + len(kind))
            )
    return tensors
