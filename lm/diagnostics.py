"""What is recorded of each layer, by a program of its own; the training step has none of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.model import DIAGNOSTICS, groups_of_blocks
from lm.state import Hyper, Learner, Weights
from lm.step import Batch, observed_sums
from modules.params import named_leaves


def make_diagnose(
    learner: Learner,
) -> Callable[[Weights, Batch, Hyper], dict[str, jax.Array]]:
    """`diagnose(weights, batch, hyper)`: one number a layer, [L] each.

    What layers sow in the collection `diagnostics` (`residual_rms`: of the stream behind each
    block), and of the weights that each layer uses the norm (`layer_param_norm`) and that of the
    gradient of the mean token loss (`layer_grad_norm`). Layers are as in evaluation.
    """
    groups = [group.name for group in groups_of_blocks(learner.config)]

    def diagnose(weights, batch, hyper):
        def loss(used):
            variables = {'params': used, **weights.stats}
            sums, filled = observed_sums(learner, variables, batch, hyper, mutable=(DIAGNOSTICS,))
            return sums['objective'] / jnp.maximum(sums['tokens'], 1.0), filled

        used = learner.variables(weights)['params']
        grads, filled = jax.grad(loss, has_aux=True)(used)
        found = [
            {path.split('/')[-2]: v for path, v in named_leaves(filled[DIAGNOSTICS][name]).items()}
            | {
                'layer_param_norm': norm_by_layer(used[name]),
                'layer_grad_norm': norm_by_layer(grads[name]),
            }
            for name in groups
        ]
        return {name: jnp.concatenate([group[name] for group in found]) for name in found[0]}

    return diagnose


def norm_by_layer(tree: Any) -> jax.Array:
    """[L]: the norm of all that a layer holds, of leaves stacked along their first axis."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1), 1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares))
