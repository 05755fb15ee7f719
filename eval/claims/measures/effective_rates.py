"""Relative changes of the weights of a small model per step, over its training."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from eval.claims.measures.ghosts import BOS, VOCAB, draw_text
from lm.training.state import Learner, State, init_state
from lm.training.step import make_train_step
from modules.params import as_matrices, named_leaves

REPARAMS = {'free': 'none', 'projected': 'normalize_and_project'}
STEPS, SEEDS = 300, 5
EARLY, LATE = slice(50, 100), slice(250, 300)  # steps, all behind the warm-up
CONSTANT, HALVED = [1.0] * STEPS, [1.0] * (STEPS // 2) + [0.5] * (STEPS // 2)  # rates, relative
CHANGES = {
    'model.n_layers': 2,
    'model.scan_layers': True,
    'optim.lr': 0.01,
    'optim.weight_decay': 0.0,
    'train.steps': 100_000,  # the rate stays at its peak
}


class StartAndStep(NamedTuple):
    """Compiled functions of a model.

    init: key -> state. step: (state, key, successors, factor of the rate) -> (next state, sizes).
    """

    init: Callable[[Any], State]
    step: Callable[..., Any]


def measure_step(learner: Learner, before: State, after: State) -> jax.Array:
    """Returns the means of |dW| / |W| and of |W| over the hidden matrices of each layer.

    Norms are Frobenius norms.

    Args:
      learner: describes the parameters.
      before: state before a step.
      after: state after it.
    """
    specs = named_leaves(learner.description.specs)
    weights_before, weights_after = (named_leaves(state.params) for state in (before, after))
    changes, norms = [], []
    for path, spec in specs.items():
        if spec.role == 'hidden':
            w, w_after = (as_matrices(spec, x) for x in (weights_before[path], weights_after[path]))
            change, norm = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (w_after - w, w))
            changes.append(jnp.ravel(change / norm))
            norms.append(jnp.ravel(norm))
    return jnp.stack([jnp.mean(jnp.concatenate(sizes)) for sizes in (changes, norms)])


@measure(
    *(
        f'late_over_early_{quantity}_of_{name}_weights'
        for name in REPARAMS
        for quantity in ('change', 'norm')
    ),
    'late_over_early_change_of_free_weights_at_half_the_rate',
)
def relative_changes_over_training() -> Iterator[Estimate]:
    """Yields the ratios of |dW| / |W| and of |W| in late steps to early steps.

    For free and for projected weights (arXiv:2407.01800), at a single learning rate. The last value
    is the first ratio for free weights whose learning rate is halved after half of the steps. Adam
    without weight decay on random chains of tokens; means over the steps of LATE and of EARLY, over
    SEEDS.
    """
    programs = {name: build_programs(reparam) for name, reparam in REPARAMS.items()}
    for name in REPARAMS:
        yield from late_over_early(programs[name], CONSTANT)
    yield late_over_early(programs['free'], HALVED)[0]


def late_over_early(programs: StartAndStep, factors: Sequence[float]) -> list[Estimate]:
    """Returns the ratios of |dW| / |W| and of |W| in late steps to early steps.

    Args:
      programs: of the model.
      factors: of the learning rate, for each step.
    """
    sizes_SNQ = np.array([_train(programs, factors, seed) for seed in range(SEEDS)])
    early_SQ, late_SQ = (sizes_SNQ[:, steps].mean(1) for steps in (EARLY, LATE))
    return [mean_over_seeds(ratios_S, 'log') for ratios_S in (late_SQ / early_SQ).T]


def build_programs(reparam: str) -> StartAndStep:
    """Returns the programs of a model with a reparametrisation."""
    learner, hyper = lab.build_small_learner(CHANGES | {'model.reparam': reparam}, VOCAB, BOS)
    train_step = make_train_step(learner)

    def step(state, key, successors_V, factor):
        at_rate = hyper | {'optim.lr': factor * hyper['optim.lr']}
        next_state, _ = train_step(state, draw_text(key, successors_V), at_rate)
        return next_state, measure_step(learner, state, next_state)

    return StartAndStep(jax.jit(lambda key: init_state(learner, hyper, key)), jax.jit(step))


def _train(programs: StartAndStep, factors: Sequence[float], seed: int) -> np.ndarray:
    weight_key, chain_key, text_key = jax.random.split(jax.random.key(seed), 3)
    successors_V = 1 + jax.random.permutation(chain_key, VOCAB) % (VOCAB - 1)
    state, sizes = programs.init(weight_key), []
    for key, factor in zip(jax.random.split(text_key, STEPS), factors, strict=True):
        state, sizes_Q = programs.step(state, key, successors_V, factor)
        sizes.append(sizes_Q)
    return np.array(sizes)
