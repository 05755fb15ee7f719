"""Contract: what every named choice promises, one row each.

The rows are made from the tables themselves: what is new there is tested here once it has a name. A
row compiles one program: two runs of other hyperparameters, mapped together, their batch cut over
eight devices. Alone, on one device and without `jit`, a run must give the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.check import NAMES, check
from lm.config import flatten
from lm.mesh import batch_sharding, make_mesh, replicated
from lm.state import hyper_from, init_state
from lm.step import make_train_step
from tests.helpers import (
    BOS,
    FAST,
    assert_trees_close,
    stack,
    tiny_config,
    tiny_model,
    with_needs,
)

BASE = {
    'model.d_model': 8,
    'model.n_layers': 1,
    'model.d_ff': 16,
    'model.position': 'none',
    'kernels.implementation': 'reference',
    'data.batch_size': 8,
    'optim.lr': 0.03,
}
TAKEN = flatten(tiny_config(BASE))
ELSEWHERE = ('kernels.run_axis',)  # no part of a step: tests/contracts/test_runs.py
# The same layers at other sites: some norms without state and some with.
SAME_LAYERS = {
    'model.embedding_norm': ('layernorm', 'batchnorm'),
    'model.final_norm': ('layernorm', 'batchnorm'),
    'model.qk_norm': ('layernorm', 'rmsnorm', 'seednorm', 'ghost_batchnorm', 'unified'),
}
ROWS = [{}] + [
    with_needs({path: n})
    for path, names in NAMES.items()
    for n in SAME_LAYERS.get(path, names)
    if n != TAKEN[path] and path not in ELSEWHERE
]
# Relative and absolute. In bfloat16 one program rounds where another does not, by up to Adam's eps
# in a gradient, which is then a good part of the learning rate in a parameter.
TOLERANCE = {'float32': (1e-4, 1e-5), 'bfloat16': (3e-2, 1e-2)}


def batch_of_four_tokens():
    tokens = np.tile(np.int32([3, 9, 4, 12]), (8, 3))[:, :9]
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


@pytest.mark.parametrize('changes', ROWS, ids=lambda row: ''.join(f'{k}={row[k]}' for k in row))
def test_every_choice(changes):
    config = tiny_config(BASE | changes)
    check(config)
    model, batch = tiny_model(config), batch_of_four_tokens()
    step = make_train_step(config, model, BOS)
    hyper = hyper_from(config)
    hypers = [hyper, hyper.replace(lr=hyper.lr / 2, weight_decay=hyper.weight_decay * 4)]

    with jax.disable_jit():
        start = jax.device_get(init_state(config, model, hyper, jax.random.key(0)))
        alone = start
        for _ in range(2):
            alone, alone_metrics = step(alone, batch, hypers[1])

    traces = []

    def counted(*arguments):
        traces.append(1)
        return step(*arguments)

    mesh = make_mesh(config.mesh)
    everywhere, rows = replicated(mesh), batch_sharding(mesh)
    mapped = jax.jit(
        jax.vmap(counted, in_axes=(0, None, 0)),
        in_shardings=(everywhere, rows, everywhere),
        out_shardings=everywhere,
        compiler_options=FAST,
    )
    state = jax.device_put(stack([start, start]), everywhere)
    hypers, losses = stack(hypers), []
    for i in range(8):
        state, metrics = mapped(state, batch, hypers)
        losses.append(np.asarray(metrics['loss']))
        if i == 1:
            second = jax.tree.map(lambda leaf: leaf[1], (state, metrics))

    assert_trees_close(second, (alone, alone_metrics), *TOLERANCE[config.model.dtype])
    assert len(traces) == 1
    for leaf, first in zip(jax.tree.leaves(state), jax.tree.leaves(start), strict=True):
        assert leaf.dtype == first.dtype in (jnp.float32, jnp.int32)
    assert np.isfinite(losses).all()
    assert np.all(losses[-1] < losses[0] - 0.1)
    assert np.all(losses[-1][0] < losses[-1][1])  # the larger learning rate, further
