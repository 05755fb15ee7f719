"""Types of products, and rematerialization policies of blocks."""

import jax
import jax.numpy as jnp

# float64 is for exact comparisons, as eval.convert makes them; nothing trains in it.
DTYPES = {'bfloat16': jnp.bfloat16, 'float32': jnp.float32, 'float64': jnp.float64}

# What a block stores for its backward pass, which computes the rest again.
REMAT_POLICIES = {
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    'full': jax.checkpoint_policies.nothing_saveable,
    'none': None,
}
REMAT_SUMMARIES = {
    'dots': 'keeps the products with weights and computes the rest of a block again',
    'full': 'keeps the input of a block alone and computes all of it again',
    'none': 'keeps everything that the backward pass reads',
}
