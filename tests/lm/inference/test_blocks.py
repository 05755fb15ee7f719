"""Blocks one by one. Equivalence: without a block, and a model that never had it."""

import functools

import jax
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.inference.blocks import iterate_blocks, make_sequence, select_blocks
from lm.model.transformer import block_groups
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
# What else is changed in the same model of one block fewer.
FEWER = {'mix': {'model.mix_fraction': 0.5}}
BATCH = packed_batch(rows=2)


@functools.cache
def seen(case):
    """(learner, variables)."""
    config = checked_config({'model.n_layers': LAYERS} | CASES[case])
    learner, weights = tiny_learner(config), initial_state(config).weights
    return learner, learner.variables(weights)


@functools.cache
def program(learner):
    """(variables, kept) -> logits; None: the model as it is."""
    tokens, segments = BATCH['tokens'][:, :-1], BATCH['segments'][:, :-1]

    def run(variables, kept=None):
        variables = variables if kept is None else select_blocks(learner, variables, kept)
        return learner.model.apply(variables, tokens, segments, segments > 0)

    return jax.jit(run)


def gathered(params, recipe, removed):
    """The parameters of all blocks but one, by group."""
    found, start = dict(params), 0
    for group in block_groups(recipe):
        rows = [i for i in range(group.count) if start + i != removed]
        found[group.name] = jax.tree.map(
            lambda leaf, rows=rows: leaf[np.array(rows)], params[group.name]
        )
        start += group.count
    return found


@pytest.mark.full
@pytest.mark.parametrize('case', [case for case in CASES if case != 'layernorm_scaling'])
def test_without_a_block_the_model_is_one_that_never_had_it(case):
    """Each block of the last group, all in the same program."""
    learner, variables = seen(case)
    recipe, run = learner.recipe, program(learner)
    smaller = update_recipe(recipe, {'model.n_layers': LAYERS - 1} | FEWER.get(case, {}))
    whole = run(variables, np.ones(LAYERS, bool))
    np.testing.assert_allclose(whole, run(variables), rtol=1e-5, atol=1e-6)
    for removed in range(LAYERS - block_groups(recipe)[-1].count, LAYERS):
        params = gathered(variables['params'], recipe, removed)
        wanted = program(tiny_learner(smaller))(variables | {'params': params})
        found = run(variables, np.arange(LAYERS) != removed)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert np.abs(found - whole).max() > 0.01


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_blocks_in_turn_are_the_model(case):
    """What each leaves is the activation behind it; the numbers of blocks are theirs."""
    learner, variables = seen(case)
    hyper = make_hyper(learner.recipe)
    _, filled = compute_activations(learner, variables, BATCH, ('activations',), hyper)
    found = filled['activations']
    streams = learner.recipe.placement.row.split(found['embedding'])
    sequence = make_sequence(learner, BATCH['segments'][:, :-1])
    wanted = np.concatenate(
        [found[group.name]['after_mlp'] for group in block_groups(learner.recipe)]
    )
    for one, behind in zip(iterate_blocks(learner, variables), wanted, strict=True):
        streams = one.apply(one.variables, one.number, streams, sequence)
        assert_trees_close(jax.tree.leaves(streams)[0], behind, rtol=1e-5, atol=1e-5)
