"""Normalization layers over the last axis. A new one is a file here and a row in `NORMS`.

Each is a Linen class made with `eps` and the logical name of the last axis, and called on x [...,
D]; the same classes serve the residual stream ([M, D]) and queries and keys ([B, N, T, H]).
"""

from flax import linen as nn

from modules.norms.layernorm import LayerNorm
from modules.norms.rmsnorm import RMSNorm


class NoNorm(nn.Module):
    """The identity."""

    eps: float
    axis: str = 'embed'

    def __call__(self, x):
        return x


NORMS = {'layernorm': LayerNorm, 'none': NoNorm, 'rmsnorm': RMSNorm}
