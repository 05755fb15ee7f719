"""What is recorded of each layer, by a program of its own; the training step has none of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.config import Config
from lm.model import DIAGNOSTICS, Transformer
from lm.state import Hyper, describe_params
from lm.step import Batch, observed_sums
from modules.params import LAYER, named_leaves


def make_diagnose(
    config: Config, model: Transformer, bos_id: int
) -> Callable[[Any, Any, Batch, Hyper], dict[str, jax.Array]]:
    """`diagnose(params, reparam, batch, hyper)`: one number a layer, [L] each.

    What layers sow in the collection `diagnostics` (`residual_rms`: of the stream behind each
    block), and of the stored parameters of each layer the norm (`layer_param_norm`) and that of the
    gradient of the mean token loss (`layer_grad_norm`).
    """
    described = describe_params(config, model)

    def diagnose(params, reparam, batch, hyper):
        def loss(stored):
            used, _ = described.reparam.apply(stored, reparam, False)
            sums, filled = observed_sums(
                config, model, bos_id, used, batch, hyper, mutable=(DIAGNOSTICS,)
            )
            return sums['objective'] / jnp.maximum(sums['tokens'], 1.0), filled

        grads, filled = jax.grad(loss, has_aux=True)(params)
        sown = {path.split('/')[-2]: v for path, v in named_leaves(filled[DIAGNOSTICS]).items()}
        return sown | {
            'layer_param_norm': norm_by_layer(params, described.specs),
            'layer_grad_norm': norm_by_layer(grads, described.specs),
        }

    return diagnose


def norm_by_layer(tree: Any, specs: Any) -> jax.Array:
    """[L]: the norm of all that a layer holds, over the leaves that have an axis `layer`."""
    specs = named_leaves(specs)

    def squares_L(leaf, axis):
        rest = [i for i in range(leaf.ndim) if i != axis]
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), rest)

    return jnp.sqrt(
        sum(
            squares_L(leaf, specs[path].axes.index(LAYER))
            for path, leaf in named_leaves(tree).items()
            if LAYER in specs[path].axes
        )
    )
