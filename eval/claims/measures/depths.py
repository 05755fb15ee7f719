"""The residual stream over depth in untrained models."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.lab import measure
from eval.claims.measures.starts import BOS, LENGTH, ROWS, VOCAB
from lm.inference.probes import observe
from lm.model.block import AFTER_MLP, EMBEDDING
from lm.training.state import init_state

DEPTHS, SEEDS = (4, 12, 36), 5
BEHIND = np.array(DEPTHS) - 1  # places of these blocks
GROWN = 4.0  # as training may make hidden matrices
CHANGES = {
    'model.scan_layers': True,
    'kernels.attention': 'reference',  # cheap to compile
    'scaling.embedding_std': 1.0,
}
PLACEMENTS = ('pre', 'layernorm_scaling', 'peri')


@measure(
    *(f'slope_of_{name}' for name in PLACEMENTS),
    *(f'added_by_grown_of_{name}' for name in ('pre', 'peri')),
    *(f'slope_of_size_of_{name}' for name in ('depth_mup', 'standard')),
    trains=False,
)
def stream_over_depth() -> Iterator[np.ndarray]:
    """Yields slopes over depth: of the blocks' contributions to the stream, and of its size.

    slope_of_PLACEMENT: slope of the log mean square that is added up to blocks DEPTHS, for random
    tokens; 1 if each block adds the same (arXiv:2502.02732), less if norms are divided by the root
    of their depth (arXiv:2502.05795). added_by_grown: the mean square added in the deepest model
    with hidden matrices GROWN times as large, over the mean square without growth. slope_of_size:
    slope of the log root mean square of the stream after the last block of models of DEPTHS, if
    blocks add F(x), or F(x) / sqrt(L) (`depth_mup`, arXiv:2310.02244). Over SEEDS.
    """
    deep = {name: stream_squares(DEPTHS[-1], {'model.placement': name}) for name in PLACEMENTS}
    yield from (log_slope(added_squares(x_SL)[:, BEHIND]) for x_SL in deep.values())
    for name in ('pre', 'peri'):
        grown_SL = stream_squares(DEPTHS[-1], {'model.placement': name}, GROWN)
        yield added_squares(grown_SL)[:, -1] / added_squares(deep[name])[:, -1]
    scaled = {'scaling.name': 'depth_mup', 'scaling.base_width': 64, 'scaling.base_depth': 1}
    last_SD = np.stack([stream_squares(depth, scaled)[:, -1] for depth in DEPTHS], 1)
    yield log_slope(last_SD**0.5)
    yield log_slope(deep['pre'][:, 1:][:, BEHIND] ** 0.5)


def added_squares(squares_SL: np.ndarray) -> np.ndarray:
    """Returns the mean square after each block minus the mean square of the embeddings.

    The embeddings come first.
    """
    return squares_SL[:, 1:] - squares_SL[:, :1]


def log_slope(values_SD: np.ndarray) -> np.ndarray:
    """Returns the slope of log value over log DEPTHS for each seed."""
    return np.polyfit(np.log(DEPTHS), np.log(values_SD).T, 1)[0]


def stream_squares(
    depth: int, changes: dict, factor: float = 1.0, seeds: Sequence[int] = range(SEEDS)
) -> np.ndarray:
    """Returns the mean square of the embeddings and of the stream after each block, [S, 1 + L].

    Args:
      depth: L, number of blocks.
      changes: changes of the config, by path.
      factor: multiplies all hidden matrices.
      seeds: S seeds of initial weights and text.
    """
    learner, hyper = lab.build_small_learner(
        CHANGES | {'model.n_layers': depth} | changes, VOCAB, BOS
    )
    specs = learner.description.specs

    def run_seed(seed):
        key, text_key = jax.random.split(jax.random.key(seed))
        weights = init_state(learner, hyper, key).weights
        params = jax.tree.map(
            lambda spec, w: w * (factor if spec.role == 'hidden' else 1.0), specs, weights.params
        )
        tokens_BT = jax.random.randint(text_key, (ROWS, LENGTH), 1, VOCAB)
        _, activations = observe(learner, weights.replace(params=params), tokens_BT)
        behind_L = jnp.mean(activations[AFTER_MLP] ** 2, (1, 2, 3))
        return jnp.concatenate([jnp.mean(activations[EMBEDDING] ** 2)[None], behind_L])

    return np.asarray(lab.map_seeds(run_seed, jnp.array(seeds)), np.float64)
