"""Residual streams: what the blocks carry, what a sublayer reads of it, and how its output enters.

`model.stream` names a row. The rows other than `plain` work with each placement whose sublayers are
branches, `x + branch(x)` (`modules.placements`). `S` arrays [S, B, T, D] are kept: streams, or the
outputs of earlier sublayers or blocks. The first axis is a whole buffer, so that a scan over blocks
can carry it; a block writes its slot by a dynamic update.

Parameters of streams are vectors in the group `stream` (`modules.optim.groups`), so that no matrix
optimizer orthogonalizes them and weight decay leaves them alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.options import Option
from modules.placements import PLACEMENTS
from modules.statistics import at_least_float32

SUBLAYERS = ('attention', 'mlp')  # of a block, in order
RMS_EPS = 1e-6  # the default of the authors' kernel for attention residuals
SINKHORN_EPS = 1e-6
CONNECTION_SCALE = 0.01  # factor of the parts of hyper-connections that depend on the token
Vector = Callable[..., jax.Array]
Branch = Callable[[jax.Array], jax.Array]
Size = Annotated[int, Option('residual streams', 1, 64)]
Factor = Option('at the start, linear in depth', -100, 100)


class Site(NamedTuple):
    """A sublayer, a whole block or the readout, at each of which a stream may have parameters.

    vector: vector(name, init, axes, shape, part=STREAM) makes a parameter with role `vector`.
    """

    name: str  # 'attention', 'mlp', 'block' or 'readout'
    block: jax.Array | float  # number of the block, from 1; traced where blocks are scanned
    vector: Vector
    branch: Branch = lambda x_BTD: x_BTD  # maps what a sublayer reads to its output


@dataclasses.dataclass(frozen=True)
class Plain:
    """One stream, to which each sublayer adds its output: `x <- x + F(N(x))`.

    The equation is that of `model.placement=pre`; here, each placement has its equation.
    """

    blocks: int = 1  # L
    width_factor: float = 1.0  # of products that sum over the width, from the parametrisation

    #: Whether the placement alone determines the computation.
    is_plain: ClassVar[bool] = True

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError if the placement does not add each sublayer to the stream."""
        if cls.is_plain or recipe.placement.row.branch is not None:
            return
        able = '|'.join(name for name, row in PLACEMENTS.items() if row.branch is not None)
        raise ValueError(
            f'{part} needs a placement that adds each sublayer to the stream, x + F(x), but '
            f'{recipe.placement} does not. Choose model.placement={able}, or model.stream=plain.'
        )

    @classmethod
    def products(cls, width: int, blocks: int, **options: Any) -> int:
        """Returns the products of activations that the stream computes for a token, forward.

        Args:
          width: D.
          blocks: L.
          **options: the options of the row.
        """
        return 0

    def split(self, x_BTD: jax.Array) -> Any:
        """Returns the carry of the blocks, from the embeddings."""
        return x_BTD

    def enter(self, carry: Any, site: Site) -> Any:
        """Returns the carry at the start of a block."""
        return carry

    def connect(self, carry: Any, site: Site) -> Any:
        """Returns the carry after a sublayer."""
        return carry + site.branch(carry)

    def leave(self, carry: Any, site: Site) -> Any:
        """Returns the carry at the end of a block."""
        return carry

    def join(self, carry: Any, site: Site) -> jax.Array:
        """Returns the input of the last norm, from the carry after the last block."""
        return self.observe(carry)

    def observe(self, carry: Any) -> jax.Array:
        """Returns the stream that diagnostics and activations record, [B, T, D]."""
        return jax.tree.leaves(carry)[0]

    def replace(self, carry: Any, x_BTD: jax.Array) -> Any:
        """Returns the carry of which `observe` returns x_BTD."""
        (_, *later_streams), structure = jax.tree.flatten(carry)
        return jax.tree.unflatten(structure, [x_BTD, *later_streams])


@dataclasses.dataclass(frozen=True)
class X0Scalars(Plain):
    """Scalars of the stream and of the embedding, in nanochat and modded-nanogpt.

    Before block l: `x <- r_l x + a_l x_0`

    `x_0` are the embeddings after `model.embedding_norm`. Both scalars start linear in depth; the
    first version of nanochat had `r = 1` and `a = 0` throughout, the plain stream. Source: the code
    of nanochat (https://github.com/karpathy/nanochat). There `r` learns 100 times slower than `a`:
    `r` is in the group of `optim.stream_lr`, and `a` in the group of `optim.scalar_lr`.
    """

    residual_first: Annotated[
        float, dataclasses.replace(Factor, description='r of the first block at the start')
    ] = 1.15
    residual_last: Annotated[
        float, dataclasses.replace(Factor, description='r of the last block at the start')
    ] = 1.05
    x0_first: Annotated[
        float, dataclasses.replace(Factor, description='a of the first block at the start')
    ] = 0.2
    x0_last: Annotated[
        float, dataclasses.replace(Factor, description='a of the last block at the start')
    ] = 0.05

    is_plain = False

    def split(self, x_BTD: jax.Array) -> Any:
        return x_BTD, x_BTD

    def enter(self, carry: Any, site: Site) -> Any:
        x_BTD, x0_BTD = carry
        share = (site.block - 1) / max(self.blocks - 1, 1)

        def linear(first, last):
            return lambda key, shape, dtype: jnp.full(
                shape, first + (last - first) * share, dtype=dtype
            )

        r = site.vector('residual', linear(self.residual_first, self.residual_last), (), ())
        a = site.vector('x0', linear(self.x0_first, self.x0_last), (), (), part='')
        return r.astype(x_BTD.dtype) * x_BTD + a.astype(x_BTD.dtype) * x0_BTD, x0_BTD

    def connect(self, carry: Any, site: Site) -> Any:
        x_BTD, x0_BTD = carry
        return x_BTD + site.branch(x_BTD), x0_BTD


@dataclasses.dataclass(frozen=True)
class AttentionResidual(Plain):
    """Attention residuals (arXiv:2603.15031): a sublayer reads a softmax over earlier outputs.

    Sublayer l reads `r = sum_(s < l) p_s y_s`, with the shares of a softmax over `s`:

    `p_s = softmax_s(w_l . y_s / rms(y_s))`

    `y_0` are the embeddings and `y_s` is the output of sublayer `s`. The readout reads such a sum
    too. Each `w` [D] starts at 0, so that a sublayer first reads the plain mean. With
    `depth_sums=n`, the outputs of successive sublayers are added up to `n` sums, which stand for
    `y_1` to `y_n`, the sum of the sublayers so far among them. Logits and softmax are computed in
    float32. Source for the equation: the code of fla (https://github.com/fla-org), ops/attnres. Its
    gain of the norm is left out, as a product with `w`.

    Activations record the latest output, or the latest sum.
    """

    depth_sums: Annotated[
        int, Option('sums of sublayer outputs that a sublayer reads; 0: each output', 0)
    ] = 0

    is_plain = False

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        super().check(recipe, part)
        sublayers, sums = len(SUBLAYERS) * recipe.model.n_layers, part.options['depth_sums']
        if sums and sublayers % sums:
            fitting = ', '.join(str(n) for n in range(1, sublayers + 1) if sublayers % n == 0)
            raise ValueError(
                f'model.depth_sums must divide the number of sublayers, 2 model.n_layers; got '
                f'{sums} for {sublayers}. Choose one of {fitting}, or 0 for {sublayers}.'
            )

    @classmethod
    def products(cls, width: int, blocks: int, *, depth_sums: int = 0, **options: Any) -> int:
        sublayers = len(SUBLAYERS) * blocks
        size = sublayers // (depth_sums or sublayers)
        # Each of two products, with w and with p, for each source; the readout is the last read.
        sources = [1 + -(-i // size) for i in range(sublayers + 1)]
        return 2 * width * sum(sources)

    @property
    def sums(self) -> int:
        """Sums of sublayer outputs over the whole depth."""
        return self.depth_sums or len(SUBLAYERS) * self.blocks

    def split(self, x_BTD: jax.Array) -> Any:
        # The latest source is apart from the earlier ones, of which there are at most `sums`. They
        # are counted, so that a block that is skipped (`lm.inference.blocks`) leaves no gap.
        return x_BTD, jnp.zeros((self.sums, *x_BTD.shape), x_BTD.dtype), jnp.int32(0)

    def read(self, carry: Any, site: Site) -> jax.Array:
        """Returns the softmax over all sources."""
        x_BTD, earlier_SBTD, count = carry
        w_D = site.vector('query', nn.initializers.zeros, ('embed',), x_BTD.shape[-1:])
        return attend_to_sources(x_BTD, earlier_SBTD, count, self.width_factor * w_D)

    def connect(self, carry: Any, site: Site) -> Any:
        x_BTD, earlier_SBTD, count = carry
        y_BTD = site.branch(self.read(carry, site))
        size = len(SUBLAYERS) * self.blocks // self.sums
        sublayer = len(SUBLAYERS) * (site.block - 1) + SUBLAYERS.index(site.name)
        ends = (sublayer % size == 0) if size > 1 else True  # the latest source is a whole sum
        before_BTD = jax.lax.dynamic_index_in_dim(earlier_SBTD, count, keepdims=False)
        slot_BTD = x_BTD if size == 1 else jnp.where(ends, x_BTD, before_BTD)
        earlier_SBTD = jax.lax.dynamic_update_index_in_dim(earlier_SBTD, slot_BTD, count, 0)
        if size > 1:
            y_BTD = jnp.where(ends, y_BTD, x_BTD + y_BTD)
        return y_BTD, earlier_SBTD, count + jnp.int32(ends)

    def join(self, carry: Any, site: Site) -> jax.Array:
        return self.read(carry, site)


@jax.checkpoint  # the backward pass keeps the sources, and nothing else of their size
def attend_to_sources(
    x_BTD: jax.Array, earlier_SBTD: jax.Array, count: jax.Array, w_D: jax.Array
) -> jax.Array:
    """Returns sum_s p_s y_s with p = softmax_s(w . y_s / rms(y_s)), in float32 inside.

    Args:
      x_BTD: the latest source.
      earlier_SBTD: the earlier sources.
      count: how many there are; further slots are empty.
      w_D: the query.
    """

    def scores(y):
        y = at_least_float32(y)
        inv_rms = jax.lax.rsqrt(jnp.mean(y**2, -1) + RMS_EPS)
        return jnp.einsum('...d,d->...', y, w_D) * inv_rms

    is_source_S11 = (jnp.arange(len(earlier_SBTD)) < count)[:, None, None]
    logits_SBT = jnp.where(is_source_S11, scores(earlier_SBTD), -jnp.inf)
    p_SBT = jax.nn.softmax(jnp.concatenate([logits_SBT, scores(x_BTD)[None]]), axis=0)
    mixed_BTD = jnp.einsum('sbt,sbtd->btd', p_SBT[:-1], at_least_float32(earlier_SBTD))
    return (mixed_BTD + p_SBT[-1][..., None] * x_BTD).astype(x_BTD.dtype)


@dataclasses.dataclass(frozen=True)
class DenseFormer(Plain):
    """DenseFormer (arXiv:2402.02622): the input of a block is a weighted sum of block outputs.

    After block l: `x <- sum_(s <= l) a_ls y_s`

    `y_0` are the embeddings and `y_l` is the output of block `l`. At the start `a_ll = 1` and all
    others are 0: the plain stream. Source: the authors' code, https://github.com/epfml/DenseFormer,
    with period and dilation 1.
    """

    is_plain = False

    @classmethod
    def products(cls, width: int, blocks: int, **options: Any) -> int:
        return width * sum(range(2, blocks + 2))

    def split(self, x_BTD: jax.Array) -> Any:
        outputs_SBTD = jnp.zeros((self.blocks + 1, *x_BTD.shape), x_BTD.dtype)
        return x_BTD, outputs_SBTD.at[0].set(x_BTD)

    def connect(self, carry: Any, site: Site) -> Any:
        x_BTD, outputs_SBTD = carry
        return x_BTD + site.branch(x_BTD), outputs_SBTD

    def leave(self, carry: Any, site: Site) -> Any:
        x_BTD, outputs_SBTD = carry
        block = jnp.int32(site.block)

        def identity(key, shape, dtype):
            return jax.nn.one_hot(block, *shape, dtype=dtype)

        a_S = site.vector('depth', identity, ('source',), (self.blocks + 1,))
        outputs_SBTD = jax.lax.dynamic_update_index_in_dim(outputs_SBTD, x_BTD, block, 0)
        # Slots of later blocks hold zeros.
        mixed_BTD = jnp.einsum('s,sbtd->btd', a_S, at_least_float32(outputs_SBTD))
        return mixed_BTD.astype(x_BTD.dtype), outputs_SBTD


@dataclasses.dataclass(frozen=True)
class HyperConnections(Plain):
    """Hyper-connections (arXiv:2409.19606): `n` streams, mixed before and after each sublayer.

    `h_i <- sum_j R_ji h_j + b_i F(N(sum_j m_j h_j))`

    `m_j = M_j + s tanh(z_j . w_m)`
    `R_ji = E_ji + s tanh(z_j . w_i)`
    `b_i = B_i + t tanh(z_i . w_b)`

    `z_j` is stream `j` after LayerNorm without gain, and all other letters are parameters. The
    streams start as `n` copies of the embeddings, and their sum is read out. `M` starts with a 1
    for stream `k mod n` in sublayer `k` and `E` as the identity, `B` at 1, all `w` at 0, and `s`
    and `t` at 0.01: pre-norm, up to the epsilon of the last norm. Source: appendix J. The paper
    also divides the initial matrices that write to the streams by `sqrt(n)`, and decays `w`; here
    neither.

    Activations record the sum of the streams.
    """

    n_streams: Size = 4

    is_plain = False

    @classmethod
    def products(cls, width: int, blocks: int, *, n_streams: int = 4, **options: Any) -> int:
        n = n_streams
        # For each stream: its coefficients, the sublayer's input, the mix and the output.
        return len(SUBLAYERS) * blocks * width * (n * (n + 2) + n + n * n + n)

    def split(self, x_BTD: jax.Array) -> Any:
        return jnp.broadcast_to(x_BTD, (self.n_streams, *x_BTD.shape))

    def observe(self, carry: Any) -> jax.Array:
        return jnp.sum(carry, 0)

    def replace(self, carry: Any, x_BTD: jax.Array) -> Any:
        return carry + (x_BTD - self.observe(carry))[None] / self.n_streams

    def connect(self, carry: Any, site: Site) -> Any:
        h_SBTD = at_least_float32(carry)
        read_SBT, mix_SRBT, write_SBT = self.coefficients(h_SBTD, site)
        x_BTD = jnp.einsum('sbt,sbtd->btd', read_SBT, h_SBTD).astype(carry.dtype)
        y_BTD = at_least_float32(site.branch(x_BTD))
        mixed_SBTD = jnp.einsum('srbt,sbtd->rbtd', mix_SRBT, h_SBTD)
        return (mixed_SBTD + write_SBT[..., None] * y_BTD[None]).astype(carry.dtype)

    def coefficients(self, h_SBTD: jax.Array, site: Site) -> tuple[jax.Array, ...]:
        """Returns the factors of the streams in the input [S, B, T], from stream to stream
        [S, S, B, T], and of the output in each stream [S, B, T].
        """
        n, width = self.n_streams, h_SBTD.shape[-1]
        sublayer = len(SUBLAYERS) * (site.block - 1) + SUBLAYERS.index(site.name)

        def identity_mix(key, shape, dtype):
            first = jax.nn.one_hot(jnp.int32(sublayer) % n, n, dtype=dtype)
            return jnp.concatenate([first[:, None], jnp.eye(n, dtype=dtype)], 1)

        zeros, scale = nn.initializers.zeros, nn.initializers.constant(CONNECTION_SCALE)
        # The first column is of the input, the others of the streams.
        static_SC = site.vector('mix', identity_mix, ('stream', 'coefficient'), (n, n + 1))
        static_S = site.vector('write', nn.initializers.ones, ('stream',), (n,))
        w_DC = site.vector('mix_by_token', zeros, ('embed', 'coefficient'), (width, n + 1))
        w_D = site.vector('write_by_token', zeros, ('embed',), (width,))
        mix_scale = site.vector('mix_scale', scale, (), ())
        write_scale = site.vector('write_scale', scale, (), ())
        centered_SBTD = h_SBTD - jnp.mean(h_SBTD, -1, keepdims=True)
        inv_std_SBT1 = jax.lax.rsqrt(jnp.mean(centered_SBTD**2, -1, keepdims=True) + RMS_EPS)
        z_SBTD = self.width_factor * centered_SBTD * inv_std_SBT1
        by_token_SCBT = jnp.tanh(jnp.einsum('sbtd,dc->scbt', z_SBTD, w_DC))
        mix_SCBT = static_SC[..., None, None] + mix_scale * by_token_SCBT
        write_SBT = jnp.tanh(jnp.einsum('sbtd,d->sbt', z_SBTD, w_D))
        write_SBT = static_S[:, None, None] + write_scale * write_SBT
        return mix_SCBT[:, 0], mix_SCBT[:, 1:], write_SBT


@dataclasses.dataclass(frozen=True)
class ManifoldHyperConnections(HyperConnections):
    """mHC (arXiv:2512.24880): `n` streams, whose mixing matrices are doubly stochastic.

    `X <- H^T X + post F(N(pre X))`

    `pre = sigma(a_1 z W_1 + b_1)`
    `post = 2 sigma(a_2 z W_2 + b_2)`
    `H = Sinkhorn(a_3 z W_3 + b_3)`

    `X` [n, D] are the streams of a token and `z` are all their features, divided by their root mean
    square. Sinkhorn takes the softmax of each row, then divides columns and rows by their sums in
    turn, so that both sum to 1. The columns come last, and each new stream is a mean of streams by
    a column; the paper has `H X`, which is the same family of maps. The streams start as copies of
    the embeddings, and their sum is read out. Each `a` starts at 0.01 and each `b` at 0. With
    `a = 0` this is pre-norm, up to the epsilon of the norms. The streams then are equal, and only
    the random `W`, of deviation `1 / sqrt(n D)`, separates them. Source of the transpose, of the
    epsilon of 1e-6 in `pre` and in each sum, and of the order: the code of MaxText
    (https://github.com/AI-Hypercomputer/maxtext), layers/mhc.py. Its gain of `z` is left out, as a
    product with `W`.

    Activations record the sum of the streams.
    """

    sinkhorn_iterations: Annotated[int, Option('normalizations of columns and rows', 1, 1000)] = 20

    @classmethod
    def products(cls, width: int, blocks: int, *, n_streams: int = 4, **options: Any) -> int:
        n = n_streams
        return len(SUBLAYERS) * blocks * width * (n * n * (n + 2) + n + n * n + n)

    def coefficients(self, h_SBTD: jax.Array, site: Site) -> tuple[jax.Array, ...]:
        n, width = self.n_streams, h_SBTD.shape[-1]
        count = n * (n + 2)
        deviation = (n * width * self.width_factor) ** -0.5  # that of the base model
        w_SDC = site.vector(
            'weights',
            nn.initializers.normal(deviation),
            ('stream', 'embed', 'coefficient'),
            (n, width, count),
        )
        bias_C = site.vector('biases', nn.initializers.zeros, ('coefficient',), (count,))
        scale = nn.initializers.constant(CONNECTION_SCALE)
        scales = (site.vector(f'{name}_scale', scale, (), ()) for name in ('read', 'write', 'mix'))
        inv_rms_BT = jax.lax.rsqrt(jnp.mean(h_SBTD**2, (0, -1)) + RMS_EPS)
        logits_CBT = jnp.einsum('sbtd,sdc->cbt', h_SBTD, w_SDC)
        logits_CBT = logits_CBT * (self.width_factor * inv_rms_BT[None])
        read_SBT, write_SBT, mix_CBT = (
            scale * logits + bias[:, None, None]
            for scale, logits, bias in zip(
                scales,
                jnp.split(logits_CBT, (n, 2 * n)),
                jnp.split(bias_C, (n, 2 * n)),
                strict=True,
            )
        )
        mix_SRBT = sinkhorn(mix_CBT.reshape(n, n, *mix_CBT.shape[1:]), self.sinkhorn_iterations)
        read_SBT = jax.nn.sigmoid(read_SBT) + SINKHORN_EPS
        return read_SBT, mix_SRBT, 2 * jax.nn.sigmoid(write_SBT)


def sinkhorn(logits_SR: jax.Array, iterations: int) -> jax.Array:
    """Returns matrices [S, R, ...] whose rows and columns sum to 1, after some iterations.

    Rows get a softmax, then columns and rows are divided by their sums in turn, columns first and
    last.
    """
    matrix_SR = jax.nn.softmax(logits_SR, axis=1) + SINKHORN_EPS
    matrix_SR = matrix_SR / (jnp.sum(matrix_SR, 0, keepdims=True) + SINKHORN_EPS)

    def divide(matrix_SR, _):
        for axis in (1, 0):
            sums = jnp.sum(matrix_SR, axis, keepdims=True)
            matrix_SR = matrix_SR / (sums + SINKHORN_EPS)
        return matrix_SR, None

    return jax.lax.scan(divide, matrix_SR, length=iterations - 1)[0]


STREAMS = {
    'attention_residual': AttentionResidual,
    'dense_former': DenseFormer,
    'hyper_connections': HyperConnections,
    'mhc': ManifoldHyperConnections,
    'plain': Plain,
    'x0_scalars': X0Scalars,
}
