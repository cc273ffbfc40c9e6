"""The index of a model folder: where every tensor, and every expert, lies.

`build_index` reads the header of each `model*.safetensors` and nothing else of them. `ExpertIndex`
checks what a worker says it streams against these headers, and answers with byte ranges. The parts of
packed records (`expertctl pack`) stand here under the names of the tensors they were cut from.

Exactness decides one case: the same tensor in two files is always refused, also when the
index.json names only one of them. mlx-lm globs `model*.safetensors`, ignores the index and keeps
the copy it happens to read last. The worker loads every non-expert weight through mlx-lm, so an
index that selected the experts' files here would mix two models.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from expertd.store.header import Header, Identity, read_header, short
from expertd.store.shards import (
    check_complete,
    is_shard,
    list_names,
    no_shards,
    read_weight_map,
)
from expertd_protocol.errors import BadHeader, DuplicateTensor, ModelNotFound, UnsupportedLayout
from expertd_protocol.layout import DTYPE_BYTES, Part
from expertd_protocol.messages import LayerSource, PartSource
from expertd_protocol.packed import LAYER_KEY, PackedLayer, parse_layer


@dataclass(frozen=True)
class Shard:
    """One safetensors file. Links were followed once, so `path` is the file itself.

    `name` is its name in the model folder: in the Hugging Face cache, `path` ends in a hash.
    """

    path: Path
    identity: Identity
    nbytes: int
    name: str


class Tensor(NamedTuple):
    """One tensor; `shard` indexes `ModelIndex.shards`, `offset` counts from the file's start.

    `stride` is the way from one row to the next where rows lie in packed records, else 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    stride: int = 0


class Records(NamedTuple):
    """The packed experts of one layer; `offset` is that of the first record in the file."""

    layer: PackedLayer
    shard: int
    offset: int


@dataclass(frozen=True)
class ModelIndex:
    """A complete and sound model folder. `nbytes` are the bytes of all tensors."""

    folder: Path
    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    warnings: tuple[str, ...]
    nbytes: int
    records: tuple[Records, ...] = ()


class ByteRange(NamedTuple):
    """Bytes of one shard; `offset` counts from the file's start."""

    shard: int
    offset: int
    nbytes: int


def build_index(folder: Path) -> ModelIndex:
    """Read and check the headers of a model folder.

    Raises:
        ModelNotFound, NotAModel, UnreadableFile: it is no folder of a model that may be read.
        MissingShard: files are missing, by the index or by their own numbers.
        DuplicateTensor: two files hold the same tensor.
        ModelError: any error of `read_header`, for the file that has it.
    """
    try:
        # One name for one folder, whatever links lead there: its sessions share one cache.
        folder = Path(os.path.realpath(folder))
    except ValueError as exc:  # a NUL byte
        raise ModelNotFound(f"{short(str(folder))} is not a path: {exc}") from exc
    names = list_names(folder)
    weight_map, warnings = read_weight_map(folder, names)
    listed = [name for name in names if is_shard(name)]
    dangling = [name for name in listed if not os.path.exists(folder / name)]
    present = [name for name in listed if name not in dangling]
    if not listed:
        raise no_shards(folder, names, weight_map)
    headers = {name: read_header(folder / name) for name in present}
    _check_unique(folder, headers, weight_map)
    warnings += check_complete(folder, headers, weight_map, dangling)
    shards, tensors, packed = [], {}, []
    for number, (name, header) in enumerate(headers.items()):
        path = Path(os.path.realpath(folder / name))
        shards.append(Shard(path, header.identity, header.nbytes, name))
        for key, info in header.tensors.items():
            tensors[key] = Tensor(key, info.dtype, info.shape, number, info.offset, info.nbytes)
        if LAYER_KEY in header.metadata:
            packed.append(_records(folder / name, header, number))
    for records in packed:
        del tensors[records.layer.records]
        for part in _parts_of(records):
            if part.name in tensors:
                raise DuplicateTensor(
                    f"{shards[records.shard].name} and {shards[tensors[part.name].shard].name} in "
                    f"{folder} both hold {short(part.name)}, packed and as it was; "
                    "move one of them out of the folder"
                )
            tensors[part.name] = part
    return ModelIndex(
        folder,
        tuple(shards),
        tensors,
        tuple(warnings),
        sum(t.nbytes for t in tensors.values()),
        tuple(packed),
    )


def _records(path: Path, header: Header, shard: int) -> Records:
    """Check the description of packed records against the header it stands in."""
    try:
        layer = parse_layer(header.metadata[LAYER_KEY])
    except ValueError as exc:
        raise BadHeader(
            f"the {LAYER_KEY} in the __metadata__ of {path} is malformed: {exc}"
        ) from exc
    tensor = header.tensors.get(layer.records)
    wanted = (layer.experts, layer.record_bytes)
    if tensor is None or (tensor.dtype, tensor.shape) != ("U8", wanted):
        there = f"is {_show(tensor.dtype, tensor.shape)}" if tensor else "is not there"
        raise BadHeader(
            f"the records of {path}, {short(layer.records)}, should be {_show('U8', wanted)} by its "
            f"{LAYER_KEY}, but that tensor {there}; pack the model again"
        )
    return Records(layer, shard, tensor.offset)


def _parts_of(records: Records) -> list[Tensor]:
    """Return the stacked tensors that a layer's records stand for."""
    layer, experts = records.layer, records.layer.experts
    return [
        Tensor(
            part.tensor,
            part.dtype,
            (experts, *part.shape),
            records.shard,
            records.offset + part.offset,
            experts * part.nbytes,
            layer.record_bytes,
        )
        for part in layer.parts
    ]


def _check_unique(
    folder: Path, headers: dict[str, Header], weight_map: dict[str, str] | None
) -> None:
    first_file: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            other = first_file.setdefault(tensor, name)
            if other != name:
                twice.setdefault((other, name), []).append(tensor)
    if not twice:
        return
    (one, two), tensors = next(iter(twice.items()))
    named = set((weight_map or {}).values())
    strays = [name for name in (one, two) if name not in named]
    stray = f"the one its index does not name, {strays[0]}," if len(strays) == 1 else "one of them"
    raise DuplicateTensor(
        f"{one} and {two} in {folder} both hold {len(tensors)} tensors (for example "
        f"{short(tensors[0])}); mlx-lm would mix them, so move {stray} out of the folder"
    )


class ExpertIndex:
    """Where each expert's bytes are. Expert e of a part is one contiguous range (layout A, or packed).

    Built from what the worker found by walking the model, checked against the headers; names and
    shapes decide, never the order of parts.
    """

    def __init__(self, index: ModelIndex, layers: Sequence[LayerSource], experts: int) -> None:
        """Check every part of every layer.

        Raises:
            UnsupportedLayout: a tensor is not there or not stored as the worker needs it.
        """
        self.index = index
        self.experts = experts
        self._parts: list[tuple[Part, ...]] = []
        self._bases: list[tuple[tuple[int, int, int, int], ...]] = []
        known: dict[tuple[Part, ...], tuple[Part, ...]] = {}
        for layer in layers:
            names = [part.name for part in layer.parts]
            if len(set(names)) != len(names):
                raise UnsupportedLayout(f"layer {layer.path} lists a part twice: {names}")
            checked = [_check_part(index, layer, source, experts) for source in layer.parts]
            parts = tuple(part for part, _ in checked)
            self._parts.append(known.setdefault(parts, parts))  # equal layers share one tuple
            self._bases.append(tuple(base for _, base in checked))
        self._expert_bytes = [sum(part.nbytes for part in parts) for parts in self._parts]

    def __len__(self) -> int:
        """Count the layers."""
        return len(self._parts)

    def parts(self, layer: int) -> tuple[Part, ...]:
        """Return the parts of one expert, shapes without E, in the worker's order."""
        return self._parts[layer]

    def ranges(self, layer: int, expert: int) -> tuple[ByteRange, ...]:
        """Return the bytes of one expert, one range per part, in the order of `parts`."""
        if not 0 <= expert < self.experts:
            raise IndexError(f"expert {expert} of {self.experts}")
        return tuple(
            [
                ByteRange(shard, offset + expert * stride, nbytes)
                for shard, offset, nbytes, stride in self._bases[layer]
            ]
        )

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of one expert of a layer."""
        return self._expert_bytes[layer]

    @property
    def read_bytes(self) -> int:
        """Bytes of the largest read of one expert: all of it where it is packed, else one part."""
        if self.index.records:
            return max(records.layer.record_bytes for records in self.index.records)
        return max(part.nbytes for parts in self._parts for part in parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.experts * sum(self._expert_bytes)


def _check_part(
    index: ModelIndex, layer: LayerSource, source: PartSource, experts: int
) -> tuple[Part, tuple[int, int, int, int]]:
    """Return the part, and (shard, offset of expert 0, bytes, way to the next expert)."""
    tensor = index.tensors.get(source.tensor)
    if tensor is None:
        raise _no_tensor(index, layer, source)
    if source.dtype not in DTYPE_BYTES:
        raise UnsupportedLayout(
            f"{short(source.tensor)} of {index.folder} has dtype {short(source.dtype)}, "
            f"which is not read; known are {', '.join(DTYPE_BYTES)}"
        )
    wanted = (experts, *source.shape)
    nbytes = math.prod(source.shape) * DTYPE_BYTES[source.dtype]
    if tensor.shape != wanted or tensor.nbytes != experts * nbytes:
        raise UnsupportedLayout(
            f"{short(source.tensor)} of {index.folder} is {_show(tensor.dtype, tensor.shape)} "
            f"({tensor.nbytes} bytes) in {index.shards[tensor.shard].name}, the model needs "
            f"{_show(source.dtype, wanted)} ({experts * nbytes} bytes); {_convert(index.folder)}"
        )
    part = Part(source.name, source.dtype, source.shape)
    return part, (tensor.shard, tensor.offset, nbytes, tensor.stride or nbytes)


#: What a folder is when the stacked tensors are not in it; the first sign that is found counts.
_SIGNS = (
    (re.compile(r"\.weight_scale_inv$"), "is an FP8 block checkpoint"),
    (re.compile(r"\.(qweight|qzeros)$"), "is an AWQ or GPTQ checkpoint"),
    (re.compile(r"\.weight_packed$"), "is a compressed-tensors checkpoint"),
    (re.compile(r"\.experts\.\d+\."), "stores one tensor per expert"),
    (re.compile(r"\.gate_up_proj($|\.)"), "stores gate and up projection fused in one tensor"),
)


def _no_tensor(index: ModelIndex, layer: LayerSource, source: PartSource) -> UnsupportedLayout:
    start = f"{index.folder} has no tensor {short(source.tensor)}"
    for pattern, meaning in _SIGNS:
        for name in index.tensors:
            if pattern.search(name):
                return UnsupportedLayout(
                    f"{start}: it {meaning} (for example {short(name)}), "
                    f"which is not read in place; {_convert(index.folder)}"
                )
    return UnsupportedLayout(
        f"{start}, which layer {layer.path} streams; {_convert(index.folder)} "
        "or download the model again"
    )


def _convert(folder: Path) -> str:
    return (
        f"convert it with `mlx_lm.convert --hf-path {shlex.quote(str(folder))} --mlx-path OUT -q`"
    )


def _show(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
