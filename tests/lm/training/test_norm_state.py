"""What norms carry from step to step. Equivalence: microbatches on eight devices = one after the
other on one, remat on = off. Property: padding, evaluation and a skipped step change nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.devices.mesh import batch_sharding, make_mesh, replicated_sharding
from lm.training.state import make_hyper
from lm.training.step import make_eval_step, make_train_step, target_weights
from modules.norms import NORMS
from modules.options import declared_options
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS
from tests.helpers import (
    BOS,
    assert_trees_close,
    initial_state,
    packed_batch,
    tiny_config,
    tiny_learner,
    tiny_model,
    train_step,
)

STATEFUL = sorted(name for name in NORMS if 'valid' in NORMS[name].__dataclass_fields__)
ROWS = 16
BASE = {
    'model.d_model': 8,
    'model.d_ff': 16,
    'model.position': 'none',
    'kernels.implementation': 'reference',
    'loss.z_loss': 0.0,
    'train.microbatches': 2,
}
OPTIONS = {  # for the norms that have them
    'ghost_batches': 2,
    'warmup': 1,  # past it after the first microbatch
    'window': 2,
    'removal_start': 3,  # the norms of the first MLP within the second step
    'removal_gap': 2,
}


def config(name, **changes):
    own = {f'norm.{n}': v for n, v in OPTIONS.items() if n in declared_options(NORMS[name])}
    return tiny_config(BASE | {'model.norm': name} | own | changes)


def batch(seed=0):
    return packed_batch(seed, rows=ROWS)


@functools.cache
def step_on_eight(name):
    """(state, batch) -> (state, metrics), the rows cut over eight devices."""
    learner, hyper = tiny_learner(config(name)), make_hyper(config(name))
    mesh = make_mesh(learner.recipe.mesh)
    assert mesh.devices.size == 8
    everywhere = replicated_sharding(mesh)
    step = jax.jit(
        make_train_step(learner),
        in_shardings=(everywhere, batch_sharding(mesh), everywhere),
        out_shardings=everywhere,
    )
    return lambda state, rows: jax.device_get(step(state, rows, hyper))


@functools.cache
def after_one_step(name):
    """A state whose statistics are not those of the start, of numpy arrays."""
    return step_on_eight(name)(initial_state(config(name)), batch())[0]


@functools.cache
def after_two_steps(name):
    """(state, metrics) of the second step, with another batch."""
    return step_on_eight(name)(after_one_step(name), batch(1))


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def differs(a, b):
    same = jax.tree.map(np.array_equal, a, b)
    return not all(jax.tree.leaves(same))


def in_turn(name):
    """(statistics, loss) of the second step from the model alone: a microbatch, then the other."""
    model, data = tiny_model(config(name)), config(name).data
    total = np.sum(target_weights(batch(1), BOS))

    def loss(backward, carried, params, part):
        read = part['segments'][:, :-1]
        logits, new = model.apply(
            {'params': params, **carried, **backward},
            part['tokens'][:, :-1],
            read if data.mask_documents else None,
            read > 0,
            mutable=(STATS, AUXILIARY),
        )
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, part['tokens'][:, 1:])
        return jnp.sum(ce * target_weights(part, BOS)) / total, new[STATS]

    update = jax.jit(jax.value_and_grad(loss, has_aux=True))
    start, losses = after_one_step(name), []
    stats = dict(start.stats)
    for first in (0, 1):
        part = {k: v[first::2] for k, v in batch(1).items()}
        backward = {k: stats.pop(k) for k in (BACKWARD_STATS,) if k in stats}
        (value, carried), backward = update(backward, stats, start.params, part)
        stats, losses = {STATS: carried} | backward, [*losses, value]
    return stats, sum(losses)


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_each_microbatch_is_one_update_in_order(name):
    """Catches statistics of a device's own rows, of the last microbatch alone, or of all at once;
    and those of the backward pass summed as if they were gradients.
    """
    found, metrics = after_two_steps(name)
    assert differs(found.stats, after_one_step(name).stats)
    assert_trees_close((found.stats, metrics['loss']), in_turn(name), rtol=1e-4, atol=1e-5)


REMAT = [
    ('unified', 'dots'),
    *((n, 'full') for n in ('batchnorm', 'ghost_batchnorm', 'layernorm_removal', 'unified')),
]


@pytest.mark.full
@pytest.mark.parametrize(('name', 'remat'), REMAT)
def test_computing_again_is_no_update(name, remat):
    """The same loss, parameters and statistics. Catches an update in the backward pass."""
    again = config(name, **{'model.remat': remat})
    found = train_step(again)(after_one_step(name), batch(1), make_hyper(again))
    assert_trees_close(jax.device_get(found), after_two_steps(name), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_padding_is_not_measured(name):
    """Other tokens where there is padding: the same loss and statistics, to the bit.

    Those of the backward pass of PowerNorm and Unified Normalization are over all tokens.
    """
    padded = batch(1)
    is_padding = padded['segments'] == 0
    assert is_padding.any()
    other = padded | {'tokens': np.where(is_padding, 7, padded['tokens'])}
    state, metrics = step_on_eight(name)(after_one_step(name), other)
    wanted, wanted_metrics = after_two_steps(name)
    assert_same_bits(state.stats[STATS], wanted.stats[STATS])
    assert metrics['loss'] == wanted_metrics['loss']


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_evaluation_reads_each_row_on_its_own(name):
    """Sums over rows that are read with others are those of the rows read without them.

    Catches a batch's own statistics in evaluation, and running ones that are not read at all.
    """
    learner, hyper = tiny_learner(config(name)), make_hyper(config(name))
    weights, whole = after_one_step(name).weights, batch(2)
    step = jax.jit(make_eval_step(learner))

    def ce(weights, rows):
        return step(weights, jax.tree.map(lambda v: np.where(rows, v, 0), whole), hyper)['ce']

    first = np.arange(ROWS)[:, None] < 5
    together = ce(weights, first | True)
    np.testing.assert_allclose(ce(weights, first) + ce(weights, ~first), together, rtol=1e-5)
    if 'removal' not in name:  # which are still the norms themselves
        others = weights.replace(stats=jax.tree.map(lambda v: v + 1, weights.stats))
        assert abs(ce(others, first | True) - together) > 1e-3


@pytest.mark.full
def test_a_skipped_step_measures_nothing():
    """Neither in the forward nor in the backward pass, though both were run, with NaN."""
    name = 'unified'
    skipping = config(name, **{'train.on_divergence': 'skip_step'})
    step, hyper = train_step(skipping), make_hyper(skipping)
    start = after_one_step(name)
    ok, metrics = step(start, batch(1), hyper)
    assert metrics['skipped'] == 0
    assert_trees_close(jax.device_get(ok.stats), after_two_steps(name)[0].stats, 1e-4, 1e-5)
    readout = start.params['readout'].copy()
    readout[0, 0] = np.nan
    bad = start.replace(params=start.params | {'readout': readout})
    kept, metrics = step(bad, batch(1), hyper)
    assert metrics['skipped'] == 1
    assert_same_bits(jax.device_get(kept.stats), start.stats)
