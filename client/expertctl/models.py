"""`expertctl ls` and `expertctl show`: which models there are, and what one is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertctl import figures
from expertctl.connection import AsJson, RunDir, Socket, connect
from expertctl.table import table

if TYPE_CHECKING:
    from expertctl.facts import ModelFacts
    from expertd_protocol.stats import ModelStats

LS_EPILOG = "Examples:\n\n  expertctl ls\n\n  expertctl ls --json | jq '.[].name'"
SHOW_EPILOG = (
    "Examples:\n\n"
    "  expertctl show mlx-community/Qwen3-30B-A3B-4bit\n\n"
    "  expertctl show ~/models/Qwen3-30B-A3B-4bit --json"
)


@dataclass(frozen=True)
class Listed:
    """One row of `ls`."""

    name: str
    path: str
    #: attached in the daemon, or only on disk in the Hugging Face cache.
    where: str
    family: str
    experts: int | None
    top_k: int | None
    size_bytes: int
    resident_bytes: int


def ls(as_json: AsJson = False, run_dir: RunDir = None, socket: Socket = None) -> None:
    """List models: those in the daemon, and the MoE models in the Hugging Face cache."""
    from expertd_protocol.errors import DaemonUnavailable

    try:
        admin = connect(run_dir, socket)
    except DaemonUnavailable:
        if run_dir or socket:
            raise
        attached: tuple[ModelStats, ...] = ()
    else:
        try:
            attached = admin.stats().models
        finally:
            admin.close()
    rows = merged([in_daemon(m) for m in attached], cached_models())
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    elif rows:
        print(ls_text(rows))
    else:
        print("no model in a daemon, no MoE model in the Hugging Face cache")


def in_daemon(model: ModelStats) -> Listed:
    """Return the row of a model the daemon serves; its size is that of all its experts."""
    from expertctl import render
    from expertd_client.model_folder import read_config
    from expertd_client.routing import top_k

    try:
        config = read_config(Path(model.path))
    except Exception:  # the folder may be gone while the daemon still serves what is resident
        config = {}
    return Listed(
        name=render.model_name(model.path),
        path=model.path,
        where=f"daemon ({model.state})",
        family=str(config.get("model_type", "unknown")),
        experts=model.experts,
        top_k=top_k(config),
        size_bytes=model.total_expert_bytes,
        resident_bytes=model.resident_bytes,
    )


def cached_models(cache_dir: Path | None = None) -> list[Listed]:
    """Return the MoE models of the Hugging Face cache; none when there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(cache_dir)
    except (CacheNotFound, ValueError, OSError):
        return []
    rows = []
    for repo in cache.repos:
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda r: r.last_modified, reverse=True)[:1]:
            if row := cached(repo.repo_id, revision.snapshot_path, repo.size_on_disk):
                rows.append(row)
    return sorted(rows, key=lambda row: row.name.lower())


def cached(name: str, snapshot: Path, size_bytes: int) -> Listed | None:
    """Return the row of one snapshot, None when it is dense or no model at all."""
    from expertd_client.model_folder import read_config
    from expertd_client.routing import declared_experts, top_k
    from expertd_protocol.errors import ModelError

    try:
        config = read_config(snapshot)
    except ModelError:
        return None
    experts = declared_experts(config)
    if experts is None:
        return None
    return Listed(
        name=name,
        path=str(snapshot),
        where="cache",
        family=str(config.get("model_type", "unknown")),
        experts=experts,
        top_k=top_k(config),
        size_bytes=size_bytes,
        resident_bytes=0,
    )


def merged(attached: list[Listed], on_disk: Iterable[Listed]) -> list[Listed]:
    """Return attached models first; one that is attached is not listed a second time."""
    paths = {Path(row.path).resolve() for row in attached}
    return attached + [row for row in on_disk if Path(row.path).resolve() not in paths]


def ls_text(rows: Iterable[Listed]) -> str:
    headers = ("model", "where", "family", "experts", "top-k", "size", "resident")
    return table(
        headers,
        [
            (
                row.name,
                row.where,
                row.family,
                str(row.experts or "?"),
                str(row.top_k or "?"),
                figures.size(row.size_bytes),
                figures.size(row.resident_bytes) if row.resident_bytes else "-",
            )
            for row in rows
        ],
        left=3,
    )


def show(
    model: Annotated[str, typer.Argument(help="Model folder, or a Hugging Face id in the cache.")],
    as_json: AsJson = False,
) -> None:
    """Show what a model is made of, from its headers: experts, bytes per token, least budget."""
    from expertctl import facts
    from expertd_client.model_folder import model_folder, read_config

    path = model_folder(model)
    found = facts.read_facts(path)
    config = read_config(path)
    least = facts.minimum_budget(found)
    if as_json:
        print(json.dumps(facts_json(found, config, least)))
    else:
        print(facts_text(found, config, least))


def facts_json(found: ModelFacts, config: dict[str, Any], least: int | None) -> dict[str, Any]:
    return {
        "path": str(found.folder),
        "family": found.family,
        "context_length": found.context,
        "layers": len(found.layers),
        "experts": found.experts,
        "top_k": found.top_k,
        "quantization": found.quantization,
        "total_bytes": found.total_bytes,
        "all_experts_bytes": found.all_experts_bytes,
        "resident_bytes": found.other_bytes,
        "expert_bytes": found.largest_expert_bytes,
        "packed": bool(found.record_bytes),
        "record_bytes": found.record_bytes or None,
        "token_bytes": found.token_bytes,
        "minimum_budget_bytes": least,
        "parts": _parts(found, config),
        "warnings": list(found.warnings),
    }


def _parts(found: ModelFacts, config: dict[str, Any]) -> list[dict[str, Any]]:
    from expertctl import facts

    return [
        {
            "name": part.name,
            "dtype": part.dtype,
            "shape": list(part.shape),
            "bits": facts.part_bits(next(x for x in found.layers if part in x.parts), part, config),
            "bytes": part.nbytes,
            "layers": layers,
        }
        for part, layers in found.kinds
    ]


def facts_text(found: ModelFacts, config: dict[str, Any], least: int | None) -> str:
    size = figures.size
    token = found.token_bytes
    lines = [
        ("model", str(found.folder)),
        ("family", f"{found.family}, context {figures.count(found.context or 0) or 'unsaid'}"),
        (
            "experts",
            f"{len(found.layers)} MoE layers x {found.experts} experts, "
            f"top-{found.top_k or '?'}; quantization {found.quantization}",
        ),
        ("one expert", size(found.largest_expert_bytes)),
        ("packed", f"yes, one record of {size(found.record_bytes)} per expert"
         if found.record_bytes else f"no, {len(found.layers[0].parts)} reads per expert"),
        ("per token", f"{size(token)} of experts ({size(token / len(found.layers))} a layer)"
         if token else "unknown: no top-k in config.json"),
        ("streamed", f"{size(found.all_experts_bytes)} of experts, under the daemon's budget"),
        ("resident", f"{size(found.other_bytes)} of other weights, in every worker"),
        ("least budget", f"{size(least)} ({figures.count(least)} bytes) for one worker"
         if least else "unknown: no top-k in config.json"),
    ]  # fmt: skip
    rows = [
        (
            p["name"],
            p["dtype"],
            "x".join(map(str, p["shape"])) or "scalar",
            f"{p['bits']:g}" if p["bits"] else "-",
            size(p["bytes"]),
            str(p["layers"]),
        )
        for p in _parts(found, config)
    ]
    parts = table(("part of one expert", "dtype", "shape", "bits", "bytes", "layers"), rows, left=3)
    warnings = [f"warning: {w}" for w in found.warnings]
    return "\n".join(
        [
            *(f"{name:<13} {text}" for name, text in lines),
            "",
            parts,
            *(["", *warnings] if warnings else []),
        ]
    )
