"""State of norms between steps. Equivalence: microbatches on eight devices = one after the other on
one, remat on = off. Property: padding, evaluation and a skipped step change nothing.
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
    'warmup': 1,  # ends after the first microbatch
    'window': 2,
    'removal_start': 3,  # removes the norms of the first MLP within the second step
    'removal_gap': 2,
}


def config(name, **changes):
    options = {f'norm.{n}': v for n, v in OPTIONS.items() if n in declared_options(NORMS[name])}
    return tiny_config(BASE | {'model.norm': name} | options | changes)


def batch(seed=0):
    return packed_batch(seed, rows=ROWS)


@functools.cache
def build_step_on_eight(name):
    """Returns (state, batch) -> (state, metrics), with the rows cut over eight devices."""
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
    """A state whose statistics differ from the initial ones, of numpy arrays."""
    return build_step_on_eight(name)(initial_state(config(name)), batch())[0]


@functools.cache
def after_two_steps(name):
    """Returns (state, metrics) of the second step, on another batch."""
    return build_step_on_eight(name)(after_one_step(name), batch(1))


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def is_different(a, b):
    same = jax.tree.map(np.array_equal, a, b)
    return not all(jax.tree.leaves(same))


def step_sequentially(name):
    """Returns (statistics, loss) of the second step, by the model alone: one microbatch, then the
    other.
    """
    model, data_config = tiny_model(config(name)), config(name).data
    total = np.sum(target_weights(batch(1), BOS))

    def loss(backward, norm_stats, params, part):
        packed = part['segments'][:, :-1]
        logits, collections = model.apply(
            {'params': params, **norm_stats, **backward},
            part['tokens'][:, :-1],
            packed if data_config.mask_documents else None,
            packed > 0,
            mutable=(STATS, AUXILIARY),
        )
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, part['tokens'][:, 1:])
        return jnp.sum(ce * target_weights(part, BOS)) / total, collections[STATS]

    update = jax.jit(jax.value_and_grad(loss, has_aux=True))
    start, losses = after_one_step(name), []
    stats = dict(start.stats)
    for offset in (0, 1):
        part = {name: rows[offset::2] for name, rows in batch(1).items()}
        backward = {name: stats.pop(name) for name in (BACKWARD_STATS,) if name in stats}
        (value, norm_stats), backward = update(backward, stats, start.params, part)
        stats, losses = {STATS: norm_stats} | backward, [*losses, value]
    return stats, sum(losses)


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_microbatches_update_norms_in_order(name):
    """Catches statistics of a device's local rows, of only the last microbatch, or of all at once,
    and backward statistics summed like gradients.
    """
    state, metrics = after_two_steps(name)
    assert is_different(state.stats, after_one_step(name).stats)
    assert_trees_close(
        (state.stats, metrics['loss']), step_sequentially(name), rtol=1e-4, atol=1e-5
    )


REMAT = [
    ('unified', 'dots'),
    *((n, 'full') for n in ('batchnorm', 'ghost_batchnorm', 'layernorm_removal', 'unified')),
]


@pytest.mark.full
@pytest.mark.parametrize(('name', 'remat'), REMAT)
def test_remat_does_not_update_twice(name, remat):
    """The same loss, parameters and statistics. Catches an update in the backward pass."""
    remat_config = config(name, **{'model.remat': remat})
    step = train_step(remat_config)(after_one_step(name), batch(1), make_hyper(remat_config))
    assert_trees_close(jax.device_get(step), after_two_steps(name), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_padding_does_not_change_statistics(name):
    """Other tokens in the padding: the same loss and statistics, to the bit.

    Backward statistics of PowerNorm and Unified Normalization cover all tokens.
    """
    padded = batch(1)
    is_padding = padded['segments'] == 0
    assert is_padding.any()
    changed = padded | {'tokens': np.where(is_padding, 7, padded['tokens'])}
    state, metrics = build_step_on_eight(name)(after_one_step(name), changed)
    expected, expected_metrics = after_two_steps(name)
    assert_same_bits(state.stats[STATS], expected.stats[STATS])
    assert metrics['loss'] == expected_metrics['loss']


@pytest.mark.full
@pytest.mark.parametrize('name', STATEFUL)
def test_evaluation_rows_are_independent(name):
    """Sums over rows read together equal sums over rows read separately.

    Catches batch statistics in evaluation, and running statistics that are not read.
    """
    learner, hyper = tiny_learner(config(name)), make_hyper(config(name))
    weights, whole = after_one_step(name).weights, batch(2)
    step = jax.jit(make_eval_step(learner))

    def ce(weights, rows):
        return step(weights, jax.tree.map(lambda v: np.where(rows, v, 0), whole), hyper)['ce']

    first = np.arange(ROWS)[:, None] < 5
    together = ce(weights, first | True)
    np.testing.assert_allclose(ce(weights, first) + ce(weights, ~first), together, rtol=1e-5)
    if 'removal' not in name:  # those are still plain norms
        changed_weights = weights.replace(stats=jax.tree.map(lambda v: v + 1, weights.stats))
        assert abs(ce(changed_weights, first | True) - together) > 1e-3


@pytest.mark.full
def test_skipped_step_keeps_statistics():
    """Neither pass updates the statistics, although both ran, with NaN."""
    name = 'unified'
    skipping = config(name, **{'train.on_divergence': 'skip_step'})
    step, hyper = train_step(skipping), make_hyper(skipping)
    start = after_one_step(name)
    good_state, metrics = step(start, batch(1), hyper)
    assert metrics['skipped'] == 0
    assert_trees_close(jax.device_get(good_state.stats), after_two_steps(name)[0].stats, 1e-4, 1e-5)
    readout = start.params['readout'].copy()
    readout[0, 0] = np.nan
    bad = start.replace(params=start.params | {'readout': readout})
    after, metrics = step(bad, batch(1), hyper)
    assert metrics['skipped'] == 1
    assert_same_bits(jax.device_get(after.stats), start.stats)
