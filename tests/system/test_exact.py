"""The first promise with a real daemon: logits equal plain mlx-lm, bit for bit, at every budget."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

from expertd.cache.budget import minimum_budget, needed_bytes
from expertd.store.index import ExpertIndex, build_index
from expertd_client import Client
from expertd_mlx import prepare, stream_of, streamed_classes
from expertd_protocol.errors import BadConfig
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.system.daemon import DEMO_MODEL, environment, real_daemon
from tests.tiny_models import TinyModel, write_tiny_model

#: Family, quantisation, view: every family, every quantisation, both views.
CASES = (
    ("qwen3_moe", "affine4", "map"),
    ("mixtral", "affine3", "copy"),
    ("olmoe", "affine8", "map"),
    ("deepseek_v3", "float32", "copy"),
    ("gpt_oss", "mxfp4", "map"),
    ("nemotron_h", "affine4", "copy"),
)
#: (length, batch): below, at and above the 64 routed pairs where mlx-lm begins to sort.
PROMPTS = ((1, 1), (7, 3), (64, 1), (300, 1))
STEPS = 8


def folder_index(model: TinyModel, layers: nn.Module) -> ExpertIndex:
    stream = stream_of(layers)
    return ExpertIndex(build_index(model.path), stream.layers, stream.experts)


@pytest.fixture(scope="module", params=CASES, ids=["-".join(c) for c in CASES])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyModel, str, dict[tuple[int, int], list[mx.array]]]:
    family, quantization, view = request.param
    mx.random.seed(7)
    model = write_tiny_model(tmp_path_factory.mktemp(family), family, quantization)
    plain = load_model(model.path)[0]
    return model, view, {p: greedy(plain, prompt(*p), STEPS) for p in PROMPTS}


@pytest.mark.parametrize("budget", ["minimum", "quarter", "all"])
def test_logits_equal_plain_mlx_lm_through_a_real_daemon_B39(
    budget: str, case: tuple[TinyModel, str, dict[tuple[int, int], list[mx.array]]]
) -> None:
    model, view, expected = case
    ours = load_model(
        model.path, lazy=True, get_model_classes=partial(streamed_classes, path=model.path)
    )[0]
    index = folder_index(model, ours)
    parts = [index.parts(layer) for layer in range(len(index))]
    least = minimum_budget(parts, index.experts, model.top_k)
    metadata = least - needed_bytes(parts, index.experts, model.top_k)
    everything = 2 * index.total_bytes + (8 << 20)
    nbytes = {
        "minimum": least,
        "quarter": max(least, index.total_bytes // 4 + metadata),
        "all": everything,
    }[budget]
    stream = stream_of(ours)
    stream.arena_view = view

    with real_daemon(str(nbytes), "--poison-free-slots") as daemon:
        stream.attach(Client.connect(daemon.run_dir), model.path)
        try:
            differing = {
                p: step
                for p in PROMPTS
                if (step := first_difference(greedy(ours, prompt(*p), STEPS), expected[p]))
                is not None
            }
            stats = daemon.stats()
        finally:
            stream.close()

    assert differing == {}
    assert stats.sessions[0].mismatches == 0
    assert stats.peak_committed_bytes <= nbytes
    assert (stats.evictions > 0) == (budget != "all")


def test_stock_mlx_lm_generate_streams_through_a_prepared_folder(tmp_path: Path) -> None:
    """`model_file` is mlx-lm's own hook: its command line runs unpatched."""

    def generate(model: Path, **env: str) -> str:
        flags = ["--prompt", "Once upon a time", "--max-tokens", "24", "--temp", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "mlx_lm.generate", "--model", str(model),
             "--trust-remote-code", "--ignore-chat-template", *flags],
            env=environment(**env), capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split("==========")[1]

    folder = prepare(DEMO_MODEL, tmp_path / "prepared")
    with real_daemon("1105920") as daemon:
        streamed = generate(folder, EXPERTD_RUN_DIR=str(daemon.run_dir))
        stats = daemon.stats()

    assert stats.total.misses > 0
    assert streamed == generate(DEMO_MODEL)


@pytest.mark.parametrize("out", ["a file", "nowhere"])
def test_prepare_into_a_place_that_cannot_be_written_is_one_sentence(
    out: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    where = {"a file": tmp_path / "file", "nowhere": Path("/proc/no/such")}[out]

    with pytest.raises(BadConfig, match="cannot be written"):
        prepare(DEMO_MODEL, where)
