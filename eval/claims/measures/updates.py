"""Singular values of the updates of Muon and AuON for gradients with a known spectrum."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import measure
from modules.optim.classic import sgd
from modules.optim.muon import auon, muon
from modules.params import ParamSpec

SPECS = {'w': ParamSpec('hidden', ('embed', 'mlp'), ('embed',))}
MOMENTUM, GAMMA = 0.95, 1.5  # as published
OPTIMIZERS = {
    # Its first sum is the gradient: 1 / (1 - MOMENTUM) times the average that the others have.
    'momentum': sgd(SPECS, momentum=MOMENTUM, nesterov=True),
    'auon': auon(SPECS, momentum=MOMENTUM, auon_gamma=GAMMA),
    'auon_of_paper': auon(SPECS, momentum=MOMENTUM, auon_gamma=1.0, auon_form='paper'),
    'muon': muon(SPECS, momentum=MOMENTUM, muon_scale='none'),
}
SHAPES, STEPS, SEEDS = ((128, 128), (64, 256)), 20, 10
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


@measure(
    *(f'share_of_singular_values_of_muon_in_band_of_{kind}_gradients' for kind in GRADIENTS),
    *(f'condition_number_of_{name}_over_that_of_momentum' for name in ('auon', 'muon')),
    'relative_difference_of_auon_from_momentum',
    'spectral_norm_of_auon_of_paper',
    'largest_singular_value_of_muon',
    trains=False,
)
def singular_values_of_updates() -> Iterator[np.ndarray]:
    """Yields numbers of the singular values of AuON's and Muon's updates of momentum.

    Over SEEDS, the worst of SHAPES. AuON (arXiv:2509.24320): the relative difference of its update
    from Nesterov's momentum; its condition number over momentum's, for ill-conditioned
    gradients; the spectral norm in the form of the paper. Muon
    (https://kellerjordan.github.io/posts/muon/): the same ratio; the share of its singular values
    in BAND, and the largest.
    """
    numbers_SCN = np.array(
        [[measure_updates(shape, seed) for shape in SHAPES] for seed in range(SEEDS)], float
    )
    for i in range(numbers_SCN.shape[-1]):
        worst = np.min if i < len(GRADIENTS) else np.max  # shares come first
        yield worst(numbers_SCN[..., i], 1)


def measure_updates(shape: tuple[int, int], seed: int) -> list[float]:
    """Returns the numbers of `singular_values_of_updates` for one shape and seed."""
    shares, differences, largest, norms = [], [], [], []
    for draw in GRADIENTS.values():
        grads = draw(shape, seed)
        updates = {name: last_update(name, grads) for name in OPTIMIZERS}
        average = (1 - MOMENTUM) * updates['momentum']
        gap = np.linalg.norm(updates['auon'] - average)
        differences.append(gap / np.linalg.norm(average))
        values = {name: np.linalg.svd(update, compute_uv=False) for name, update in updates.items()}
        norms.append(values['auon_of_paper'][0])
        largest.append(values['muon'][0])
        is_within = (values['muon'] >= BAND[0]) & (values['muon'] <= BAND[1])
        shares.append(is_within.mean())
    condition = {
        name: singular_values[0] / singular_values[-1] for name, singular_values in values.items()
    }  # of the last kind
    ratios = [condition[name] / condition['momentum'] for name in ('auon', 'muon')]
    return [*shares, *ratios, max(differences), max(norms), max(largest)]
