"""Reference: slopes of streams with given growth. Property: a block of Peri-LN adds a mean square
of 2 to the stream, whatever the size of its matrices.
"""

import numpy as np
import pytest

from eval.claims.measures import depths
from eval.claims.measures.depths import DEPTHS, FACTORS, GAIN, GROWN, stream_squares

SEEDS = 3


def test_slopes_match_given_growth(monkeypatch):
    def fake_squares(depth, changes, placed=None):
        blocks, embeddings = np.arange(1, depth + 1), 3.0
        growth = {'pre': 2.0 * blocks, 'layernorm_scaling': 5 * blocks**0.25, 'peri': 2.0 * blocks}
        if placed:
            growth = {'layernorm_scaling': blocks, 'peri': blocks**1.5}
        added_L = growth[changes.get('model.placement', 'pre')]
        if 'scaling.name' in changes:
            added_L = added_L / depth
        grows = placed or changes.get('model.placement') == 'pre'
        factors = {
            'unchanged': 1.0,
            'grown': GROWN**2 if grows else 1.0,
            'larger_gains': GAIN**2,
            'divided_again': 1 / depth,
        }
        rows = {
            name: np.concatenate([[embeddings], embeddings + factor * added_L])
            for name, factor in factors.items()
        }
        return {
            name: np.stack([row * (1 + seed) for seed in range(SEEDS)])
            for name, row in rows.items()
        }

    monkeypatch.setattr(depths, 'stream_squares', fake_squares)
    values = {name: estimate.value for name, estimate in depths.stream_over_depth.compute().items()}

    def slope(squares_D):
        return np.polyfit(np.log(DEPTHS), 0.5 * np.log(squares_D), 1)[0]

    sizes = slope(3 + 2 * np.array(DEPTHS))
    expected = {
        'slope_of_pre': 1.0,
        'slope_of_layernorm_scaling': 0.25,
        'slope_of_peri': 1.0,
        'slope_of_scaling_by_depth': 1.0,
        'slope_of_peri_of_attention_only': 1.5,
        'added_by_grown_of_pre': 16.0,
        'added_by_grown_of_peri': 1.0,
        'added_by_grown_of_peri_of_attention_only': 16.0,
        'added_by_larger_gains_of_peri': 1.21,
        'slope_of_size_of_depth_mup': 0.0,
        'slope_of_added_size_of_depth_mup': 0.0,
        'slope_of_size_of_depth_mup_divided_again': slope(3 + 2 / np.array(DEPTHS)),
        'slope_of_added_size_of_depth_mup_divided_again': -0.5,
        'slope_of_size_of_standard': sizes,
        'slope_of_size_of_peri': sizes,
    }
    assert values == pytest.approx(expected, abs=1e-9)


@pytest.mark.full
def test_peri_block_adds_two(monkeypatch):
    monkeypatch.setitem(FACTORS, 'grown', lambda name, spec, depth: 5.0 ** (spec.role == 'hidden'))
    squares = stream_squares(2, {'model.placement': 'peri'}, seeds=range(4))
    for factor, added in (('unchanged', 2.0), ('grown', 2.0), ('larger_gains', 2 * GAIN**2)):
        squares_SL = squares[factor]
        assert squares_SL.shape == (4, 3)
        np.testing.assert_allclose(squares_SL[:, 0], 1.0, rtol=0.2)
        np.testing.assert_allclose(
            squares_SL[:, 1:] - squares_SL[:, :1], [[added, 2 * added]] * 4, rtol=0.2
        )
