"""Lipschitz constants: power iteration against exact constants, and attention over scale."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.curvature import jacobian_gains
from modules.kernels import kernels_for
from modules.mlp import MLPS
from modules.params import split_boxes
from modules.positions import POSITIONS
from modules.sequence import whole_rows

SEEDS = range(10, 60)  # 0 to 9, looked at first, left both claims undecided
ROUNDS = 10  # as the suite `sharpness` has them by default
WIDTH, REACH, POINTS = 3, 0.5, 1024  # of inputs; half of a box's edge; points drawn in it
BLOCKS = {'one_block': (8,), 'two_blocks': (6, 6)}  # hidden units of each
WALL_MARGIN = 1e-7  # how far a region reaches from its walls at least

D_MODEL, TOKENS, ROWS = 8, 8, 64
SCALES = (4.0, 8.0, 16.0, 32.0, 64.0)
MIN_SIZE = 1e-2  # of the scale, that tokens of drawn rows have
ATTENTION_ROUNDS = 100  # rounds: rows of large norms have singular values close to each other
KERNELS: dict[str, Any] = {'kernels': kernels_for('cpu', 'reference'), 'dtype': jnp.float32}


@measure(
    *(f'share_{scope}_of_{name}' for name in BLOCKS for scope in ('at_points', 'in_boxes')),
    'largest_share',
    trains=False,
)
def local_lipschitz() -> Iterator[float | Estimate]:
    """Yields the gains found by `jacobian_gains` over the exact local Lipschitz constants of MLPs.

    The networks are one or two consecutive ReLU blocks with WIDTH inputs, and not constant.
    share_at_points: |J u| after ROUNDS over the largest singular value at the same point, mean over
    POINTS with a singular value other than 0. share_in_boxes: the largest |J u| of the points over
    the largest singular value of all linear regions of the network in their box; linear programs
    find the regions. largest_share: the maximum of all shares.
    """
    largest = 0.0
    for hidden in BLOCKS.values():
        at_points, in_boxes = zip(*(_lipschitz_shares(hidden, seed) for seed in SEEDS), strict=True)
        yield mean_over_seeds([shares.mean() for shares in at_points], 'logit')
        yield mean_over_seeds(in_boxes, 'logit')
        largest = max(largest, *in_boxes, *(float(shares.max()) for shares in at_points))
    yield largest


def _lipschitz_shares(hidden: tuple[int, ...], seed: int) -> tuple[np.ndarray, float]:
    rng, in_box = np.random.default_rng(seed), 0.0
    while in_box == 0:  # a network that is constant in its box is drawn anew
        blocks = [_draw_block(rng, units) for units in hidden]
        matrices = [matrices_of_block for _, matrices_of_block in blocks]
        centre = rng.standard_normal(WIDTH)
        regions = _region_jacobians(matrices, np.eye(WIDTH), np.zeros(WIDTH), [], centre)
        in_box = max(_spectral_norm(jacobian) for jacobian in regions)
    x = jnp.float32(centre + rng.uniform(-REACH, REACH, (POINTS, WIDTH)))
    start = jnp.float32(rng.standard_normal(x.shape))
    params = [params_of_block for params_of_block, _ in blocks]
    gains = np.asarray(_measure_stretches(hidden, params, x, start), np.float64)
    at_points = np.array(
        [_spectral_norm(_jacobian_at(matrices, point)) for point in np.asarray(x, np.float64)]
    )
    is_steep = at_points > 0  # elsewhere nothing is stretched, and there is no share
    return gains[is_steep] / at_points[is_steep], float(gains.max() / in_box)


def _build_mlp(units: int) -> Any:
    return MLPS['dense'](units, ACTIVATIONS['relu'], bias=True, **KERNELS)


def _draw_block(rng: np.random.Generator, units: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Draws the parameters of an MLP from normal distributions; returns them in float32 and
    float64.
    """
    boxed = jax.eval_shape(_build_mlp(units).init, jax.random.key(0), jnp.zeros((1, 1, WIDTH)))
    shapes, _ = split_boxes(boxed['params'])
    deviation = {'up': 1 / np.sqrt(WIDTH), 'down': 1 / np.sqrt(units)}
    params = {
        name: np.asarray(rng.standard_normal(leaf.shape) * deviation.get(name, 0.5), np.float32)
        for name, leaf in sorted(shapes.items())
    }
    return params, {name: np.asarray(value, np.float64) for name, value in params.items()}


@functools.partial(jax.jit, static_argnums=0)
def _measure_stretches(hidden, params_per_block, x_MI, start_MI):
    def network(x_MI):
        for units, params in zip(hidden, params_per_block, strict=True):
            x_MI = _build_mlp(units).apply({'params': params}, x_MI[:, None])[:, 0]
        return x_MI

    return jacobian_gains(network, x_MI, start_MI, ROUNDS)


def _spectral_norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _jacobian_at(blocks: list[dict], x: np.ndarray) -> np.ndarray:
    jacobian = np.eye(WIDTH)
    for block in blocks:
        before = x @ block['up'] + block['up_bias']
        is_on = before > 0
        jacobian = jacobian @ (block['up'] * is_on) @ block['down']
        x = (before * is_on) @ block['down'] + block['down_bias']
    return jacobian


def _region_jacobians(blocks, slope, offset, walls, centre) -> Iterator[np.ndarray]:
    """Yields the Jacobian in each linear region of the box.

    So far the blocks map x to x slope + offset, in the part of the box with a x + b > 0 for each
    wall (a, b); `blocks` are still to come.
    """
    if not blocks:
        yield slope
        return
    block, *rest = blocks
    slopes = slope @ block['up']
    offsets = offset @ block['up'] + block['up_bias']
    regions = [(walls, [])]
    for a, b in zip(slopes.T, offsets, strict=True):
        sides = [
            ([*halfspaces, (sign * a, sign * b)], [*is_on, sign > 0])
            for halfspaces, is_on in regions
            for sign in (1, -1)
        ]
        regions = [
            (halfspaces, is_on) for halfspaces, is_on in sides if _is_feasible(halfspaces, centre)
        ]
    for halfspaces, is_on in regions:
        down = block['down'] * np.array(is_on)[:, None]
        yield from _region_jacobians(
            rest, slopes @ down, offsets @ down + block['down_bias'], halfspaces, centre
        )


def _is_feasible(walls: list[tuple[np.ndarray, float]], centre: np.ndarray) -> bool:
    """Whether some point of the box is inside all walls, at least WALL_MARGIN away from each."""
    a, b = np.stack([a for a, _ in walls]), np.array([b for _, b in walls])
    lengths = np.linalg.norm(a, axis=1)
    box = [(x - REACH, x + REACH) for x in centre]
    objective = [0.0] * WIDTH + [-1.0]  # the distance from the nearest wall, which is made large
    solution = linprog(objective, np.column_stack([-a, lengths]), b, bounds=[*box, (None, 1.0)])
    return bool(solution.success and solution.x[-1] > WALL_MARGIN)


@measure(
    *('slope_of_products', 'slope_of_tied_distances'),
    *('slope_of_untied_distances', 'slope_of_tied_distances_with_one_term_scaled'),
    trains=False,
)
def lipschitz_attention() -> Iterator[np.ndarray]:
    """Yields the slope of log |Jacobian| over log input size, for four kinds of attention.

    The kinds are products, distances with tied query and key matrices, distances with free
    matrices, and tied distances with sqrt(H) under the |k|^2 term alone, as in the code of
    arXiv:2504.12588. A causal head is as wide as the model, with Gaussian matrices. The largest
    singular value of the Jacobian is taken over rows of three kinds, each at all SCALES: the last
    token at 0 and the others normal, the example with which arXiv:2006.04710 proves that products
    have no constant; all keys at equal distances from the last query; and ROWS of normal tokens
    that differ in size by up to MIN_SIZE.
    """
    for attention, is_tied, options in (
        ('softmax', False, {}),
        ('l2', True, {}),
        ('l2', False, {}),
        ('l2', True, {'l2_scaled': 'key'}),
    ):
        module = _build_attention(attention, options)
        logs_CS = np.log([_largest_norms(module, is_tied, seed) for seed in SEEDS]).T
        yield np.polyfit(np.log(SCALES), logs_CS, 1)[0]


def _build_attention(name: str, options: dict[str, Any]) -> Any:
    return ATTENTIONS[name](
        n_heads=1,
        n_kv_heads=1,
        head_dim=D_MODEL,
        # A function stands for the module: no normalisation.
        qk_norm=lambda name, over: lambda y: y,  # ty: ignore[invalid-argument-type]
        rotate=POSITIONS['none'].rotate,
        **KERNELS,
        **options,
    )


def _largest_norms(module: Any, is_tied: bool, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    shape = D_MODEL, D_MODEL
    matrices = {name: rng.standard_normal(shape) / np.sqrt(D_MODEL) for name in 'qkvo'}
    q, k = matrices['q'], matrices['q' if is_tied else 'k']
    params = {
        'query': q.reshape(D_MODEL, 1, D_MODEL),
        'key': k.reshape(D_MODEL, 1, D_MODEL),
        'value': matrices['v'].reshape(D_MODEL, 1, D_MODEL),
        'out': matrices['o'].reshape(1, D_MODEL, D_MODEL),
    }
    normal_tokens = rng.standard_normal((1, TOKENS, D_MODEL))
    at_zero = normal_tokens * np.where(np.arange(TOKENS) < TOKENS - 1, 1.0, 0.0)[:, None]
    sizes = MIN_SIZE ** rng.uniform(0, 1, (ROWS, TOKENS, 1))
    rows = [
        at_zero,
        sizes * rng.standard_normal((ROWS, TOKENS, D_MODEL)),
        _equidistant(rng, q, k),
    ]
    # The same rows at all sizes, so that nothing but the size differs.
    x = np.concatenate(rows)
    start = jnp.float32(rng.standard_normal(x.shape))
    return [
        float(_measure_attention_stretches(module, params, jnp.float32(scale * x), start).max())
        for scale in SCALES
    ]


def _equidistant(rng: np.random.Generator, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns a row [1, T, D] with all keys x k at equal distances from the last query x q.

    Its root mean square is 1, as that of normal tokens.
    """
    last = rng.standard_normal(D_MODEL)
    offsets = rng.standard_normal((TOKENS - 1, D_MODEL))
    offsets *= np.linalg.norm(last @ q - last @ k) / np.linalg.norm(offsets, axis=1, keepdims=True)
    other_tokens = np.linalg.solve(k.T, (last @ q + offsets).T).T
    x_TD = np.concatenate([other_tokens, last[None]])
    return x_TD[None] / np.sqrt(np.mean(x_TD**2))


@functools.partial(jax.jit, static_argnums=0)
def _measure_attention_stretches(module, params, x_BTD, start_BTD):
    params = jax.tree.map(jnp.float32, params)

    def mix(x_BTD):
        return module.apply({'params': params}, x_BTD, whole_rows(TOKENS))

    return jacobian_gains(mix, x_BTD, start_BTD, ATTENTION_ROUNDS)
