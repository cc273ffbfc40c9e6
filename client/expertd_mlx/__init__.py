"""Stream the experts of a Mixture-of-Experts model into mlx-lm; the only package that imports MLX.

    model, tokenizer = expertd_mlx.load("mlx-community/Qwen3-30B-A3B-4bit")
    mlx_lm.generate(model, tokenizer, prompt="...")

Tokens and logits equal those of a fully resident mlx-lm run.
"""

from expertd_mlx.limits import import_mlx_lm

import_mlx_lm()

from expertd_mlx.load import close, load  # noqa: E402
from expertd_mlx.models import stream_of, streamed_classes  # noqa: E402
from expertd_mlx.prepare import prepare, prepared  # noqa: E402

__all__ = ["close", "load", "prepare", "prepared", "stream_of", "streamed_classes"]
