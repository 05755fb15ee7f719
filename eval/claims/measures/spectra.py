"""Singular values of the matrices of models in training."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from eval.claims.measures.starts import BOS, replace_row
from eval.coordinates import resize_recipe
from lm.config.recipe import Recipe
from lm.model.parameters import Description
from lm.training.state import Hyper, Learner, State, build_learner, init_state, make_hyper
from lm.training.step import Batch, make_train_step, optimizer_step
from modules.optim import BatchFunctions
from modules.params import as_matrices, named_leaves
from modules.reparam.base import Reparam
from modules.scaling import DECAY_RULES
from modules.scaling.decay import decay_row
from modules.spectrum import largest_singular_value

VOCAB, ROWS, LENGTH, SEEDS = 64, 4, 32, 5
MULTIPLIER, CHOICES = 5, 4  # of the text: CHOICES tokens may follow a token, all as likely
CHEAP = {'model.scan_layers': True, 'kernels.attention': 'reference'}  # to compile

# sigmaReparam
SIGMA = CHEAP | {'model.reparam': 'sigma', 'model.n_layers': 2, 'optim.lr': 3e-3}
SIGMA_WIDTH, SIGMA_STEPS = 32, 60
# Power iterations per step; without any, the vector of the initial matrix stays.
ITERATIONS = {'': 1, '_of_stale_vectors': 0, '_of_100_iterations': 100}

# Weight decay. The rules with the powers of the width that their decay grows with.
RULES = {'constant': 0.0, 'sqrt_width': 0.5, 'linear_width': 1.0}
WIDTHS, RATIOS = (32, 64, 128), (0.25, 1.0, 4.0)  # ratios of rate over decay, over DECAYED's
LR, DECAY_STEPS, DECAY_TIMES = 0.02, 40, 3  # a step takes 1 / DECAY_STEPS off at WIDTHS[0]
DECAYED = CHEAP | {
    'model.n_layers': 1,
    'scaling.name': 'mup',
    'scaling.base_width': WIDTHS[0],
    'optim.lr': LR,
    'optim.weight_decay': 1 / (LR * DECAY_STEPS),
}


def draw_text(key: jax.Array) -> Batch:
    """Draws ROWS of a Markov chain: token t is followed by MULTIPLIER t plus one of CHOICES."""
    first_key, rest_key = jax.random.split(key)
    first_B = jax.random.randint(first_key, (ROWS,), 0, VOCAB - 1)
    steps_TB = jax.random.randint(rest_key, (LENGTH, ROWS), 0, CHOICES)

    def follow(token_B, step_B):
        return (MULTIPLIER * token_B + step_B) % (VOCAB - 1), token_B

    last_B, before_TB = jax.lax.scan(follow, first_B, steps_TB)
    tokens_BT = 1 + jnp.concatenate([before_TB, last_B[None]]).T  # BOS is 0
    return {'tokens': tokens_BT, 'segments': jnp.ones_like(tokens_BT)}


def hidden_matrices(params: Any, specs: Any) -> dict[str, jax.Array]:
    """Returns the hidden matrices [..., I, O] of a parameter tree, by name."""
    kinds = named_leaves(specs)
    return {
        name: as_matrices(kinds[name], x)
        for name, x in named_leaves(params).items()
        if kinds[name].role == 'hidden'
    }


@measure(
    *(
        f'{which}_norm_over_gamma{case}'
        for case in ITERATIONS
        for which in ('mean', 'largest', 'least')
    )
)
def reparametrised_norms() -> Iterator[Estimate]:
    """Yields the largest singular values of used matrices under sigmaReparam over their gammas.

    W_used = gamma W / sigma(W), with sigma from one power iteration a step (arXiv:2303.06296):
    mean, largest and least over all hidden matrices and the steps of a short training, over SEEDS.
    Then with the broken iteration whose vectors are never stored, and with 100 iterations a step,
    after which sigma is nearly exact.
    """
    ratios_CSN = sigma_over_gamma(
        resize_recipe(lab.read_recipe(SIGMA), 'width', SIGMA_WIDTH), SIGMA_STEPS
    )
    for ratios_SN in ratios_CSN:
        yield from (
            mean_over_seeds(reduce(ratios_SN, 1), 'log') for reduce in (np.mean, np.max, np.min)
        )


def with_iterations(reparam: Reparam, count: jax.Array) -> Reparam:
    """Returns the reparametrisation with several power iterations per step, or without any.

    Args:
      reparam: with one iteration.
      count: their number, which may be a tracer. With 0 the vectors keep their initial values.
    """

    def apply(stored, state, train):
        def iterate(_, state):
            return reparam.apply(jax.lax.stop_gradient(stored), state, train)[1]

        state = jax.lax.fori_loop(1, count, iterate, state)
        used, next_state = reparam.apply(stored, state, train)
        return used, jax.tree.map(lambda x, y: jnp.where(count > 0, x, y), next_state, state)

    return reparam._replace(apply=apply)


def sigma_over_gamma(recipe: Recipe, steps: int, seeds: Sequence[int] = range(SEEDS)) -> np.ndarray:
    """Returns the ratios of used matrices by a full decomposition, [C, S, N].

    The C cases are those of ITERATIONS.

    Args:
      recipe: model and training.
      steps: number of steps; every step after the first has its ratios.
      seeds: S seeds.
    """
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    hyper = make_hyper(recipe)

    def compute_ratios(description: Description, state: State) -> jax.Array:
        used, _ = description.reparam.apply(state.params, state.reparam, True)
        stored = named_leaves(state.params)
        matrices = hidden_matrices(used, description.used_specs)
        sigmas = {n: jnp.linalg.svd(x, compute_uv=False)[..., 0] for n, x in matrices.items()}
        return jnp.stack([jnp.ravel(x / stored[f'{n}/gain']) for n, x in sigmas.items()])

    def run_case(case):
        count, seed = case
        reparam = with_iterations(learner.description.reparam, count)
        description = dataclasses.replace(learner.description, reparam=reparam)
        train_step = make_train_step(dataclasses.replace(learner, description=description))
        start_key, text_key = jax.random.split(jax.random.key(seed))

        def update(state, number):
            state, _ = train_step(state, draw_text(jax.random.fold_in(text_key, number)), hyper)
            return state, compute_ratios(description, state)

        _, ratios = jax.lax.scan(update, init_state(learner, hyper, start_key), jnp.arange(steps))
        return jnp.ravel(ratios)

    counts_C = jnp.array([*ITERATIONS.values()])
    cases = jnp.repeat(counts_C, len(seeds)), jnp.tile(jnp.array(seeds), len(counts_C))
    return lab.map_seeds(run_case, cases).reshape(len(counts_C), len(seeds), -1)


@measure(
    *(f'slope_over_width_of_{rule}' for rule in RULES),
    'slope_over_rate_over_decay',
    'slope_over_width_of_sqrt_width_for_noise',
    'slope_over_rate_over_decay_for_noise',
)
def decayed_norms() -> Iterator[np.ndarray]:
    """Yields slopes of the log singular value in steady state, by rule of weight decay.

    The value is the largest singular value of each hidden matrix after DECAY_TIMES the decay time,
    mean of the logs over matrices. Slopes are over log width, with Adam's rate falling as 1 / width
    (`mup`) and decay by rule; and at one width over log rate / decay at a constant product.
    Expected from s ~ sqrt(rate / decay) width^0.75 (arXiv:2510.15262): 1/4 with `constant`, 0 with
    `sqrt_width`, -1/4 with `linear_width`; and 1/2. For noise: with gradients that are independent
    normal numbers, for which s ~ sqrt(rate / decay) width^0.5, as the matrices are random: -1/4
    with `sqrt_width`, and 1/2. Over SEEDS.
    """
    yield from decay_slopes(list(RULES))
    yield from decay_slopes(['sqrt_width'], is_noise=True)


def decay_slopes(rules: Sequence[str], is_noise: bool = False) -> Iterator[np.ndarray]:
    """Yields the slope over log width for each rule of decay, and that over log rate / decay.

    Args:
      rules: some of RULES.
      is_noise: whether gradients are random, as in `mean_logs`.
    """
    base_CS = mean_logs(WIDTHS[0], [('constant', ratio) for ratio in RATIOS], is_noise)
    wider = [mean_logs(width, [(rule, 1.0) for rule in rules], is_noise) for width in WIDTHS[1:]]
    for i in range(len(rules)):  # they are the same at the base's width
        logs_WS = [base_CS[RATIOS.index(1.0)], *(logs_CS[i] for logs_CS in wider)]
        yield np.polyfit(np.log(WIDTHS), np.stack(logs_WS), 1)[0]
    yield np.polyfit(np.log(RATIOS), base_CS, 1)[0]


def mean_logs(
    width: int,
    cases: Sequence[tuple[str, float]],
    is_noise: bool = False,
    seeds: Sequence[int] = range(SEEDS),
) -> np.ndarray:
    """Returns the mean log singular value of each case and seed, [C, S].

    All cases run in one program: the rule is a traced index.

    Args:
      width: width of the model.
      cases: (rule, ratio of rate over decay) pairs.
      is_noise: whether independent normal numbers replace the gradients.
      seeds: S seeds.
    """
    recipe = resize_recipe(lab.read_recipe(DECAYED), 'width', width)
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    width_factor, rules = width / WIDTHS[0], list(RULES)

    def run_case(rule, root, steps, seed):
        train_step = make_train_step(with_rule(learner, rule))
        hyper = make_hyper(recipe)
        hyper['optim.lr'] *= root
        hyper['optim.weight_decay'] /= root
        start_key, text_key = jax.random.split(jax.random.key(seed))

        def update(number, state):
            key = jax.random.fold_in(text_key, number)
            if is_noise:
                return follow_noise(with_rule(learner, rule), state, hyper, key)
            return train_step(state, draw_text(key), hyper)[0]

        state = jax.lax.fori_loop(0, steps, update, init_state(learner, hyper, start_key))
        matrices = hidden_matrices(state.params, learner.description.specs)
        return jnp.mean(jnp.log(jnp.stack([largest_singular_value(x) for x in matrices.values()])))

    compiled, logs = jax.jit(run_case), []
    for rule, ratio in cases:
        steps = round(DECAY_TIMES * DECAY_STEPS * width_factor ** (1 - RULES[rule]))
        by_seed = [compiled(rules.index(rule), ratio**0.5, steps, seed) for seed in seeds]
        logs.append([float(x) for x in by_seed])
    return np.array(logs)


def follow_noise(learner: Learner, state: State, hyper: Hyper, key: jax.Array) -> State:
    """Returns the state after a step of the optimizer on a gradient of normal numbers.

    Args:
      learner: names the optimizer.
      state: the state before the step.
      hyper: traced options.
      key: of the numbers.
    """
    grads = optax.tree.random_like(key, state.params)
    unread: Any = [None] * len(BatchFunctions._fields)  # AdamW reads the gradient alone
    means, functions = {'objective': jnp.zeros(())}, BatchFunctions(*unread)
    return optimizer_step(learner, state, hyper, grads, means, functions)[0]


def with_rule(learner: Learner, number: jax.Array) -> Learner:
    """Returns a learner with the decay rule of this index in RULES, which may be a tracer."""

    @decay_row()
    def selected_rule(decay):
        return jnp.stack([jnp.float32(DECAY_RULES[name](decay)) for name in RULES])[number]

    recipe = replace_row(learner.recipe, 'decay', selected_rule)
    return dataclasses.replace(learner, recipe=recipe)
