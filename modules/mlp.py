"""The position-wise networks. A new network is a class here and a row in `MLPS`.

Each is a Linen class called on (x [B, T, D], valid [B, T, 1] or None). Mixtures of experts are in
`modules.experts`.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from modules.experts import MoE
from modules.options import Option
from modules.position_wise import PositionWise
from modules.products import NORMAL


class MLP(PositionWise):
    """MLP with one hidden layer (arXiv:1706.03762): `y = act(x W_up) W_down`.

    With a gated activation (arXiv:2002.05202), and an elementwise product:
    `y = (act(x W_gate) * (x W_up)) W_down`.

    The activation is `model.activation`. `bias` adds a bias to each matmul. Source: equation 2.
    """

    bias: bool = False

    @nn.compact
    def __call__(self, x_BTD: jax.Array, valid_BT1: jax.Array | None = None) -> jax.Array:
        return self.feed_forward(x_BTD, bias=self.bias)


class RandomFeatures(PositionWise):
    """MLP on random features (arXiv:2310.13225): `y = act(x G) W_down`.

    `G` is drawn once and never trained: it has no gradient, no weight decay and no optimizer state.
    This is the ReLU form of Scalable Neural Network Kernels: a trained matrix multiplies features
    `max(0, g^T x)` of fixed directions `g`. The mean of these features over many directions
    estimates the kernel of a ReLU layer of infinite width. Here `W_down` starts like any matrix;
    the source starts it at the features of trained weights. `bias` adds a bias only to the second
    matmul, since the features are fixed.
    """

    bias: bool = False
    features: Annotated[
        str,
        Option(
            'independent directions, or orthogonal ones in each group of d_model',
            choices=('gaussian', 'orthogonal'),
        ),
    ] = 'gaussian'

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:  # ty: ignore[incompatible-attribute-override]
        """Raises ValueError for a gated activation, which needs another matrix."""
        if recipe.activation.row.gated:
            raise ValueError(
                f'{part} has a single matrix of features, but {recipe.activation} needs a second '
                'one for its gate. Choose an activation without a gate, such as '
                'model.activation=relu.'
            )

    def up_options(self) -> dict[str, Any]:
        return {'init': FEATURES[self.features], 'frozen': True, 'bias': False}

    @nn.compact
    def __call__(self, x_BTD: jax.Array, valid_BT1: jax.Array | None = None) -> jax.Array:
        return self.feed_forward(x_BTD, bias=self.bias)


def orthogonal_features(
    key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Returns directions [D, F] as long as Gaussian vectors, orthogonal within each D of them.

    Each column alone is Gaussian: a column of a uniformly distributed orthogonal matrix, times the
    length of an independent Gaussian vector (arXiv:1610.09072).

    Args:
      key: a random key.
      shape: (D, F).
      dtype: of the directions.

    Returns:
      The directions.
    """
    width, n_features = shape
    rotation_key, length_key = jax.random.split(key)
    normal_ADD = jax.random.normal(rotation_key, (-(-n_features // width), width, width))
    q_ADD, r_ADD = jnp.linalg.qr(normal_ADD)
    # With a positive diagonal of R, Q is unique, and uniformly distributed.
    q_ADD = q_ADD * jnp.sign(jnp.diagonal(r_ADD, axis1=1, axis2=2))[:, None]
    directions_DF = jnp.moveaxis(q_ADD, 0, 1).reshape(width, -1)[:, :n_features]
    lengths_1F = jnp.linalg.norm(jax.random.normal(length_key, shape), axis=0, keepdims=True)
    return (directions_DF * lengths_1F).astype(dtype)


FEATURES = {'gaussian': NORMAL, 'orthogonal': orthogonal_features}


MLPS = {'dense': MLP, 'moe': MoE, 'random_features': RandomFeatures}
