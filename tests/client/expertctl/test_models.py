"""`ls` and `show`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from expertctl import bundled, facts, models
from expertctl.models import Listed
from expertd_client.model_folder import read_config
from expertd_protocol.stats import Stats


def put(cache: Path, name: str, config: dict[str, object] | None) -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0a1b")
    (snapshot / "model.safetensors").write_bytes(b"x" * 1000)
    if config is not None:
        (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def test_a_missing_cache_is_an_empty_list(tmp_path: Path) -> None:
    assert models.cached_models(tmp_path / "none") == []


def test_only_moe_models_of_the_cache_are_listed(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = put(cache, "org/moe", {"model_type": "olmoe", "num_experts": 64,
                                      "num_experts_per_tok": 8})  # fmt: skip
    put(cache, "org/dense", {"model_type": "llama"})
    put(cache, "org/no-config", None)
    (found,) = models.cached_models(cache)

    assert replace(found, size_bytes=0) == Listed(
        "org/moe", str(snapshot), "cache", "olmoe", 64, 8, 0, 0
    )
    assert found.size_bytes >= 1000


def test_a_model_in_the_daemon_is_not_listed_a_second_time(stats: Stats) -> None:
    attached = models.in_daemon(stats.models[0])
    cached = replace(attached, where="cache", resident_bytes=0)
    other = replace(cached, path="/cache/other", name="other")

    assert models.merged([attached], [cached, other]) == [attached, other]
    assert attached.where == "daemon (ready)"
    assert attached.name == "org/tiny-moe"
    assert "org/tiny-moe  daemon (ready)" in models.ls_text([attached])


def test_show_prints_what_the_json_has() -> None:
    path = bundled.FOLDER
    found = facts.read_facts(path)
    config = read_config(path)
    value = models.facts_json(found, config, facts.minimum_budget(found))
    text = models.facts_text(found, config, value["minimum_budget_bytes"])

    assert (value["layers"], value["experts"], value["top_k"]) == (6, 32, 4)
    assert sum(part["bytes"] for part in value["parts"]) == value["expert_bytes"] == 23_040
    assert f"{value['minimum_budget_bytes']:,} bytes" in text
    assert "6 MoE layers x 32 experts, top-4" in text
    assert "context 1,024" in text


def test_a_model_without_top_k_says_what_it_does_not_know() -> None:
    found = replace(facts.read_facts(bundled.FOLDER), top_k=None, warnings=("twin ignored",))

    assert facts.minimum_budget(found) is None
    text = models.facts_text(found, {}, None)
    assert text.count("unknown: no top-k in config.json") == 2
    assert text.endswith("warning: twin ignored")
