"""Untrained models: gradients over depth, sizes over width."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.estimates import Estimate
from eval.claims.lab import measure
from eval.coordinates import CHANGE, fit_slopes
from lm.training.state import init_state
from lm.training.step import token_sums
from modules.params import named_leaves

VOCAB, BOS, ROWS, LENGTH = 64, 0, 4, 32
DEPTHS, WIDTHS, SEEDS = (2, 4, 8, 16), (32, 64, 128, 256), 5


@measure('slope_of_pre_norm', 'slope_of_post_norm', trains=False)
def gradients_at_the_start() -> Iterator[np.ndarray]:
    """Yields the slope of log |gradient of the last block's MLP| over log depth, by placement.

    Expected: -1/2 in pre-norm, as the stream grows with the root of the depth, and 0 in post-norm
    (arXiv:2002.04745, theorem 1). Random tokens, initial weights as in configs/studies/small.py
    with embeddings of deviation 1, DEPTHS, over SEEDS.
    """
    for placement in ('pre', 'post'):
        logs_DS = np.log([_last_gradient_norms(placement, depth) for depth in DEPTHS])
        yield np.polyfit(np.log(DEPTHS), logs_DS, 1)[0]


def _last_gradient_norms(placement: str, depth: int) -> np.ndarray:
    changes = {'model.placement': placement, 'model.n_layers': depth}
    fixed = {'model.scan_layers': True, 'scaling.embedding_std': 1.0}
    learner, hyper = lab.build_small_learner(changes | fixed, VOCAB, BOS)

    def run(seed):
        key, text_key = jax.random.split(jax.random.key(seed))
        state = init_state(learner, hyper, key)
        tokens = jax.random.randint(text_key, (ROWS, LENGTH + 1), 1, VOCAB)
        batch = {'tokens': tokens, 'segments': jnp.ones_like(tokens)}

        def loss(params):
            variables = learner.variables(state.weights.replace(params=params))
            sums = token_sums(learner, variables, batch, hyper)
            return sums['objective'] / sums['tokens']

        grads = named_leaves(jax.grad(loss)(state.weights.params))
        return jnp.linalg.norm(grads['layers/mlp/down'][-1])

    return np.asarray(lab.map_seeds(run, jnp.arange(SEEDS)), np.float64)


@measure('largest_slope_of_standard', 'largest_slope_of_mup')
def sizes_over_width() -> Iterator[Estimate]:
    """Yields the largest slope of log size of changes over log width in the first steps, by rule.

    It is 0 if a single learning rate suits all widths (arXiv:2203.03466, appendix D.1): `standard`
    against `mup`, Adam at its peak rate, as in `python -m eval.coordinates`.
    """
    for rule, base in (('standard', None), ('mup', WIDTHS[0])):
        changes = {'scaling.name': rule, 'scaling.base_width': base, 'optim.lr': 3e-3}
        recipe = lab.read_recipe(changes | {'model.n_layers': 2, 'model.scan_layers': True})
        slopes = fit_slopes(recipe, 'width', WIDTHS, SEEDS, 5)
        change_slopes = [slope for slope in slopes if slope.quantity == CHANGE]
        top = max(change_slopes, key=lambda slope: slope.value)
        yield Estimate(top.value, top.value - top.spread, top.value + top.spread, SEEDS)
