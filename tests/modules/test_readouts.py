"""Readouts. Reference: logits against numpy float64, the Welch bound against vectors that meet it.
Property: spread rows are far apart, and frozen rows have no gradient, decay or state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.training.state import make_hyper
from lm.training.update import build_optimizer, decay_shares, peak_lrs
from modules.params import named_leaves
from modules.readouts import READOUTS, init_spread_rows, spread_rows, welch_bound
from tests.helpers import (
    checked_config,
    initial_state,
    tiny_batch,
    tiny_learner,
    tiny_model,
    train_step,
)

TOKENS = tiny_batch(rows=2)['tokens'][:, :-1]


def largest_cosine(rows_VD) -> float:
    rows = np.float64(rows_VD)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return float(np.abs(rows @ rows.T - np.eye(len(rows))).max())


class TestWelch:
    def test_equiangular_lines_meet_welch_bound(self):
        """Six diagonals of the icosahedron in 3 dimensions, and a simplex."""
        golden = (1 + np.sqrt(5)) / 2
        two = np.array([[1, golden], [1, -golden]])
        lines = np.concatenate([np.roll(np.insert(two, 0, 0, 1), i, 1) for i in range(3)])
        simplex = np.eye(5) - 1 / 5
        assert largest_cosine(lines) == pytest.approx(welch_bound(6, 3))
        assert largest_cosine(simplex) == pytest.approx(welch_bound(5, 4))

    def test_welch_bound_is_0_for_orthogonal_rows(self):
        assert welch_bound(4, 4) == welch_bound(3, 8) == 0


@pytest.mark.parametrize('vocab, width, factor', [(48, 12, 1.6), (120, 8, 2.5), (12, 24, None)])
def test_rows_are_spread_apart(vocab, width, factor):
    """Nearly orthogonal if there is room; never two equal rows, also beyond D (D + 1) / 2 rows, the
    most that equal angles allow.
    """
    key = jax.random.key(1)
    rows_VD = jax.jit(spread_rows, static_argnums=(1, 2))(key, vocab, width)
    np.testing.assert_allclose(np.linalg.norm(rows_VD, axis=1), 1, rtol=1e-5)
    random = largest_cosine(jax.random.normal(key, (vocab, width)))
    cosine, bound = largest_cosine(rows_VD), welch_bound(vocab, width)
    assert bound < cosine < 0.8 * random
    assert cosine < (0.01 if factor is None else factor * bound)


def test_initial_rows_have_unit_size():
    weight_DV = init_spread_rows(jax.random.key(0), (8, 20), jnp.float32)
    assert weight_DV.shape == (8, 20) and np.mean(np.square(weight_DV)) == pytest.approx(1)


def test_learned_readout_multiplies_its_inputs():
    row, x_MD, weight_DV = READOUTS['learned'](), jnp.ones((2, 3)), jnp.ones((3, 5))
    input_MD, matrix_DV = row.inputs(x_MD, weight_DV)
    assert input_MD is x_MD and matrix_DV is weight_DV and not row.is_frozen


def logits_and_parts(changes):
    """Returns params, logits, and the activations of the same weights before the readout."""
    config, reads = checked_config(changes), {'model.readout', 'model.readout_temperature'}
    params, model = initial_state(config).params, tiny_model(config)
    plain = tiny_model(checked_config({k: v for k, v in changes.items() if k not in reads}))

    @jax.jit
    def run(params):
        x_BTD, _ = plain.apply({'params': params}, TOKENS, method='activations')
        return model.apply({'params': params}, TOKENS), x_BTD

    return params, *run(params)


@pytest.mark.default_rows('random')
@pytest.mark.parametrize('name', ['cosines', 'equiangular', 'random'])
def test_logits_are_cosines_over_the_temperature(name):
    """For any parametrisation of the matrix: muP scales its readout down."""
    changes = {'model.readout': name, 'model.readout_temperature': 0.5}
    changes |= {'scaling.name': 'mup', 'scaling.base_width': 8}
    params, logits_BTV, x_BTD = logits_and_parts(changes)
    x, w = np.float64(x_BTD), np.float64(params['readout'])
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    w /= np.linalg.norm(w, axis=0)
    np.testing.assert_allclose(logits_BTV, x @ w / 0.5, rtol=1e-4, atol=1e-5)


def test_frozen_rows_have_no_state_and_no_decay():
    config = checked_config({'model.readout': 'random', 'optim.weight_decay': 1.0})
    described, hyper = tiny_learner(config).description, make_hyper(config)
    state = jax.eval_shape(build_optimizer(config, described, hyper).init, described.shapes)
    paths = [path for path in named_leaves(state) if 'readout' in path or 'embedding' in path]
    assert len(paths) == 2 and all('embedding' in path for path in paths)  # both moments
    rule = config.decay.row
    peaks = peak_lrs(hyper)
    shares = decay_shares(described, rule, hyper, dict.fromkeys(peaks, 1.0), peaks)
    assert shares['readout'] == 0 < shares['embedding']


@pytest.mark.full
def test_step_changes_all_but_frozen_rows():
    config = checked_config({'model.readout': 'random', 'optim.weight_decay': 1.0})
    before = initial_state(config)
    after, _ = train_step(config)(before, tiny_batch(), make_hyper(config))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before.params, after.params)
    assert {path for path, has_moved in named_leaves(moved).items() if not has_moved} == {'readout'}


@pytest.mark.parametrize('name', [name for name, row in READOUTS.items() if row.is_frozen])
@pytest.mark.parametrize(
    'changes, words',
    [
        ({'model.tie_embeddings': True}, 'choose model.readout=cosines'),
        ({'scaling.zero_init': 'readout'}, 'but these start at 0'),
        (
            {'model.reparam': 'sigma', 'reparam.roles': 'hidden+readout'},
            r'model.reparam=sigma maps the readout \(reparam.roles=hidden\+readout',
        ),
    ],
)
def test_conflicts_with_frozen_rows_are_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        checked_config({'model.readout': name} | changes)
