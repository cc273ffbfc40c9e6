"""Models: any mlx-lm family with its experts streamed, everything else exactly as mlx-lm has it.

The family's Model is subclassed; nothing of it is copied. Weights load through mlx-lm's own code,
lazily: expert tensors are handed through `sanitize` and quantisation untouched, then taken out of
the module tree before anything reads them. Which layers are streamed is found by walking the model,
never by names: some families keep other tensors under `experts`, or a SwitchLinear in their
attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)
from mlx_lm.utils import _get_classes

from expertd_client.routing import declared_experts, top_k
from expertd_mlx.foresight import Foresight, router_of
from expertd_mlx.packed import refuse_leftovers, unpacked
from expertd_mlx.planes import DTYPE_NAMES
from expertd_mlx.stream import Stream
from expertd_mlx.switch import Projection, StreamedLayer, streamed_class
from expertd_protocol.errors import DenseModel, UnsupportedLayout, UnsupportedModel
from expertd_protocol.layout import Phase
from expertd_protocol.messages import LayerSource, PartSource

Classes = tuple[type[nn.Module], type[Any]]


def streamed_classes(config: dict[str, Any], path: Path | None = None) -> Classes:
    """Return (Model, ModelArgs) of the config's family with its experts streamed.

    For `mlx_lm.utils.load_model(get_model_classes=...)`.

    Args:
        path: the model's folder as the daemon knows it, for attaching at the first pass.
    """
    where = f" of {path}" if path else ""
    if not isinstance(model_type := config.get("model_type"), str):
        raise UnsupportedModel(f"config.json{where} does not say a model_type")
    try:
        family, args = _get_classes(config)
    except ValueError as exc:
        raise UnsupportedModel(
            f"mlx-lm does not know the model type {model_type!r}{where}; a newer mlx-lm may"
        ) from exc
    model = _streamed_model(family)
    return type(
        family.__name__, (model,), {**_looks(family), "_config": config, "_path": path}
    ), args


def stream_of(model: nn.Module) -> Stream:
    """Return the stream behind a model that was loaded with `streamed_classes`."""
    stream = getattr(model, "_stream", None)
    if not isinstance(stream, Stream):
        raise UnsupportedModel(f"{type(model).__name__} was not loaded by expertd_mlx")
    return stream


def _looks(family: type[nn.Module]) -> dict[str, Any]:
    """Names of the family: mlx-lm looks a class's module up for its defaults."""
    return {"__module__": family.__module__, "__qualname__": family.__qualname__}


@cache
def _streamed_model(family: type[nn.Module]) -> type[nn.Module]:
    class StreamedModel(family):  # type: ignore[misc, valid-type]
        _config: Mapping[str, Any]
        _path: Path | None
        _stream: Stream | None = None
        _files: _FileTensors | None = None

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights, stand_ins = unpacked(weights, self._path)
            self._files = _FileTensors(weights, stand_ins)
            parent = getattr(super(), "sanitize", None)
            return parent(weights) if parent is not None else weights

        def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
            if self._stream is not None:  # adapters, or single tensors, for a model in use
                _refuse_expert_weights(self, file_or_weights)
                super().load_weights(file_or_weights, strict)
                return self
            files, self._files = self._files or _FileTensors({}), None
            files.refuse_unknown_formats(self._path)
            try:
                super().load_weights(file_or_weights, strict)
            except ValueError as exc:
                raise _does_not_fit(exc, self._path) from exc
            if file_or_weights:  # sharded_load builds a first model without any
                self._stream = stream_experts(self, files, self._config, self._path)
                self._stream.path = self._path
                refuse_leftovers(files.stand_ins, self._stream.layers, self._path)
            return self

        @wraps(family.__call__)  # mlx-lm reads the signature
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            inputs, cache = _inputs_and_cache(args, kwargs)
            batch, tokens, phase = _count_tokens(inputs)
            call = super().__call__
            return stream_of(self).run_pass(
                lambda: call(*args, **kwargs), cache, tokens, phase, batch
            )

    def shard(self: nn.Module, group: Any = None) -> None:
        group = group or mx.distributed.init()
        if group.size() > 1:
            raise UnsupportedLayout(
                f"streamed experts cannot be split over {group.size()} ranks; run one process"
            )

    if hasattr(family, "shard"):
        StreamedModel.shard = shard
    for name, value in _looks(family).items():
        setattr(StreamedModel, name, value)
    return StreamedModel


def _inputs_and_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Families call them (inputs, cache) in this order, and mlx-lm passes the cache by name."""
    inputs = kwargs.get("input_embeddings")
    if inputs is None:
        inputs = args[0] if args else next(iter(kwargs.values()), None)
    return inputs, kwargs.get("cache", args[1] if len(args) > 1 else None)


def _count_tokens(inputs: Any) -> tuple[int, int, Phase]:
    """Return (sequences, tokens, phase).

    One token per sequence is a decode step; more is a prefill (or checks a draft).
    """
    batch, length = inputs.shape[:2]
    return batch, batch * length, Phase.DECODE if length == 1 else Phase.PREFILL


# --- expert layers -------------------------------------------------------------------------------
class _FileTensors:
    """The arrays that mlx-lm read from the files, by identity: renaming keeps it, computing does not."""

    def __init__(
        self, weights: Mapping[str, mx.array], stand_ins: frozenset[str] = frozenset()
    ) -> None:
        self.stand_ins = stand_ins
        self._arrays = dict(weights)  # keeps them alive, so that no id is used twice
        self._names = {id(array): name for name, array in weights.items()}

    def name_of(self, array: mx.array) -> str | None:
        return self._names.get(id(array))

    def refuse_unknown_formats(self, path: Path | None) -> None:
        """mlx-lm would list every tensor it does not know, tens of thousands of them."""
        for name in self._arrays:
            if name.endswith("weight_scale_inv"):
                raise UnsupportedLayout(
                    f"{name} belongs to an FP8 block checkpoint, which cannot be read in place; "
                    f"{_how_to_convert(path)}"
                )


def _does_not_fit(exc: ValueError, path: Path | None) -> UnsupportedLayout:
    """mlx-lm names every tensor that does not fit, one a line; a few are enough to see why."""
    first, *names = str(exc).splitlines()
    some = " ".join(name.strip() for name in names[:3]) + (" ..." if len(names) > 3 else "")
    return UnsupportedLayout(
        f"the tensors of {path or 'the model'} are not those of its model type, or not in the layout "
        f"of mlx-lm: {first.strip()} {some}".rstrip()
        + f"; {_how_to_convert(path)}"
    )


def _how_to_convert(path: Path | None) -> str:
    return f"convert it once: mlx_lm.convert --hf-path {path or 'FOLDER'} --mlx-path OUT -q"


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Module]]]:
    """Yield (path, module, projections) of each streamable layer, in the order of their numbers."""

    def order(item: tuple[str, nn.Module]) -> list[tuple[int, str]]:
        return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", item[0])]

    found = [(p, m) for p, m in model.named_modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
    for path, module in sorted(found, key=order):
        linears: dict[str, nn.Module] = {
            name: child
            for name, child in module.children().items()
            if isinstance(child, (SwitchLinear, QuantizedSwitchLinear))
        }
        if linears:
            yield path, module, linears


def stream_experts(
    model: nn.Module, files: _FileTensors, config: Mapping[str, Any], path: Path | None
) -> Stream:
    """Turn each expert layer of `model` into its streamed subclass, in place.

    Raises:
        DenseModel: there is no expert layer, and the config does not promise one.
        UnsupportedModel: the config promises experts, but they are not in layers we know.
        UnsupportedLayout: an expert tensor is not stored as it is computed with.
    """
    found = list(_expert_layers(model))
    where = str(path) if path else "the model"
    if not found and (promised := declared_experts(config)):
        raise UnsupportedModel(
            f"{where} declares {promised} experts, but mlx-lm's {config.get('model_type')} keeps them "
            "in layers that expertd does not know; plain mlx_lm.generate runs it"
        )
    if not found:
        raise DenseModel(
            f"{where} is a dense {config.get('model_type')} model: it has no routed experts to "
            "stream; plain mlx_lm.generate runs it"
        )
    counts = {linear["weight"].shape[0] for _, _, ls in found for linear in ls.values()}
    if len(counts) > 1:
        raise UnsupportedLayout(
            f"the layers of {where} have {' and '.join(map(str, sorted(counts)))} experts; "
            "expertd needs the same number in all of them"
        )
    (experts,) = counts
    layers = tuple(
        LayerSource(path=layer_path, parts=_parts(layer_path, linears, experts, files, path))
        for layer_path, _, linears in found
    )
    defaults = vars(model.args) if hasattr(model, "args") else {}
    stream = Stream(layers, experts, top_k(config, defaults) or 1)
    for index, (_, module, linears) in enumerate(found):
        _turn(stream, index, module, linears)
    modules = dict(model.named_modules())
    stream.foresight = Foresight([router_of(modules, layer_path) for layer_path, _, _ in found])
    resident: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    stream.resident_bytes = sum(array.nbytes for array in resident.values())
    return stream


def _parts(
    layer: str,
    linears: Mapping[str, nn.Module],
    experts: int,
    files: _FileTensors,
    path: Path | None,
) -> tuple[PartSource, ...]:
    parts = []
    for projection, linear in linears.items():
        for tensor, array in _expert_arrays(linear, experts):
            source = files.name_of(array)
            if source is None or array.dtype not in DTYPE_NAMES:
                raise UnsupportedLayout(
                    f"{layer}.{projection}.{tensor} is not stored as mlx-lm computes with it (it is "
                    f"stacked, split, transposed or converted at load); {_how_to_convert(path)}"
                )
            name, dtype = f"{projection}.{tensor}", DTYPE_NAMES[array.dtype]
            parts.append(
                PartSource(name=name, tensor=source, dtype=dtype, shape=tuple(array.shape[1:]))
            )
    return tuple(parts)


def _expert_arrays(linear: nn.Module, experts: int) -> list[tuple[str, mx.array]]:
    """Return the arrays with one row per expert; anything else stays where it is."""
    return [
        (name, value)
        for name, value in linear.items()
        if isinstance(value, mx.array) and value.ndim and value.shape[0] == experts
    ]


def _turn(stream: Stream, index: int, module: nn.Module, linears: Mapping[str, nn.Module]) -> None:
    projections, targets, dtypes, expert_bytes = [], [], set(), 0
    for attribute, linear in linears.items():
        quantized = isinstance(linear, QuantizedSwitchLinear)
        for name, array in _expert_arrays(linear, stream.experts):
            targets.append((linear, name))
            expert_bytes += array.nbytes // stream.experts
            if (
                name != "bias"
                and name != "global_scale"
                and mx.issubdtype(array.dtype, mx.floating)
            ):
                dtypes.add(array.dtype)
            del linear[name]
        projection = Projection(linear, quantized)
        projections.append(projection)
        setattr(module, attribute, projection)  # not a Module: leaves the parameter tree
    module.__class__ = streamed_class(type(module))
    module._expertd = StreamedLayer(
        stream, index, projections, targets, frozenset(dtypes), expert_bytes
    )


def _refuse_expert_weights(model: nn.Module, file_or_weights: Any) -> None:
    weights: Any = file_or_weights
    if isinstance(weights, str):
        weights = mx.load(weights)
    names = weights if isinstance(weights, Mapping) else [name for name, _ in weights]
    layers = tuple(f"{layer.path}." for layer in stream_of(model).layers)
    for name in names:
        if name.startswith(layers):
            raise UnsupportedLayout(
                f"{name} changes an expert, and experts are streamed from the model's files; fuse the "
                "adapter once: mlx_lm.fuse --model FOLDER --adapter-path ADAPTER --save-path OUT"
            )
