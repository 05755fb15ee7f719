"""Optimizers by parameter, and the size of their updates, in single steps."""

import jax
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.training.state import make_hyper
from modules.params import named_leaves, root_mean_square
from tests.helpers import (
    initial_state,
    packed_batch,
    tiny_config,
    tiny_learner,
    tiny_raw,
    train_step,
)

SIGN_UPDATES = {
    'optim.name': 'lion',
    'optim.others': 'lion',
    'optim.eps': None,
    'optim.lr': 0.25,
    'optim.weight_decay': 0.0,
    'optim.schedule': 'constant',
    'optim.warmup_steps': 0,
}


def first_step(changes):
    """Returns ({path: update of one step}, its metrics)."""
    config = tiny_config(SIGN_UPDATES | changes)
    before = initial_state(config)
    after, metrics = train_step(config)(before, packed_batch(), make_hyper(config))
    updates = jax.tree.map(lambda a, b: np.asarray(a - b), after.params, before.params)
    return named_leaves(updates), metrics


def first_update(changes):
    """Returns ({path: update of one step}, {path: role})."""
    updates, _ = first_step(changes)
    specs = named_leaves(tiny_learner(tiny_config(SIGN_UPDATES | changes)).description.specs)
    return updates, {path: spec.role for path, spec in specs.items()}


@pytest.mark.full
def test_hidden_and_others_use_their_optimizers():
    """Signs for one, a gradient below the clipping norm for the other. Catches exchanged roles."""
    added, roles = first_update({'optim.others': 'sgd'})
    for path, change in added.items():
        is_sign = np.isin(np.round(np.abs(change), 6), (0, 0.25)).all()
        assert is_sign == (roles[path] == 'hidden'), path


@pytest.mark.full
def test_others_use_their_learning_rate():
    """Their weight decay uses it too. Catches a rate that all share."""
    added, roles = first_update({'optim.others_lr': 0.125})
    for path, change in added.items():
        largest = np.abs(change).max()
        np.testing.assert_allclose(largest, 0.25 if roles[path] == 'hidden' else 0.125, rtol=1e-5)
    decayed, _ = first_update({'optim.others_lr': 0.125, 'optim.weight_decay': 0.5})
    config = tiny_config(SIGN_UPDATES)
    start = named_leaves(initial_state(config).params)
    for path, change in decayed.items():
        lr = 0.25 if roles[path] == 'hidden' else 0.125
        expected = 0 if roles[path] == 'vector' else -lr * 0.5 * start[path]
        np.testing.assert_allclose(change - added[path], expected, atol=1e-5, err_msg=path)


def test_equal_optimizers_share_one_state():
    """The state is not split in two, so that older checkpoints can be read."""
    state = initial_state(tiny_config({'optim.name': 'adamw', 'optim.others': 'adamw'}))
    assert not any('others' in path for path in named_leaves(state.opt_state))


def test_unset_numbers_are_not_traced():
    """Numbers share a program; None has another.

    A second optimizer may have another default, so an unset b2 is resolved for each.
    """
    sweep = {'optim.match_rms': (None, 0.1, 0.2)}
    groups = group_by_program(expand_sweep(tiny_raw(SIGN_UPDATES), sweep))
    assert [len(group) for group in groups] == [1, 2]
    config = tiny_config({'optim.name': 'lion'})
    assert config.optim.b1 == 0.9 and config.optim.b2 is None
    assert 'optim.b2' not in make_hyper(config)
    assert 'optim.b2' in make_hyper(update_recipe(config, {'optim.b2': 0.5}))


@pytest.mark.full
def test_cautious_decay_in_a_step():
    """Signs of the direction and of the weight agree where it decays, and the metrics record the
    share; without the option there is no such metric. Catches the sign of the change.
    """
    changes = {'optim.weight_decay': 0.5, 'optim.cautious_decay': True}
    (plain, metrics), (change, cautious_metrics) = (first_step(c) for c in ({}, changes))
    specs = named_leaves(tiny_learner(tiny_config(SIGN_UPDATES)).description.specs)
    decays = []
    for path, weight in named_leaves(initial_state(tiny_config(SIGN_UPDATES)).params).items():
        if specs[path].role != 'vector':
            agrees = (np.sign(plain[path]) * np.sign(weight) <= 0) & (weight != 0)
            expected = -0.25 * 0.5 * np.where(agrees, weight, 0)
            np.testing.assert_allclose(change[path] - plain[path], expected, atol=1e-5)
            decays.append(agrees.ravel())
    share = np.mean(np.concatenate(decays))
    assert 0.2 < share < 0.8
    np.testing.assert_allclose(cautious_metrics['decayed_share'], share, atol=1e-3)
    assert 'decayed_share' not in metrics


@pytest.mark.full
def test_hyperball_step_from_a_config():
    """The published step of hidden matrices and of the readout, from the directions of a step
    without it. Catches roles that a config does not pass on, and a norm of all layers.
    """
    untied = {'model.tie_embeddings': False}
    changes = untied | {
        'model.reparam': 'normalize_and_project',
        'reparam.roles': 'hidden+readout',
        'optim.match_norm': 0.5,
        'optim.match_norm_roles': 'hidden+readout',
    }
    (plain, _), (change, _) = (first_step(c) for c in (untied, changes))
    config = tiny_config(SIGN_UPDATES | untied)
    specs = named_leaves(tiny_learner(config).description.specs)
    for path, weight in named_leaves(initial_state(config).params).items():
        expected = plain[path]
        if specs[path].role in ('hidden', 'readout'):
            size = root_mean_square(specs[path], weight)
            # Signs have a root mean square of 1.
            moved = weight + 0.5 * size * plain[path]
            expected = moved * size / root_mean_square(specs[path], moved) - weight
        np.testing.assert_allclose(change[path], expected, atol=1e-5, err_msg=path)
