"""Causal softmax attention and what may be changed in its scores."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.attention.affine import affine_scaled, mean_seen, mean_seen_from
from modules.attention.base import MultiHead
from modules.attention.cache import remembered
from modules.kernels.attention.observed import attention_statistics
from modules.kernels.attention.reference import attend_from
from modules.kernels.attention.scores import Scores, share_heads
from modules.options import Option
from modules.params import declare
from modules.statistics import DIAGNOSTICS, at_least_float32, is_recording

SINK_DEVIATION = 0.02  # of learned sinks at the start: gpt-oss's initializer_range


class SoftmaxAttention(MultiHead):
    """mix(q, k, v) = softmax(s) v with s = rotate(q) rotate(k)^T / sqrt(H) (arXiv:1706.03762).

    The options change s and the sum that softmax divides by; `modules.kernels.attention.reference`
    has the equation. Sources: softcap arXiv:2408.00118; `mup` arXiv:2203.03466, appendix B.1; a
    learned temperature of each head arXiv:2010.04245; sinks off by one
    (https://www.evanmiller.org/attention-is-off-by-one.html) and learned (arXiv:2508.10925);
    affine-scaled arXiv:2602.23057; windows arXiv:2310.06825, among them full layers
    arXiv:2408.00118. `slopes` makes those of ALiBi for N heads. `block` is the number of the layer,
    from 1.
    """

    slopes: Callable[[int], jax.Array] | None = None
    base_head_dim: int | None = None  # the H at which q k / H is q k / sqrt(H); None: no such
    block: jax.Array | float = 1.0
    softcap: Annotated[
        float, Option('c of c tanh(s / c) on the logits; 0: none', 0, sys.float_info.max)
    ] = 0.0
    logit_scale: Annotated[
        str,
        Option(
            'of q k: 1 / sqrt(H), 1 / H, or the first times a learned number a head',
            choices=('root', 'mup', 'learned'),
        ),
    ] = 'root'
    sinks: Annotated[
        str,
        Option(
            'a logit that stands for no token: none, 0, or a learned one a head',
            choices=('none', 'off_by_one', 'learned'),
        ),
    ] = 'none'
    affine_scaled: Annotated[
        bool, Option('whether probabilities are scaled and shifted, by the query')
    ] = False
    window: Annotated[
        int | None, Option('tokens that one attends to, itself included; None: all before it', 1)
    ] = None
    full_every: Annotated[
        int, Option('each n-th layer attends to all, whatever the window; 0: none does', 0)
    ] = 0

    has_scores = True
    takes_slopes = True
    of_cut_rows = True

    @classmethod
    def check(cls, recipe, part):
        """Raises ValueError for layers without a window where none has one, and for a mean of what
        comes before where tokens see what comes after.
        """
        super().check(recipe, part)
        given = part.options
        if given['full_every'] and given['window'] is None:
            raise ValueError(
                f'attention.full_every={given["full_every"]} says which layers have no window, and '
                'attention.window is None: all have none. Set the window, or leave it out.'
            )
        for objective in recipe.objectives:
            if objective.row.has_prefix and given['affine_scaled']:
                raise ValueError(
                    f'{objective} lets the tokens of a prefix see each other, and the mean that '
                    'attention.affine_scaled=True adds is of earlier ones. Leave one of them out.'
                )

    @classmethod
    def tokens_mixed(cls, length, head_dim, block, *, window, full_every, **options):
        """T / 2, half of the pairs being causal; W - W^2 / 2 T within a window of W < T tokens."""
        if window is None or window >= length or (full_every and block % full_every == 0):
            return length / 2
        return window - window**2 / (2 * length)

    def scores(self) -> Scores:
        """What the kernel has to serve."""
        return Scores(
            scale=self.scale(),
            softcap=self.softcap,
            window=self.window,
            sinks=self.sinks != 'none',
            slopes=self.slopes is not None,
        )

    def scale(self) -> float | None:
        """Of q k; None: 1 / sqrt(H)."""
        if self.logit_scale == 'mup':
            return 1 / self.head_dim
        if self.base_head_dim in (None, self.head_dim):
            return None
        return math.sqrt(self.base_head_dim) / self.head_dim

    def mix(self, x_BTD, q_BNTH, k_BKTH, v_BKTH, sequence):
        q_BNTH, k_BKTH = (self.rotate(y, sequence.positions_BT) for y in (q_BNTH, k_BKTH))
        temperature_N = self.temperature()
        if temperature_N is not None:
            q_BNTH = (q_BNTH * times_heads(temperature_N, q_BNTH)).astype(q_BNTH.dtype)
        if sequence.capacity is not None:
            k_BKTH, v_BKTH = (
                remembered(self, name, y, sequence)
                for name, y in (('key', k_BKTH), ('value', v_BKTH))
            )
        arrays = self.arrays(k_BKTH, temperature_N)
        mixed_BNTH = self.attend(q_BNTH, k_BKTH, v_BKTH, sequence, arrays)
        if not self.affine_scaled:
            return mixed_BNTH
        alpha_BTN = self.project('affine', x_BTD, ('embed', 'heads'), ('embed',), self.n_heads)
        mean_BNTH = share_heads(self.mean_seen(v_BKTH, sequence), self.n_heads)
        alpha_BTN = jax.nn.sigmoid(at_least_float32(alpha_BTN))
        return affine_scaled(self, alpha_BTN, mixed_BNTH, mean_BNTH, sequence.valid_BT1)

    def attend(self, q_BNTH, k_BKSH, v_BKSH, sequence, arrays):
        """The kernel's result, or, of queries behind a cache, that of the specification."""
        scores, is_full = self.scores(), self.is_full()
        if sequence.capacity is None:
            self.record(q_BNTH, k_BKSH, sequence, arrays)
            if sequence.prefix_BT is not None:
                scores = dataclasses.replace(scores, prefix=True)
                arrays = arrays | {'prefix_BT': sequence.prefix_BT}
            return self.kernels.attention(
                q_BNTH, k_BKSH, v_BKSH, scores, sequence.segments_BT, is_full=is_full, **arrays
            )
        positions_BT = sequence.positions_BT
        return attend_from(q_BNTH, k_BKSH, v_BKSH, scores, positions_BT, is_full=is_full, **arrays)

    def record(self, q_BNTH, k_BKSH, sequence, arrays):
        """What is seen of the probabilities, head by head, where it is asked for."""
        if is_recording(self):
            segments_BT, valid_BT = sequence.segments_BT, sequence.valid_BT
            found = attention_statistics(
                q_BNTH,
                k_BKSH,
                self.scores(),
                segments_BT,
                valid_BT,
                is_full=self.is_full(),
                **arrays,
            )
            for name, value_N in found.items():
                self.sow(DIAGNOSTICS, name, value_N)

    def is_full(self) -> jax.Array | None:
        """Whether this layer has no window, where some have none."""
        if self.window is None or not self.full_every:
            return None
        return jnp.mod(self.block, self.full_every) == 0

    def mean_seen(self, v_BKTH, sequence):
        if sequence.capacity is None:
            return mean_seen(v_BKTH, sequence, self.window, self.is_full())
        return mean_seen_from(v_BKTH, sequence.positions_BT, self.window, self.is_full())

    def temperature(self) -> jax.Array | None:
        """[N], 1 at the start; None where it is not learned."""
        if self.logit_scale != 'learned':
            return None
        return self.param(
            'temperature', declare(nn.initializers.ones, 'vector', ('heads',)), (self.n_heads,)
        )

    def arrays(self, k_BKSH, temperature_N) -> dict[str, jax.Array]:
        """What `scores` announces."""
        del k_BKSH, temperature_N
        found = {}
        if self.sinks == 'off_by_one':
            found['sinks_N'] = jnp.zeros(self.n_heads)
        if self.sinks == 'learned':
            normal = nn.initializers.normal(SINK_DEVIATION)
            init = declare(normal, 'vector', ('heads',))
            found['sinks_N'] = self.param('sinks', init, (self.n_heads,))
        if self.slopes is not None:
            found['slopes_N'] = self.slopes(self.n_heads)
        return found


class L2Attention(SoftmaxAttention):
    """s = (q k^T - |k|^2 / 2) / sqrt(H): softmax of distances (PPGT, arXiv:2504.12588).

    -|q - k|^2 / 2 without its term in |q|^2, which is the same for all keys. The released code
    divides the second term alone; `l2_scaled` has both forms. PPGT's positions are of graphs and
    not here.
    """

    l2_scaled: Annotated[
        str,
        Option(
            'what is divided by sqrt(H): the whole, or the key term alone as in the released code',
            choices=('both', 'key'),
        ),
    ] = 'both'

    def scores(self) -> Scores:
        scores = super().scores()
        scale = 1.0 if self.l2_scaled == 'key' else scores.scale
        return dataclasses.replace(scores, scale=scale, key_bias=True)

    def arrays(self, k_BKSH, temperature_N):
        scale = Scores(super().scores().scale).scale_of(self.head_dim)
        bias_BKS = -0.5 * scale * jnp.sum(jnp.square(at_least_float32(k_BKSH)), -1)
        if temperature_N is not None:
            bias_BNS = share_heads(bias_BKS[..., None], self.n_heads)[..., 0]
            bias_BKS = bias_BNS * jnp.broadcast_to(temperature_N[None, :, None], bias_BNS.shape)
        return super().arrays(k_BKSH, temperature_N) | {'key_bias_BKS': bias_BKS}


def times_heads(vector_N: jax.Array, x_BNTH: jax.Array) -> jax.Array:
    """A number of each head in the shape of x."""
    return jnp.broadcast_to(vector_N[None, :, None, None], x_BNTH.shape)
