"""Reference: slopes of streams with given growth. Property: a block of Peri-LN adds a mean square
of 2 to the stream, whatever the size of its matrices.
"""

import numpy as np
import pytest

from eval.claims.measures import depths
from eval.claims.measures.depths import DEPTHS, stream_squares

SEEDS = 3


def test_slopes_match_given_growth(monkeypatch):
    def fake_squares(depth, changes, factor=1.0):
        blocks, embeddings = np.arange(1, depth + 1), 3.0
        growth = {
            'pre': 2.0 * blocks * factor**2,
            'layernorm_scaling': 5 * blocks**0.25,
            'peri': 2.0 * blocks,
        }
        added_L = growth[changes.get('model.placement', 'pre')]
        if 'scaling.name' in changes:
            added_L = added_L / depth
        row = np.concatenate([[embeddings], embeddings + added_L])
        return np.stack([row * (1 + seed) for seed in range(SEEDS)])

    monkeypatch.setattr(depths, 'stream_squares', fake_squares)
    values = {name: estimate.value for name, estimate in depths.stream_over_depth.compute().items()}
    sizes = np.polyfit(np.log(DEPTHS), 0.5 * np.log(3 + 2 * np.array(DEPTHS)), 1)[0]
    expected = {
        'slope_of_pre': 1.0,
        'slope_of_layernorm_scaling': 0.25,
        'slope_of_peri': 1.0,
        'added_by_grown_of_pre': 16.0,
        'added_by_grown_of_peri': 1.0,
        'slope_of_size_of_depth_mup': 0.0,
        'slope_of_size_of_standard': sizes,
    }
    assert values == pytest.approx(expected, abs=1e-9)


@pytest.mark.full
def test_peri_block_adds_two():
    for factor in (1.0, 5.0):
        squares_SL = stream_squares(2, {'model.placement': 'peri'}, factor, seeds=range(4))
        assert squares_SL.shape == (4, 3)
        np.testing.assert_allclose(squares_SL[:, 0], 1.0, rtol=0.2)
        np.testing.assert_allclose(
            squares_SL[:, 1:] - squares_SL[:, :1], [[2.0, 4.0]] * 4, rtol=0.2
        )
