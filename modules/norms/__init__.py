"""Normalization layers over the last axis. To add one, write a file here and register it in
`NORMS`.

Each is a Linen class called on x [..., D]; the same classes serve the residual stream ([M, D]) and
queries and keys ([B, N, T, H]). `modules.norms.base.Norm` documents which fields come from the
config and which from the model.
"""

import jax

from modules.norms.base import Norm
from modules.norms.batchnorm import (
    BatchChannelNorm,
    BatchNorm,
    EvoNormB0,
    EvoNormS0,
    GhostBatchNorm,
)
from modules.norms.layernorm import DyT, L1Norm, LayerNorm
from modules.norms.removal import LayerNormRemoval, RMSNormRemoval
from modules.norms.rmsnorm import (
    AdaRMSNorm,
    CRMSNorm,
    GatedRMSNorm,
    PreAffineRMSNorm,
    RMSNorm,
    SeeDNorm,
)
from modules.norms.running import PowerNorm, UnifiedNorm

__all__ = ['NORMS', 'Norm']


class NoNorm(Norm):
    """The identity."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


NORMS = {
    'ada_rmsnorm': AdaRMSNorm,
    'batch_channel': BatchChannelNorm,
    'batchnorm': BatchNorm,
    'crmsnorm': CRMSNorm,
    'dyt': DyT,
    'evonorm_b0': EvoNormB0,
    'evonorm_s0': EvoNormS0,
    'gated_rmsnorm': GatedRMSNorm,
    'ghost_batchnorm': GhostBatchNorm,
    'l1norm': L1Norm,
    'layernorm': LayerNorm,
    'layernorm_removal': LayerNormRemoval,
    'none': NoNorm,
    'powernorm': PowerNorm,
    'pre_affine_rmsnorm': PreAffineRMSNorm,
    'rmsnorm': RMSNorm,
    'rmsnorm_removal': RMSNormRemoval,
    'seednorm': SeeDNorm,
    'unified': UnifiedNorm,
}
