"""Reference: each placement is the equation in its docstring."""

import jax.numpy as jnp
import numpy as np
import pytest

from modules.options import declared_options
from modules.placements import PLACEMENTS, Depth

X = np.float32([1.0, 2.0, 4.0])
# F(x) = 3 x + 1; norm_in halves, norm_out divides by 8: exact, and no two of them commute.
NORMS = {'norm_in': lambda x: x / 2, 'norm_out': lambda x: x / 8}
BLOCKS = 8
PRE = X + 3 * X / 2 + 1, ['norm_in']
POST = (X + 3 * X + 1) / 8, ['norm_out']
BARE = X + 3 * X + 1, []
NORMED = X / 2 + 3 * X / 2 + 1, ['norm_in']
PERI = X + (3 * X / 2 + 1) / 8, ['norm_in', 'norm_out']
OUTPUT = X + (3 * X + 1) / 8, ['norm_out']
SCALED = X + 3 * X / 4 + 1, ['norm_in']  # block 4 of 8
DEEP = (2 * X + 3 * X + 1) / 8, ['norm_out']  # alpha = (2 * 8)^(1/4) = 2
BOTH = X + 2 * (3 * X / 2 + 1)
PARALLEL = ((PRE[0], X), ['norm_in']), (BOTH, ['norm_in'])
SHARED = ((PRE[0], X / 2), ['norm_in']), (BOTH, [])
DUAL = ((X + 3 * X + 1) / 8, X + 3 * X + 1), ['norm_out']
EXPECTED = {  # by group of blocks: how many of 8, and value and norms of attention and of the MLP
    'deepnorm': [('layers', 8, DEEP, DEEP)],
    'hybrid': [('layers', 8, BARE, NORMED)],
    'hybrid_star': [('layers_first', 1, PRE, PRE), ('layers', 7, BARE, NORMED)],
    'layernorm_scaling': [('layers', 8, SCALED, SCALED)],
    'mix': [('layers_post', 2, POST, POST), ('layers_pre', 6, PRE, PRE)],
    'output': [('layers', 8, OUTPUT, OUTPUT)],
    'parallel': [('layers', 8, *PARALLEL)],
    'parallel_shared': [('layers', 8, *SHARED)],
    'peri': [('layers', 8, PERI, PERI)],
    'post': [('layers', 8, POST, POST)],
    'pre': [('layers', 8, PRE, PRE)],
    'resi_dual': [('layers', 8, DUAL, DUAL)],
    'wide': [('layers', 8, PRE, PRE)],
}
WITHOUT_FINAL_NORM = {'deepnorm', 'post'}


def test_every_placement_has_its_equation():
    assert EXPECTED.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize('name', PLACEMENTS)
def test_placement_is_its_equation(name):
    placement = PLACEMENTS[name]
    groups = placement.blocks(BLOCKS)
    assert [(group.name, group.count) for group in groups] == [row[:2] for row in EXPECTED[name]]
    for group, (_, _, *sublayers) in zip(groups, EXPECTED[name], strict=True):
        streams_out = None
        for place, (value, norms) in zip((group.attention, group.mlp), sublayers, strict=True):
            norm_names, calls = [], []

            def norm(norm_name, norm_names=norm_names):
                norm_names.append(norm_name)
                return NORMS[norm_name]

            def sublayer(x, calls=calls):
                calls.append(x)
                return 3 * x + 1

            streams = placement.split(jnp.asarray(X))
            if place is group.mlp and name.startswith('parallel'):
                streams = streams_out  # the output of attention
            streams_out = place(streams, sublayer, norm, Depth(jnp.float32(4), BLOCKS))
            np.testing.assert_array_equal(streams_out, value)
            assert sorted(norm_names) == norms
            assert len(calls) == 1
    assert placement.final_norm == (name not in WITHOUT_FINAL_NORM)


@pytest.mark.parametrize('name', PLACEMENTS)
def test_readout_reads_the_normed_stream(name):
    """The stream by the final norm; x + N(r) for the two streams of ResiDual."""
    placement = PLACEMENTS[name]
    streams = (X, 2 * X) if name == 'resi_dual' else X
    expected = X + 2 * X / 8 if name == 'resi_dual' else X / 8
    np.testing.assert_array_equal(placement.join(streams, NORMS['norm_out']), expected)


@pytest.mark.parametrize(
    ('blocks', 'fraction', 'post'), [(12, 0.25, 3), (100, 0.29, 29), (10, 0.3, 3), (3, 0.25, 0)]
)
def test_mix_takes_the_floor(blocks, fraction, post):
    """0.29 * 100 is a little less than 29 in binary."""
    groups = PLACEMENTS['mix'].blocks(blocks, mix_fraction=fraction)
    assert {group.name: group.count for group in groups}.get('layers_post', 0) == post
    assert sum(group.count for group in groups) == blocks


def test_deepnorm_gain_matches_published_table():
    """The published table for a decoder of 6 and of 32 blocks."""
    assert PLACEMENTS['deepnorm'].init_gain(6) == pytest.approx(0.380, abs=5e-4)
    assert PLACEMENTS['deepnorm'].init_gain(32) == pytest.approx(0.250, abs=5e-4)
    other_rows = [row for name, row in PLACEMENTS.items() if name != 'deepnorm']
    assert all(row.init_gain(6) == 1 for row in other_rows)


def test_needs_and_options():
    """Other choices that belong to a method, and the only option."""
    normed, shared = {'norm_values': True}, {'mlp': 'moe', 'reparam': 'shared'}
    expected = {'hybrid': normed, 'hybrid_star': normed, 'wide': shared}
    assert {name: row.needs for name, row in PLACEMENTS.items() if row.needs} == expected
    with_options = {
        name: list(declared_options(row))
        for name, row in PLACEMENTS.items()
        if declared_options(row)
    }
    assert with_options == {'mix': ['mix_fraction']}
