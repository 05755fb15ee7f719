"""Models at their start: gradients over depth, sizes over width."""

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, over_seeds
from eval.coordinates import CHANGE, slopes
from lm.config.recipe import Recipe
from lm.config.resolve import replaced, resolve
from lm.launch.command import ConfigParser
from lm.study.plan.cells import split_sweep
from lm.training.state import build_learner, hyper_from, init_state
from lm.training.step import token_sums
from modules.params import named_leaves

SMALL = 'configs/studies/small.py'
VOCAB, BOS, ROWS, LENGTH = 64, 0, 4, 32
DEPTHS, WIDTHS, SEEDS = (2, 4, 8, 16), (32, 64, 128, 256), 5


def small(changes: dict) -> Recipe:
    """Returns the recipe of the studies' model with changes."""
    base, *_ = split_sweep(ConfigParser('config').parse(SMALL))
    return replaced(resolve(base), changes)


def gradients_at_the_start() -> dict[str, Estimate]:
    """Returns the slope of log |gradient of the last block's MLP| over log depth, by placement.

    Expected: -1/2 in pre-norm, whose stream grows as the root of the depth, and 0 in post-norm
    (arXiv:2002.04745, theorem 1). Random tokens, starts as of configs/studies/small.py with
    embeddings of deviation 1, DEPTHS, over SEEDS.
    """
    found = {}
    for placement in ('pre', 'post'):
        logs_DS = np.log([_last_gradients(placement, depth) for depth in DEPTHS])
        by_seed = np.polyfit(np.log(DEPTHS), logs_DS, 1)[0]
        found[f'slope_of_{placement}_norm'] = over_seeds(by_seed)
    return found


def _last_gradients(placement: str, depth: int) -> list[float]:
    recipe = small(
        {
            'model.placement': placement,
            'model.n_layers': depth,
            'model.scan_layers': True,
            'scaling.embedding_std': 1.0,
        }
    )
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    hyper = hyper_from(recipe)

    def run(seed):
        key, of_text = jax.random.split(jax.random.key(seed))
        state = init_state(learner, hyper, key)
        tokens = jax.random.randint(of_text, (ROWS, LENGTH + 1), 1, VOCAB)
        batch = {'tokens': tokens, 'segments': jnp.ones_like(tokens)}

        def loss(params):
            variables = learner.variables(state.weights.replace(params=params))
            sums = token_sums(learner, variables, batch, hyper)
            return sums['objective'] / sums['tokens']

        grads = named_leaves(jax.grad(loss)(state.weights.params))
        return jnp.linalg.norm(grads['layers/mlp/down'][-1])

    return [float(x) for x in jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(SEEDS))]


def sizes_over_width() -> dict[str, Estimate]:
    """Returns the largest slope of log size over log width of what a few steps change, by rule.

    0 where one learning rate serves all widths (arXiv:2203.03466, appendix D.1): `standard` against
    `mup`, Adam at its peak rate, as `python -m eval.coordinates` has it.
    """
    found = {}
    for rule, base in (('standard', None), ('mup', WIDTHS[0])):
        changes = {'scaling.name': rule, 'scaling.base_width': base, 'optim.lr': 3e-3}
        recipe = small(changes | {'model.n_layers': 2, 'model.scan_layers': True})
        every = slopes(recipe, 'width', WIDTHS, SEEDS, 5)
        changed = [one for one in every if one.of == CHANGE]
        top = max(changed, key=lambda one: one.value)
        found[f'largest_slope_of_{rule}'] = Estimate(
            top.value, top.value - top.spread, top.value + top.spread, SEEDS
        )
    return found
