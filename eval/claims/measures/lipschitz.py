"""Lipschitz constants: a bound by power iteration against exact ones, and attention over scale."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

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
KERNELS = {'kernels': kernels_for('cpu', 'reference'), 'dtype': jnp.float32}


@measure(
    *(f'share_{where}_of_{name}' for name in BLOCKS for where in ('at_points', 'in_boxes')),
    'largest_share',
    trains=False,
)
def local_lipschitz() -> Iterator[float | list[float]]:
    """Returns what `jacobian_gains` finds over the exact local Lipschitz constant of MLPs.

    The networks are one or two blocks of ReLU, one behind the other, of WIDTH inputs, not constant.
    share_at_points: |J u| after ROUNDS over the largest singular value at the same point, on
    average over those of POINTS at which it is not 0. share_in_boxes: the largest |J u| of the
    points over the largest singular value of all regions of the box around them in which the
    network is linear, each found by a linear program. largest_share: of all of them.
    """
    largest = 0.0
    for hidden in BLOCKS.values():
        at_points, in_boxes = zip(*(_lipschitz_shares(hidden, seed) for seed in SEEDS), strict=True)
        yield [x.mean() for x in at_points]
        yield in_boxes
        largest = max(largest, *in_boxes, *(float(x.max()) for x in at_points))
    yield largest


def _lipschitz_shares(hidden: tuple[int, ...], seed: int) -> tuple[np.ndarray, float]:
    rng, in_box = np.random.default_rng(seed), 0.0
    while in_box == 0:  # a network that is constant in its box is drawn anew
        blocks = [_draw_block(rng, units) for units in hidden]
        matrices = [given for _, given in blocks]
        centre = rng.standard_normal(WIDTH)
        regions = _region_jacobians(matrices, np.eye(WIDTH), np.zeros(WIDTH), [], centre)
        in_box = max(_spectral_norm(jacobian) for jacobian in regions)
    x = jnp.float32(centre + rng.uniform(-REACH, REACH, (POINTS, WIDTH)))
    start = jnp.float32(rng.standard_normal(x.shape))
    found = np.float64(_measure_stretches(hidden, [params for params, _ in blocks], x, start))
    at_points = np.array([_spectral_norm(_jacobian_at(matrices, one)) for one in np.float64(x)])
    is_steep = at_points > 0  # elsewhere nothing is stretched, and there is no share
    return found[is_steep] / at_points[is_steep], float(found.max() / in_box)


def _build_mlp(units: int) -> Any:
    return MLPS['dense'](units, ACTIVATIONS['relu'], bias=True, **KERNELS)


def _draw_block(rng: np.random.Generator, units: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Parameters of an MLP, all of them normal, and its matrices and biases by name."""
    described = jax.eval_shape(_build_mlp(units).init, jax.random.key(0), jnp.zeros((1, 1, WIDTH)))
    shapes, _ = split_boxes(described['params'])
    deviation = {'up': 1 / np.sqrt(WIDTH), 'down': 1 / np.sqrt(units)}
    params = {
        name: np.float32(rng.standard_normal(of.shape) * deviation.get(name, 0.5))
        for name, of in sorted(shapes.items())
    }
    return params, {name: np.float64(value) for name, value in params.items()}


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
    """Yields the derivative in each region of the box, behind blocks that make x slope + offset of
    what `walls`, each (a, b) with a x + b > 0, leave of it.
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
            ([*held, (sign * a, sign * b)], [*on, sign > 0])
            for held, on in regions
            for sign in (1, -1)
        ]
        regions = [(held, on) for held, on in sides if _is_feasible(held, centre)]
    for held, on in regions:
        down = block['down'] * np.array(on)[:, None]
        yield from _region_jacobians(
            rest, slopes @ down, offsets @ down + block['down_bias'], held, centre
        )


def _is_feasible(walls: list[tuple[np.ndarray, float]], centre: np.ndarray) -> bool:
    """Whether some point of the box is on the right side of all walls, INSIDE away from each."""
    a, b = np.stack([a for a, _ in walls]), np.array([b for _, b in walls])
    lengths = np.linalg.norm(a, axis=1)
    box = [(x - REACH, x + REACH) for x in centre]
    away = [0.0] * WIDTH + [-1.0]  # the distance from the nearest wall, which is made large
    found = linprog(away, np.column_stack([-a, lengths]), b, bounds=[*box, (None, 1.0)])
    return bool(found.success and found.x[-1] > WALL_MARGIN)


@measure('slope_of_products', 'slope_of_tied_distances', trains=False)
def lipschitz_attention() -> Iterator[np.ndarray]:
    """Returns the slope of log |Jacobian| over log size of the input, of attention by products, and
    by distances with the matrix of queries as that of keys.

    One causal head as wide as the model, Gaussian matrices. At each of SCALES the largest singular
    value of the Jacobian is that over rows of three kinds: the last token at 0 and the others
    normal, from which arXiv:2006.04710 proves that products have no constant; all keys as far from
    the last query as its own key is; and ROWS of normal tokens whose sizes differ by up to LEAST.
    """
    for attention, is_tied in (('softmax', False), ('l2', True)):
        logs_CS = np.log([_largest_norms(attention, is_tied, seed) for seed in SEEDS]).T
        yield np.polyfit(np.log(SCALES), logs_CS, 1)[0]


def _largest_norms(attention: str, is_tied: bool, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    shape = D_MODEL, D_MODEL
    drawn = {name: rng.standard_normal(shape) / np.sqrt(D_MODEL) for name in 'qkvo'}
    q, k = drawn['q'], drawn['q' if is_tied else 'k']
    params = {
        'query': q.reshape(D_MODEL, 1, D_MODEL),
        'key': k.reshape(D_MODEL, 1, D_MODEL),
        'value': drawn['v'].reshape(D_MODEL, 1, D_MODEL),
        'out': drawn['o'].reshape(1, D_MODEL, D_MODEL),
    }
    found = []
    for scale in SCALES:
        normal = rng.standard_normal((1, TOKENS, D_MODEL))
        at_zero = normal * np.where(np.arange(TOKENS) < TOKENS - 1, 1.0, 0.0)[:, None]
        sizes = MIN_SIZE ** rng.uniform(0, 1, (ROWS, TOKENS, 1))
        rows = [
            at_zero,
            sizes * rng.standard_normal((ROWS, TOKENS, D_MODEL)),
            _equidistant(rng, q, k),
        ]
        x = jnp.float32(scale * np.concatenate(rows))
        start = jnp.float32(rng.standard_normal(x.shape))
        found.append(float(_measure_attention_stretches(attention, params, x, start).max()))
    return found


def _equidistant(rng: np.random.Generator, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """A row [1, T, D] whose keys x k are all as far from the last query x q as its own key is."""
    last = rng.standard_normal(D_MODEL)
    around = rng.standard_normal((TOKENS - 1, D_MODEL))
    around *= np.linalg.norm(last @ q - last @ k) / np.linalg.norm(around, axis=1, keepdims=True)
    others = np.linalg.solve(k.T, (last @ q + around).T).T
    return np.concatenate([others, last[None]])[None]


@functools.partial(jax.jit, static_argnums=0)
def _measure_attention_stretches(attention, params, x_BTD, start_BTD):
    module = ATTENTIONS[attention](
        n_heads=1,
        n_kv_heads=1,
        head_dim=D_MODEL,
        qk_norm=lambda name, over: lambda y: y,
        rotate=POSITIONS['none'].rotate,
        **KERNELS,
    )
    params = jax.tree.map(jnp.float32, params)

    def mix(x_BTD):
        return module.apply({'params': params}, x_BTD, whole_rows(TOKENS))

    return jacobian_gains(mix, x_BTD, start_BTD, ATTENTION_ROUNDS)
