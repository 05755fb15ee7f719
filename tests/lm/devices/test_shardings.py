"""Equivalence: the described state and the state that a run starts with."""

import jax
import pytest

from lm.devices.shardings import state_layout, weights_layout
from lm.training.state import init_state, make_hyper
from tests.helpers import checked_config, tiny_learner


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'model.norm': 'batchnorm', 'model.qk_norm': 'none', 'optim.average': 'ema'},
        {'model.reparam': 'sigma+lora', 'optim.name': 'shampoo', 'model.scan_layers': True},
    ],
)
def test_described_shapes_equal_first_state(changes):
    learner = tiny_learner(checked_config(changes))

    def first_state():
        return init_state(learner, make_hyper(learner.recipe), jax.random.key(0))

    state, described = jax.eval_shape(first_state), state_layout(learner)[0]
    assert jax.tree.structure(described) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(described), jax.tree.leaves(state), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    weights, specs = weights_layout(learner)
    assert weights == described.replace(step=None, opt_state=None)
    assert jax.tree.structure(specs) == jax.tree.structure(weights)
