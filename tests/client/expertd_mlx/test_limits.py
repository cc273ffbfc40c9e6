"""What MLX may keep to itself."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm import utils

from expertd_mlx import limits
from expertd_protocol.errors import BadConfig


def test_mlx_lm_cannot_wire_more_than_the_workers_own_bytes_C11(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def set_wired_limit(limit: int) -> int:
        asked.append(limit)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 96 << 30})

    limits.cap_wired_memory(3 << 30)
    limits.cap_wired_memory(1 << 30)  # a second model in the process
    utils.maybe_set_recommended_wired_limit()
    mx.set_wired_limit(1 << 30)

    assert asked == [(4 << 30) + limits.WIRED_HEADROOM_BYTES, 1 << 30]


def test_freed_buffers_are_bounded_C18(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.set_cache_limit(1 << 30)
    try:
        monkeypatch.setenv(limits.CACHE_LIMIT_ENV, "17")
        limits.bound_free_buffers()
        assert mx.set_cache_limit(1 << 30) == 17 << 20
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5"])
def test_a_wrong_cache_limit_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.CACHE_LIMIT_ENV, text)
    with pytest.raises(BadConfig, match="whole number"):
        limits.bound_free_buffers()


def test_too_low_a_limit_of_open_files_is_one_sentence_with_the_numbers_D25() -> None:
    """mlx-lm sets the hard limit to 4096 when it is imported; raising it takes a privileged process."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "def refuse(*args): raise ValueError('not allowed to raise maximum limit')\n"
        "resource.setrlimit = refuse\n"
        "from expertd_protocol.errors import BadConfig\n"
        "try:\n"
        "    import expertd_mlx\n"
        "except BadConfig as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "a limit of 4096 open files, this process may have 1024 at most" in done.stdout
