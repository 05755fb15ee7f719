"""Equivalence: the state that is described from its parts, and the one that a run begins with."""

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
def test_described_shapes_are_those_of_the_first_state(changes):
    learner = tiny_learner(checked_config(changes))

    def first_state():
        return init_state(learner, make_hyper(learner.recipe), jax.random.key(0))

    made, described = jax.eval_shape(first_state), state_layout(learner)[0]
    assert jax.tree.structure(described) == jax.tree.structure(made)
    both = zip(jax.tree.leaves(described), jax.tree.leaves(made), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in both)
    weights, specs = weights_layout(learner)
    assert weights == described.replace(step=None, opt_state=None)
    assert jax.tree.structure(specs) == jax.tree.structure(weights)
