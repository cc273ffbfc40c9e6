"""verify: names what is damaged, and says what it could not compare (A04)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.packer import Packer
from expertctl.verifier import Verification
from expertctl.verify import report_text
from expertd.store.index import build_index
from expertd_protocol.errors import BadHeader, TruncatedFile
from tests.client.expertctl.test_packer import OTHER, layers_of
from tests.safetensors_files import expert_tensors, write_model
from tests.system.daemon import environment


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", [expert_tensors(0) | OTHER, expert_tensors(1)])


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed"
    layers = layers_of(expert_tensors(0) | expert_tensors(1))
    Packer(build_index(plain), layers, 8, out).run()
    return out


def cached(plain: Path, tmp_path: Path) -> Path:
    """The same files as the Hugging Face cache has them: links to blobs named by their hash."""
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in plain.iterdir():
        content = file.read_bytes()
        if file.suffix == ".safetensors":
            name = hashlib.sha256(content).hexdigest()
        else:
            name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (repo / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def flip(path: Path, at: int) -> None:
    """Change one bit, and let the time stand as a bad disk would."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_sound_packed_folder_is_verified_whole(packed: Path) -> None:
    verification = Verification(packed)
    steps: list[int] = []
    report = verification.run(steps.append)

    assert (report.records, report.checked_tensors, report.problems) == (16, 1, [])
    assert report.unchecked == ["config.json", "model.safetensors.index.json"]
    assert 0 < sum(steps) <= verification.total_bytes


def test_a_flipped_bit_names_the_expert_A04(packed: Path) -> None:
    records = build_index(packed).records[1]
    path = packed / "model-00003-of-00003.safetensors"
    flip(path, records.offset + 5 * records.layer.record_bytes + 17)
    flip(path, records.offset + 8 * records.layer.record_bytes - 1)  # also in the padding

    report = Verification(packed).run()

    assert [p.partition(" has ")[0] for p in report.problems] == [
        f"expert {e} of model.layers.1.mlp.switch_mlp in {path.name}" for e in (5, 7)
    ]


def test_a_flipped_bit_beside_the_experts_names_the_tensor_A04(packed: Path) -> None:
    path = packed / "model-00001-of-00003.safetensors"
    flip(path, path.stat().st_size - 1)

    (problem,) = Verification(packed).run().problems

    assert problem.startswith(f"tensor model.embed_tokens.weight in {path.name} has the CRC-32")


def test_blobs_are_compared_with_their_names_A04(plain: Path, tmp_path: Path) -> None:
    snapshot = cached(plain, tmp_path)
    report = Verification(snapshot).run()
    assert (report.hashed_files, report.problems, report.unchecked) == (4, [], [])

    shard = snapshot / "model-00002-of-00002.safetensors"
    flip(shard.resolve(), shard.stat().st_size // 2)
    flip((snapshot / "config.json").resolve(), 3)
    problems = Verification(snapshot).run().problems

    assert sorted(p.split(" ")[0] for p in problems) == ["config.json", shard.name]
    assert "SHA-256" in problems[1]
    assert "git SHA-1" in problems[0]


def test_where_nothing_can_be_compared_it_says_so(plain: Path) -> None:
    report = Verification(plain).run()

    assert report.checked_bytes == 0
    assert "model-00001-of-00002.safetensors" in report.unchecked
    text = report_text(report)
    assert "not verified  the content of 4 files" in text
    assert "checksums" not in text


def test_a_cut_file_is_an_error_of_its_own(packed: Path) -> None:
    path = packed / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 4096)

    with pytest.raises(TruncatedFile, match=path.name):
        Verification(packed)


def test_checksums_of_other_tensors_are_refused(packed: Path) -> None:
    path = packed / "model-00001-of-00003.safetensors"
    content = path.read_bytes()
    assert content.count(b'\\"model.embed_tokens.weight\\"') == 1
    path.write_bytes(content.replace(b'\\"model.embed_tokens', b'\\"model.embed_tokenZ'))

    with pytest.raises(BadHeader, match="not the same"):
        Verification(packed)


def test_pack_and_verify_from_the_command_line(tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "expertctl", *args],
            env=environment(), capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    from expertctl import bundled

    out = tmp_path / "out"
    packed = run("pack", str(bundled.FOLDER), str(out), "--json")
    assert (packed.returncode, packed.stderr) == (0, "")
    assert json.loads(packed.stdout)["experts"] == 32
    good = run("verify", str(out), "--json")
    assert (good.returncode, json.loads(good.stdout)["records"]) == (0, 192)

    records = build_index(out).records[4]
    flip(out / "model-00006-of-00007.safetensors", records.offset + 30 * records.layer.record_bytes)
    bad = run("verify", str(out))
    assert bad.returncode == 3
    assert "expert 30 of model.layers.4.mlp.switch_mlp" in bad.stderr
    assert "damaged" in bad.stdout

    again = run("pack", str(out), str(tmp_path / "twice"))
    assert (again.returncode, "is packed already" in again.stderr) == (3, True)
