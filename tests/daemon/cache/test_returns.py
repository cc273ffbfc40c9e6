"""What age and frequency are worth is learned, and the guess it begins with is sane."""

import numpy as np

from expertd.cache.returns import NEVER, Returns


def test_in_the_beginning_frequency_decides_and_then_recency() -> None:
    returns = Returns(64)
    ages = np.array([[1, 1, 4, NEVER]], np.float32)
    averages = np.array([[0.5, 0.02, 0.02, 0.0]], np.float32)

    chances = returns.chances(returns.cells(np.log2(ages), averages), np.log2(ages))[0]

    assert (np.diff(chances) < 0).all()
    assert ((chances > 0) & (chances < 1)).all()


def test_a_model_whose_experts_rest_after_a_use_is_learned() -> None:
    """Every expert is used in every fourth visit exactly."""
    returns = Returns(8)
    averages = np.full((1, 8), 0.25, np.float32)
    ages = np.array([[1, 2, 3, 4, 1, 2, 3, 4]], np.float32)
    for _ in range(400):
        used = ages >= 4
        returns.learn(returns.cells(np.log2(ages), averages), used)
        ages = np.where(used, np.float32(1), ages + 1)

    ages = np.array([[1, 2, 4]], np.float32)
    just, before, long_ago = returns.chances(
        returns.cells(np.log2(ages), averages[:, :3]), np.log2(ages)
    )[0]
    assert max(just, before) < 0.1
    assert long_ago > 0.8


def test_every_age_and_average_has_a_cell() -> None:
    returns = Returns(8)
    ages = np.array([[1, 2, 1e3, NEVER, 1e9, 1e30]], np.float32)
    for average in (0.0, 1e-9, 0.125, 1.0):
        cells = returns.cells(np.log2(ages), np.full_like(ages, average))
        assert np.isfinite(returns.chances(cells, np.log2(ages))).all()
