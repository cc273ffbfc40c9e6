"""Which files make up a model, and whether all of them are there.

The headers are the truth; `model.safetensors.index.json` is only believed where it agrees. A
complete set of files with a stale index is a model and a warning; a set with a hole in it is
refused, because what is missing would otherwise be garbage.

Only `model*.safetensors` counts, as in mlx-lm. Names that start with "." are ignored everywhere: on
exFAT, macOS writes a `._name` twin beside each file. Never looks outside the folder.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from expertd.store.header import HEADER_MAX_BYTES, Header, open_error, open_file, parse_json, short
from expertd_protocol.errors import ExpertdError, MissingShard, ModelError, ModelNotFound, NotAModel

INDEX_NAME = "model.safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_FOREIGN_ENDINGS = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".npz", ".incomplete")


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a model folder, or raise the error that says why it is none."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except NotADirectoryError as exc:
        if not folder.exists():
            raise ModelNotFound(f"{folder} does not exist") from exc
        raise NotAModel(f"{folder} is a file; give the folder of the model") from exc
    except OSError as exc:
        raise open_error(folder, exc) from exc
    if "config.json" not in names:
        raise NotAModel(
            f"{folder} has no config.json; give the folder of a model in mlx-lm's format"
        )
    if not (folder / "config.json").exists():
        raise NotAModel(f"{folder}/config.json is a link to a file that is gone; download it again")
    return names


def is_shard(name: str) -> bool:
    """Say whether mlx-lm would read this file (it globs `model*.safetensors`)."""
    return name.startswith("model") and name.endswith(".safetensors")


def read_weight_map(folder: Path, names: Iterable[str]) -> tuple[dict[str, str] | None, list[str]]:
    """Return tensor -> file as the index says, and warnings; None without a usable index."""
    if INDEX_NAME not in names:
        return None, []
    path = folder / INDEX_NAME
    try:
        value = parse_json(_read_all(path))
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        for file in weight_map.values():
            if not isinstance(file, str) or not file or "/" in file or "\0" in file:
                raise ValueError(
                    f"weight_map names {short(file)}, which is not a file of the folder"
                )
    except (ExpertdError, OSError, ValueError) as exc:
        return None, [f"{path} cannot be used and is ignored ({exc}); the headers decide"]
    return weight_map, []


def _read_all(path: Path) -> bytes:
    fd = open_file(path)
    with open(fd, "rb") as file:
        raw = file.read(HEADER_MAX_BYTES + 1)
    if len(raw) > HEADER_MAX_BYTES:
        raise ValueError(f"it is larger than {HEADER_MAX_BYTES} bytes")
    return raw


def no_shards(folder: Path, names: list[str], weight_map: Mapping[str, str] | None) -> ModelError:
    """Return the error for a folder without any `model*.safetensors`."""
    if weight_map:
        return _missing(folder, Counter(weight_map.values()))
    foreign = [name for name in names if name.endswith(_FOREIGN_ENDINGS)]
    if not foreign:
        return NotAModel(f"{folder} holds no weights (no model*.safetensors); download them")
    some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
    return NotAModel(
        f"{folder} holds {some}, but mlx-lm reads only model*.safetensors; "
        "use a model in mlx-lm's format, or make one with mlx_lm.convert"
    )


def check_complete(
    folder: Path,
    headers: Mapping[str, Header],
    weight_map: Mapping[str, str] | None,
    dangling: Iterable[str] = (),
) -> list[str]:
    """Return warnings about an index that disagrees with a complete set of files.

    Args:
        folder: For messages.
        headers: Of every shard that is there, by file name.
        weight_map: What the index says, None without one.
        dangling: Shards that are links to nothing: an interrupted download in the HF cache.

    Raises:
        MissingShard: files are missing; names each, and how many tensors the index puts there.
    """
    where = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    expected = Counter((weight_map or {}).values())
    if lost := sorted(dangling):
        raise _missing(folder, {name: expected[name] for name in lost})
    absent = {name: n for name, n in expected.items() if name not in headers}
    gaps = _numbering_gaps(headers)
    if weight_map is None:
        if gaps:
            raise _missing(folder, dict.fromkeys(gaps, 0))
        return []
    index = folder / INDEX_NAME
    if absent:
        all_found = all(tensor in where for tensor in weight_map)
        # None of the named files is there, and those that are make a whole set by their own
        # numbers: the folder was sharded again after the index was written.
        other_set = len(absent) == len(expected) and not gaps
        if not all_found and not other_set:
            raise _missing(folder, absent)
        return [
            f"{index} is stale: it names {len(absent)} files that are not there "
            f"({_some(absent)}), but the files that are there are complete; the headers decide"
        ]
    moved = [t for t, file in weight_map.items() if where.get(t) != file]
    extra = [t for t in where if t not in weight_map]
    if gaps and (moved or not weight_map):
        raise _missing(folder, dict.fromkeys(gaps, 0))
    warnings = []
    if moved:
        warnings.append(
            f"{index} is stale: {len(moved)} tensors are not where it says "
            f"(for example {short(moved[0])}); the headers decide"
        )
    if extra:
        warnings.append(
            f"{len(extra)} tensors of {folder} are not in its index (for example "
            f"{short(extra[0])} in {where[extra[0]]}); they are used, as in mlx-lm"
        )
    return warnings


def _numbering_gaps(names: Iterable[str]) -> list[str]:
    """Return the files that `x-00001-of-00003` numbers promise and that are not there."""
    sets: dict[tuple[str, str], dict[int, int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            numbers = sets.setdefault((match["stem"], match["count"]), {})
            numbers[int(match["number"])] = len(match["number"])
    gaps = []
    for (stem, count), numbers in sets.items():
        if int(count) > 1_000_000:  # a name, not a promise
            continue
        first = 0 if 0 in numbers else 1  # some converters count from 0
        width = max(numbers.values())
        gaps += [
            f"{stem}-{i:0{width}d}-of-{count}.safetensors"
            for i in range(first, first + int(count))
            if i not in numbers
        ]
    return gaps


def _missing(folder: Path, files: Mapping[str, int]) -> MissingShard:
    listed = ", ".join(f"{name} ({n} tensors)" if n else name for name, n in sorted(files.items()))
    noun = "file is" if len(files) == 1 else "files are"
    return MissingShard(
        f"{folder} is incomplete, {len(files)} {noun} missing: {listed}; download the model again"
    )


def _some(names: Mapping[str, int]) -> str:
    first = sorted(names)[:2]
    return ", ".join(first) + (", ..." if len(names) > 2 else "")
