"""Singular values of the updates of Muon and AuON for gradients with a known spectrum."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.optim.classic import sgd
from modules.optim.muon import auon, muon, newton_schulz
from modules.params import ParamSpec

SPECS = {'w': ParamSpec('hidden', ('embed', 'mlp'), ('embed',))}
MOMENTUM, GAMMA, PAPER_GAMMA, MUON_EPS = 0.95, 1.5, 1.0, 1e-7  # as published
OPTIMIZERS = {
    # Its first sum is the gradient: 1 / (1 - MOMENTUM) times the average that the others have.
    'momentum': sgd(SPECS, momentum=MOMENTUM, nesterov=True),
    'auon': auon(SPECS, momentum=MOMENTUM, auon_gamma=GAMMA),
    'auon_of_paper': auon(SPECS, momentum=MOMENTUM, auon_gamma=PAPER_GAMMA, auon_form='paper'),
    'muon': muon(SPECS, momentum=MOMENTUM, eps=MUON_EPS, muon_scale='none'),
}
ITERATIONS = {  # steps and polynomial, in place of Muon's 5 steps of the quintic
    'muon_of_2_steps': (2, 'quintic'),
    '5_convergent_steps': (5, 'convergent'),
    '12_convergent_steps': (12, 'convergent'),
}
SHAPES, STEPS, SEEDS = ((128, 128), (64, 256)), 20, 10
SMALL = 16  # side of a block of these, in which cosh is further from 1
CONDITION = 1e3  # of gradients that are ill-conditioned
BAND = 0.5, 1.5  # of singular values, as the code of Muon says


def random_gradients(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Returns gradients [STEPS, I, O] of independent normal entries."""
    return np.random.default_rng(seed).standard_normal((STEPS, *shape))


def ill_conditioned_gradients(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Returns gradients [STEPS, I, O] with constant singular vectors.

    Their singular values are evenly spaced in logarithm down to 1 / CONDITION, times 1 + 0.1 z
    with z ~ N(0, 1).
    """
    rng, rank = np.random.default_rng(seed), min(shape)
    left_IR, right_OR = (np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in shape)
    values = np.geomspace(1, 1 / CONDITION, rank)
    values_T1R = values * (1 + 0.1 * rng.standard_normal((STEPS, 1, rank)))
    return (left_IR * values_T1R) @ right_OR.T


GRADIENTS = {'random': random_gradients, 'ill_conditioned': ill_conditioned_gradients}


def last_update(name: str, grads: np.ndarray) -> np.ndarray:
    """Returns the direction of an optimizer after gradients [STEPS, I, O], in float64."""
    with jax.enable_x64(True):  # singular values over six orders of magnitude
        return np.asarray(_last_update(name, jnp.asarray(grads)), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _last_update(name: str, grads: jax.Array) -> jax.Array:
    optimizer, params = OPTIMIZERS[name], {'w': jnp.zeros(grads.shape[1:])}

    def step(state, grad):
        direction, state = optimizer.update({'w': grad}, state, params)
        return state, direction['w']

    return jax.lax.scan(step, optimizer.init(params), grads)[1][-1]


def iterate_average(name: str, average: np.ndarray) -> np.ndarray:
    """Returns a matrix [I, O] after the steps of a row of ITERATIONS, in float64."""
    steps, polynomial = ITERATIONS[name]
    with jax.enable_x64(True):
        return np.asarray(_newton_schulz(jnp.asarray(average), steps, MUON_EPS, polynomial))


_newton_schulz = jax.jit(newton_schulz, static_argnames=('steps', 'polynomial'))


def auon_directions(average: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns AuON's directions for a matrix [I, O], in the form of the code and of the paper.

    axis: of the norms that the matrix is divided by; None, all of the matrix, as published.
    """
    unit = average / np.linalg.norm(average, axis=axis, keepdims=True)
    code, paper = (np.sqrt(np.mean(np.cosh(g * unit) ** 2)) for g in (GAMMA, PAPER_GAMMA))
    factor = np.sqrt(max(1.0, average.shape[1] / average.shape[0]))
    return average / code, factor * unit / paper


VALUES = (
    *(f'share_of_singular_values_of_muon_in_band_of_{kind}_gradients' for kind in GRADIENTS),
    *(f'condition_number_of_{name}_over_that_of_momentum' for name in ('auon', 'muon')),
    'relative_difference_of_auon_from_momentum',
    'spectral_norm_of_auon_of_paper',
    'largest_singular_value_of_muon',
    'condition_number_of_muon_of_2_steps_over_that_of_momentum',
    'spectral_norm_of_auon_by_rows_of_paper',
    'relative_difference_of_small_auon_from_momentum',
    'relative_difference_of_auon_by_rows_from_momentum',
    'share_of_singular_values_of_12_convergent_steps_in_band_of_ill_conditioned_gradients',
    'share_of_singular_values_of_5_convergent_steps_in_band_of_random_gradients',
)


@measure(*VALUES, trains=False)
def singular_values_of_updates() -> Iterator[Estimate]:
    """Yields numbers of the singular values of AuON's and Muon's updates of momentum.

    Over SEEDS, the worst of SHAPES. AuON (arXiv:2509.24320): the relative difference of its update
    from Nesterov's momentum; its condition number over momentum's, for ill-conditioned
    gradients; the spectral norm in the form of the paper. Muon
    (https://kellerjordan.github.io/posts/muon/): the same ratio; the share of its singular values
    in BAND, and the largest.

    Controls and broken methods: the ratio of condition numbers after two of Muon's five steps; for
    AuON, the norm of each row in place of that of the matrix, in both forms, and between them
    blocks of SMALL x SMALL, from which cosh is 1 + GAMMA^2 / (2 SMALL^2); for Muon, the polynomial
    that converges to 1, which needs 12 steps for ill-conditioned gradients and is too slow in 5 for
    random ones.
    """
    cases = [(kind, shape) for kind in GRADIENTS for shape in SHAPES]
    rows = [[measure_updates(*case, seed) for case in cases] for seed in range(SEEDS)]
    for name in VALUES:
        worst, scale = (min, 'logit') if name.startswith('share') else (max, 'log')
        yield mean_over_seeds(
            [worst(numbers[name] for numbers in row if name in numbers) for row in rows], scale
        )


def measure_updates(kind: str, shape: tuple[int, int], seed: int) -> dict[str, float]:
    """Returns the numbers of `singular_values_of_updates` for one kind of gradients, by name.

    Args:
      kind: row of GRADIENTS.
      shape: of the matrices.
      seed: of the gradients.
    """
    grads = GRADIENTS[kind](shape, seed)
    small_grads = grads[:, :SMALL, :SMALL]
    updates = {name: last_update(name, grads) for name in OPTIMIZERS}
    average = (1 - MOMENTUM) * updates['momentum']
    small_average = (1 - MOMENTUM) * last_update('momentum', small_grads)
    updates |= {name: iterate_average(name, average) for name in ITERATIONS}
    by_rows, updates['auon_by_rows_of_paper'] = auon_directions(average, axis=1)
    values = {name: np.linalg.svd(update, compute_uv=False) for name, update in updates.items()}
    shares = {
        f'share_of_singular_values_of_{name}_in_band_of_{kind}_gradients': np.mean(
            (values[name] >= BAND[0]) & (values[name] <= BAND[1])
        )
        for name in ('muon', '5_convergent_steps', '12_convergent_steps')
    }
    condition = {name: value[0] / value[-1] for name, value in values.items()}
    ratios = {
        f'condition_number_of_{name}_over_that_of_momentum': condition[name] / condition['momentum']
        for name in ('auon', 'muon', 'muon_of_2_steps')
        if kind == 'ill_conditioned'
    }
    differences = {
        f'relative_difference_of_{name}_from_momentum': np.linalg.norm(update - momentum)
        / np.linalg.norm(momentum)
        for name, update, momentum in (
            ('auon', updates['auon'], average),
            ('small_auon', last_update('auon', small_grads), small_average),
            ('auon_by_rows', by_rows, average),
        )
    }
    return {
        **shares,
        **ratios,
        **differences,
        'spectral_norm_of_auon_of_paper': values['auon_of_paper'][0],
        'spectral_norm_of_auon_by_rows_of_paper': values['auon_by_rows_of_paper'][0],
        'largest_singular_value_of_muon': values['muon'][0],
    }
