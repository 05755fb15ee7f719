"""Types of products, and rematerialization policies of blocks."""

from typing import Any

import jax
import jax.numpy as jnp

# float64 is for exact comparisons, as eval.convert makes them; nothing trains in it.
DTYPES = {'bfloat16': jnp.bfloat16, 'float32': jnp.float32, 'float64': jnp.float64}

ATTENDED = 'attended'  # names the output and the log-sum-exp of an attention kernel


def _keeps_attention(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether it makes what an attention kernel keeps for its backward pass. cuDNN's has no names
    of ours.
    """
    named = jax.checkpoint_policies.save_only_these_names(ATTENDED)(primitive, *args, **params)
    return named or primitive.name.startswith('dot_product_attention_fwd')


# What a block stores for its backward pass, which computes the rest again.
REMAT_POLICIES = {
    'dots': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keeps_attention
    ),
    'full': jax.checkpoint_policies.nothing_saveable,
    'none': None,
}
REMAT_SUMMARIES = {
    'dots': 'keeps the products with weights and what attention makes, and computes the rest again',
    'full': 'keeps the input of a block alone and computes all of it again',
    'none': 'keeps everything that the backward pass reads',
}
