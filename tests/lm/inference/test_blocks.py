"""Blocks as functions. Equivalence: a model without a block, and a model that never had it."""

import functools

import jax
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.inference.blocks import iterate_blocks, make_sequence, select_blocks
from lm.model.pattern import block_groups
from lm.training.state import make_hyper
from lm.training.step import compute_activations
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    packed_batch,
    tiny_learner,
)

LAYERS = 3
CASES = {  # one group, two groups, two streams, unscanned, what depends on depth
    'pre': {},
    'mix': {'model.placement': 'mix', 'model.mix_fraction': 0.34},
    'resi_dual': {'model.placement': 'resi_dual', 'model.reparam': 'weight_norm'},
    'unscanned': {'model.scan_layers': False},
    'layernorm_scaling': {'model.placement': 'layernorm_scaling'},
}
# Further changes in the same model with one block fewer.
FEWER = {'mix': {'model.mix_fraction': 0.5}}
BATCH = packed_batch(rows=2)


@functools.cache
def build_case(case):
    """Returns (learner, variables)."""
    config = checked_config({'model.n_layers': LAYERS} | CASES[case])
    learner, weights = tiny_learner(config), initial_state(config).weights
    return learner, learner.variables(weights)


@functools.cache
def program(learner):
    """Returns a jitted (variables, active) -> logits; None applies all blocks."""
    tokens, segments = BATCH['tokens'][:, :-1], BATCH['segments'][:, :-1]

    def run(variables, active=None):
        variables = variables if active is None else select_blocks(learner, variables, active)
        return learner.model.apply(variables, tokens, segments, segments > 0)

    return jax.jit(run)


def remove_block(params, recipe, removed):
    """Returns the parameters of all blocks but one, by group."""
    remaining, start = dict(params), 0
    for group in block_groups(recipe):
        rows = [i for i in range(group.count) if start + i != removed]
        remaining[group.name] = jax.tree.map(
            lambda leaf, rows=rows: leaf[np.array(rows)], params[group.name]
        )
        start += group.count
    return remaining


@pytest.mark.full
@pytest.mark.parametrize('case', [case for case in CASES if case != 'layernorm_scaling'])
def test_removed_block_equals_smaller_model(case):
    """Removes each block of the last group, in the same program."""
    learner, variables = build_case(case)
    recipe, run = learner.recipe, program(learner)
    smaller = update_recipe(recipe, {'model.n_layers': LAYERS - 1} | FEWER.get(case, {}))
    whole = run(variables, np.ones(LAYERS, bool))
    np.testing.assert_allclose(whole, run(variables), rtol=1e-5, atol=1e-6)
    for removed in range(LAYERS - block_groups(recipe)[-1].count, LAYERS):
        params = remove_block(variables['params'], recipe, removed)
        expected = program(tiny_learner(smaller))(variables | {'params': params})
        logits = run(variables, np.arange(LAYERS) != removed)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        assert np.abs(logits - whole).max() > 0.01


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_blocks_in_sequence_equal_model(case):
    """Each block's output is the activation after it, and blocks are numbered as in the model."""
    learner, variables = build_case(case)
    hyper = make_hyper(learner.recipe)
    _, filled = compute_activations(learner, variables, BATCH, ('activations',), hyper)
    activations = filled['activations']
    streams = learner.recipe.placement.row.split(activations['embedding'])
    sequence = make_sequence(learner, BATCH['segments'][:, :-1])
    after_mlp = np.concatenate(
        [activations[group.name]['after_mlp'] for group in block_groups(learner.recipe)]
    )
    for block, expected in zip(iterate_blocks(learner, variables), after_mlp, strict=True):
        streams = block.apply(block.variables, block.number, streams, sequence)
        assert_trees_close(jax.tree.leaves(streams)[0], expected, rtol=1e-5, atol=1e-5)
