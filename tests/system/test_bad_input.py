"""What people give by mistake: one clear sentence, a non-zero exit, and a daemon that serves on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from expertd_client import Client
from expertd_protocol.errors import ExitCode
from tests.safetensors_files import LFS_POINTER
from tests.system.daemon import DEMO_MODEL, RealDaemon, demo_source, environment, real_daemon

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with real_daemon("1105920") as running:
        yield running
        # after everything below it still serves
        with Client.connect(running.run_dir) as client:
            client.attach(demo_source(), quota_min=4, quota_wanted=4)


def run(daemon: RealDaemon, model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "expertctl", "run", str(model), "-p", "Once"]
    return subprocess.run(
        [*command, "--max-tokens", "2", "--run-dir", str(daemon.run_dir), *flags],
        env=environment(NO_COLOR="1"), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[: len(data) * 6 // 10])


def split_and_lose_one(folder: Path) -> None:
    tensors = mx.load(str(folder / SHARD))
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    first = {n: tensors[n] for n in names if "00001-of" in shards[n]}
    mx.save_safetensors(str(folder / "model-00001-of-00002.safetensors"), first)
    index = {"metadata": {"total_size": 0}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / SHARD).unlink()


def one_tensor_per_expert(folder: Path) -> None:
    unstacked = {}
    for name, tensor in mx.load(str(folder / SHARD)).items():
        if ".switch_mlp." not in name:
            unstacked[name] = tensor
            continue
        layer, _, part = name.partition(".switch_mlp.")
        for expert in range(tensor.shape[0]):
            unstacked[f"{layer}.experts.{expert}.{part}"] = tensor[expert]
    (folder / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(folder / SHARD), unstacked)


def make_dense(folder: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64,
        "num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": mx.zeros((4096, 64)),
        "model.norm.weight": mx.zeros(64),
        f"{layer}input_layernorm.weight": mx.zeros(64),
        f"{layer}post_attention_layernorm.weight": mx.zeros(64),
        **{f"{layer}self_attn.{n}_proj.weight": mx.zeros((64, 64)) for n in "qkvo"},
        **{f"{layer}mlp.{n}_proj.weight": mx.zeros((64, 64)) for n in ("gate", "up", "down")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(folder / SHARD), weights)


def replace_by_directory(folder: Path) -> None:
    """As root nothing is unreadable by its mode; a directory in a file's place is."""
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], ExitCode]] = {
    "wrong path": (lambda f: shutil.rmtree(f), ("there is no model folder",), ExitCode.MODEL),
    "not a model": (
        lambda f: [p.unlink() for p in f.iterdir() if p.suffix in (".safetensors", ".json")],
        ("not a model",),
        ExitCode.MODEL,
    ),
    "dense model": (make_dense, ("dense", "mlx_lm.generate"), ExitCode.MODEL),
    "truncated shard A03": (truncate, (SHARD, "5356815", "3214089"), ExitCode.MODEL),
    "git-lfs pointer A01": (
        lambda f: (f / SHARD).write_bytes(LFS_POINTER),
        ("git-lfs pointer", SHARD),
        ExitCode.MODEL,
    ),
    "empty shard A31": (lambda f: (f / SHARD).write_bytes(b""), (SHARD, "empty"), ExitCode.MODEL),
    "missing shard A05": (
        split_and_lose_one,
        ("model-00002-of-00002.safetensors",),
        ExitCode.MODEL,
    ),
    "unreadable file": (replace_by_directory, (SHARD, "directory"), ExitCode.MODEL),
    "experts one by one": (one_tensor_per_expert, ("mlx_lm.convert",), ExitCode.MODEL),
    "unknown family A28": (
        lambda f: edit_config(f, model_type="no_such_family"),
        ("no_such_family", "mlx-lm"),
        ExitCode.MODEL,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_folder_is_one_clear_sentence(name: str, daemon: RealDaemon, tmp_path: Path) -> None:
    damage, words, code = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    damage(folder)

    done = run(daemon, folder)

    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert done.returncode == code, errors
    assert "Traceback" not in done.stderr
    assert str(folder) in errors[0]
    for word in words:
        assert word in errors[0]
    assert done.stdout == ""


def test_a_prompt_longer_than_the_context_names_both_numbers(daemon: RealDaemon) -> None:
    done = run(daemon, DEMO_MODEL, "-p", "word " * 1500)

    assert done.returncode == ExitCode.USAGE
    assert "1,024" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_budget_below_the_minimum_is_refused_by_run_with_the_minimum_in_bytes() -> None:
    with real_daemon("200000") as small:
        done = run(small, DEMO_MODEL)

    assert done.returncode == ExitCode.BUDGET
    assert "237,568" in done.stderr


def test_no_daemon_at_the_given_place_is_said_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "expertctl", "stats", "--run-dir", str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == ExitCode.DAEMON
    assert "no daemon answers" in done.stderr


def test_a_model_folder_is_never_written_A32(daemon: RealDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}

    done = run(daemon, folder)

    assert done.returncode == 0, done.stderr
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before


def test_a_file_changed_while_it_serves_makes_its_model_stale_E09(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    with real_daemon("300000") as small:
        assert run(small, folder).returncode == 0
        data = bytearray((folder / SHARD).read_bytes())
        data[-4096:] = b"\x55" * 4096
        with Client.connect(small.run_dir) as client:
            client.attach(demo_source(folder), quota_min=4, quota_wanted=4)
            (folder / SHARD).write_bytes(data)
            done = run(small, folder)

    assert done.returncode != 0
    assert "changed" in done.stderr
