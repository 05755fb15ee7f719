"""Relative changes of the weights of a small model per step, over its training."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.lab import measure
from eval.claims.measures.ghosts import BOS, VOCAB, draw_text
from lm.training.state import Learner, State, init_state
from lm.training.step import make_train_step
from modules.params import as_matrices, named_leaves

REPARAMS = {'free': 'none', 'projected': 'normalize_and_project'}
STEPS, SEEDS = 300, 5
EARLY, LATE = slice(50, 100), slice(250, 300)  # steps, all behind the warm-up
CHANGES = {
    'model.n_layers': 2,
    'model.scan_layers': True,
    'optim.lr': 0.01,
    'optim.weight_decay': 0.0,
    'train.steps': 100_000,  # the rate stays at its peak
}


def relative_change(learner: Learner, before: State, after: State) -> jax.Array:
    """Returns the mean of |dW| / |W|, Frobenius norms, over the hidden matrices of each layer.

    Args:
      learner: describes the parameters.
      before: state before a step.
      after: state after it.
    """
    specs = named_leaves(learner.description.specs)
    weights_before, weights_after = (named_leaves(state.params) for state in (before, after))
    changes = []
    for path, spec in specs.items():
        if spec.role == 'hidden':
            w, w_after = (as_matrices(spec, x) for x in (weights_before[path], weights_after[path]))
            norms = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (w_after - w, w))
            changes.append(jnp.ravel(jnp.divide(*norms)))
    return jnp.mean(jnp.concatenate(changes))


@measure(*(f'late_over_early_change_of_{name}_weights' for name in REPARAMS))
def relative_changes_over_training() -> Iterator[np.ndarray]:
    """Yields the ratio of |dW| / |W| in late steps to early steps, at a single learning rate.

    For free and for projected weights (arXiv:2407.01800). Adam without weight decay on random
    chains of tokens; means over the steps of LATE and of EARLY, over SEEDS.
    """
    for reparam in REPARAMS.values():
        init, step = build_programs(reparam)
        series_SN = np.array([_measure_changes(init, step, seed) for seed in range(SEEDS)])
        early_S, late_S = (series_SN[:, steps].mean(1) for steps in (EARLY, LATE))
        yield late_S / early_S


def build_programs(reparam: str) -> tuple[Callable[[Any], State], Callable[..., Any]]:
    """Returns init(key) -> state, and step(state, key, successors) -> (next state, relative
    change).
    """
    learner, hyper = lab.build_small_learner(CHANGES | {'model.reparam': reparam}, VOCAB, BOS)
    train_step = make_train_step(learner)

    def step(state, key, successors_V):
        next_state, _ = train_step(state, draw_text(key, successors_V), hyper)
        return next_state, relative_change(learner, state, next_state)

    return jax.jit(lambda key: init_state(learner, hyper, key)), jax.jit(step)


def _measure_changes(
    init: Callable[[Any], State], step: Callable[..., Any], seed: int
) -> list[float]:
    weight_key, chain_key, text_key = jax.random.split(jax.random.key(seed), 3)
    successors_V = 1 + jax.random.permutation(chain_key, VOCAB) % (VOCAB - 1)
    state, changes = init(weight_key), []
    for key in jax.random.split(text_key, STEPS):
        state, change = step(state, key, successors_V)
        changes.append(change)
    return [float(change) for change in changes]
