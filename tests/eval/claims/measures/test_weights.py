"""Reference: steps saved by curves made by hand, and rows of a language made by hand."""

import numpy as np
import pytest

from eval.claims.measures.tiny import LENGTH, MODES, SYMBOLS, draw_text
from eval.claims.measures.weights import steps_saved


@pytest.mark.parametrize(
    ('plain', 'rescaled', 'expected'),
    [
        ((4.0, 3.0, 2.0), (4.0, 2.0, 1.0), 1 / 2),
        ((4.0, 3.0, 2.0), (4.0, 1.0, 0.5), 2 / 3),  # two thirds of the way to the first merge
        ((4.0, 3.0, 2.0), (4.0, 3.0, 2.0), 0.0),
        ((4.0, 2.0, 1.0), (4.0, 3.0, 2.0), -1 / 2),
        ((4.0, 5.0, 6.0), (4.0, 5.0, 5.5), 1.0),  # the start was as good
    ],
)
def test_steps_saved(plain, rescaled, expected):
    """Catches a share of the wrong curve, a wrong sign, and steps that are not interpolated."""
    assert steps_saved(plain, rescaled) == pytest.approx(expected)


def test_rows_follow_mode_chain():
    """Mode m moves m + 1 symbols on. Catches the chain of another mode, and overlapping ids."""
    steps = np.arange(MODES) + 1
    chains = np.stack([np.roll(np.eye(SYMBOLS), step, 1) for step in steps])
    rows = draw_text(chains, 64, np.random.default_rng(0), (0.5, 0.0, 0.5, 0.0))
    assert rows.shape == (64, LENGTH + 1) and {*rows[:, 0]} == {1, 3}
    symbols = rows[:, 1:] - 1 - MODES
    moved = (symbols[:, 1:] - symbols[:, :-1]) % SYMBOLS
    np.testing.assert_array_equal(moved, np.broadcast_to(rows[:, :1], moved.shape))
