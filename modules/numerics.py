"""Types of matmuls, and rematerialization policies of blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# float64 is for exact comparisons, as in eval.convert; nothing trains in it.
DTYPES = {'bfloat16': jnp.bfloat16, 'float32': jnp.float32, 'float64': jnp.float64}

# Names of values for policies: the output and the log-sum-exp of an attention kernel, the products
# of an attention layer with its weights, and the products of a position-wise network.
ATTENTION_OUTPUT, ATTENTION_PRODUCTS, MLP_PRODUCTS = (
    'attended',
    'attention_products',
    'mlp_products',
)

Policy = Callable[..., Any]


def save_policy(*names: str) -> Policy:
    """Makes the policy that saves the values with one of the names.

    cuDNN's kernel has no such names: its output is saved with ATTENTION_OUTPUT, by its primitive.
    """
    has_saved_name = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive: Any, *args: Any, **params: Any) -> bool:
        is_cudnn = primitive.name.startswith('dot_product_attention_fwd')
        return has_saved_name(primitive, *args, **params) or (
            is_cudnn and ATTENTION_OUTPUT in names
        )

    return policy


# Values that a block stores for its backward pass, which recomputes the rest; from most to least.
REMAT_POLICIES = {
    'none': None,
    'dots': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, save_policy(ATTENTION_OUTPUT)
    ),
    'mlp': save_policy(ATTENTION_OUTPUT, MLP_PRODUCTS),
    'attention': save_policy(ATTENTION_OUTPUT, ATTENTION_PRODUCTS),
    'attended': save_policy(ATTENTION_OUTPUT),
    'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENTION_OUTPUT, ATTENTION_PRODUCTS],
        offload_src='device',
        offload_dst='pinned_host',
    ),
    'full': jax.checkpoint_policies.nothing_saveable,
}
# {policy: a policy that saves as much on the device}, for policies that save values on the host.
DEVICE_POLICIES = {'offload': 'full'}
REMAT_SUMMARIES = {
    'none': 'Stores all values that the backward pass reads',
    'dots': 'Stores matmuls with weights and the attention output; recomputes the rest',
    'mlp': "Stores the MLPs' matmuls and the attention output; recomputes the matmuls of attention",
    'attention': "Stores the matmuls and the output of attention; recomputes the MLPs' matmuls",
    'attended': 'Stores the output of the attention kernel; recomputes the rest',
    'offload': 'Stores the same values as `attention`, but in the memory of the host',
    'full': 'Stores only the input of each block; recomputes all of the block',
}
