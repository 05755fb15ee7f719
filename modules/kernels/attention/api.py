"""The table of causal softmax attention kernels, and the call of one by its name.

A kernel takes q [B, N, T, H] and k, v [B, K, S, H] with S = T and K dividing N (grouped queries,
arXiv:2305.13245), `Scores`, and optionally segments [B, T]: a token attends to itself and to
earlier tokens of its own segment. It returns [B, N, T, H] in the type of v. `reference` is the
specification; the others equal it to rounding (tests/modules/test_attention_kernels.py) and refuse
by name what they do not serve.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modules.choices import choose
from modules.facts import accept_any
from modules.kernels.attention.base import Scores, reference
from modules.kernels.attention.blocked import blocked_attention
from modules.kernels.attention.cudnn import cudnn, max_documents
from modules.kernels.attention.splash import LANES, check_blocks, check_context_axis, splash

ALL = frozenset(field.name for field in dataclasses.fields(Scores))
DROPOUT = frozenset({'dropout'})


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """A row of `ATTENTION_KERNELS`.

    compute: (q, k, v, scores, segments_BT), with sinks_N, slopes_N, key_bias_BKS, prefix_BT and
    dropout_BNTS by name where it serves them. serves: the fields of `Scores` that it reads.
    platforms, dtypes of q, k and v, head_dims: those it takes; None: all. length_multiple: `attend`
    pads rows to a multiple of it. forward_mode: which of a model's 'logits' and their 'gradient'
    can be differentiated in forward mode. holds_scores: whether it has all scores at once, for a
    softmax of `kernels.softmax`. refuse_cut(length, parts): raises ValueError for rows of a length
    that it cannot have on several devices; None: it must have rows whole. most_documents(length):
    the documents that a row may have; None: any number. check: its own rule (`modules.facts`).
    """

    compute: Callable[..., jax.Array]
    supports: frozenset[str]
    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: range | None = None
    length_multiple: int = 1
    forward_mode: frozenset[str] = frozenset()
    holds_scores: bool = False
    check_context_axis: Callable[[int, int], None] | None = None
    max_documents: Callable[[int], int] | None = None
    check: Callable[[Any, Any], None] = accept_any

    def accepts(self, dtype: str | None, head_dim: int | None) -> bool:
        """Whether q, k and v may have this type and width; None: any."""
        return (dtype is None or self.dtypes is None or dtype in self.dtypes) and (
            head_dim is None or self.head_dims is None or head_dim in self.head_dims
        )


ATTENTION_KERNELS = {
    'blocked': AttentionKernel(
        blocked_attention,
        ALL - DROPOUT,
        forward_mode=frozenset({'gradient'}),
        check_context_axis=lambda *_: None,
    ),
    'reference': AttentionKernel(
        reference,
        ALL,
        forward_mode=frozenset({'logits', 'gradient'}),
        holds_scores=True,
        check_context_axis=lambda *_: None,
    ),
    # On Ampere its gradient in documents, a mask there, needs an even length. JAX checks that wider
    # heads than 128 are on Hopper.
    'cudnn': AttentionKernel(
        cudnn,
        frozenset({'scale', 'window'}),
        platforms=('gpu',),
        dtypes=('bfloat16', 'float16'),
        head_dims=range(8, 257, 8),
        length_multiple=2,
        max_documents=max_documents,
    ),
    'splash': AttentionKernel(
        splash,
        frozenset({'scale', 'softcap', 'window', 'sinks'}),
        platforms=('tpu',),
        dtypes=('bfloat16', 'float32'),
        head_dims=range(1, 257),  # at 512, float32 blocks are too large for a v4's vector memory
        length_multiple=LANES,
        check_context_axis=check_context_axis,
        check=check_blocks,
    ),
}


def check_scores(
    name: str, scores: Scores, dtype: str | None = None, head_dim: int | None = None
) -> None:
    """Raises ValueError where a kernel does not serve what an attention layer asks for.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      scores: what is asked for.
      dtype: the type of q, k and v; None: not asked.
      head_dim: the width of a head, H; None: not asked.
    """
    kernel, asked = choose(ATTENTION_KERNELS, name, 'kernels.attention'), scores.changed_fields()
    lacking = [f'{field}={value}' for field, value in asked.items() if field not in kernel.supports]
    if not kernel.accepts(dtype, None):
        lacking.append(f'model.dtype={dtype} (but {", ".join(kernel.dtypes)})')
    if not kernel.accepts(None, head_dim):
        widths = kernel.head_dims
        lacking.append(
            f'heads of width {head_dim} (but {widths[0]} to {widths[-1]} in steps of {widths.step})'
        )
    if lacking:
        able = [
            other + (f' (on {", ".join(row.platforms)})' if row.platforms else '')
            for other, row in ATTENTION_KERNELS.items()
            if row.supports >= asked.keys() and row.accepts(dtype, head_dim)
        ]
        raise ValueError(
            f'kernels.attention={name} does not serve {", ".join(lacking)}; those that do: '
            f'{", ".join(able)}'
        )


def check_documents(name: str, segments: np.ndarray) -> None:
    """Raises ValueError where rows have more documents than a kernel takes.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      segments: the number of the document of each token, [.., T].
    """
    kernel, length = ATTENTION_KERNELS[name], segments.shape[-1]
    if kernel.max_documents is None:
        return
    found = 1 + int(np.count_nonzero(np.diff(segments), axis=-1).max())
    if found > (most := kernel.max_documents(length)):
        raise ValueError(
            f'kernels.attention={name} takes {most} documents, padding among them, in a row of '
            f'{length:,} tokens, and one here has {found}; choose kernels.attention=blocked, or '
            'data.mask_documents=False'
        )


def attend(
    name: str,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
    is_full: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
    dropout_BNTS: Callable[[jax.Array], jax.Array] | None = None,
    softmax: Callable[..., jax.Array] | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Computes attention with the kernel of that name.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: the equation of the scores.
      segments_BT: tokens of different numbers do not see each other; None: rows are whole.
      sinks_N: a logit of each head that stands for no token.
      slopes_N: how much the logits of a head fall with each token back.
      key_bias_BKS: added to all logits of a key.
      is_full: a scalar that turns the window off where it is true. It may be traced: the layers of
        a scan differ in it.
      prefix_BT: tokens of one number that is not 0 see each other, later ones too.
      dropout_BNTS: drops probabilities in training (`modules.dropout.Dropout`).
      softmax: one of `SOFTMAX_KERNELS` in the place of plain operations, for `reference` alone.
      options: those of the row.

    Returns:
      [B, N, T, H] in the type of v.

    Raises:
      ValueError: for what the kernel does not serve, and where an array and its field of `scores`
        do not come together.
    """
    check_scores(name, scores, q_BNTH.dtype.name, q_BNTH.shape[-1])
    given = scores.collect_arrays(
        sinks_N=sinks_N,
        slopes_N=slopes_N,
        key_bias_BKS=key_bias_BKS,
        prefix_BT=prefix_BT,
        dropout_BNTS=dropout_BNTS,
    )
    if softmax is not None:
        given['softmax'] = softmax
    given |= options or {}
    kernel, length = ATTENTION_KERNELS[name], q_BNTH.shape[2]
    missing = -length % kernel.length_multiple
    if missing:
        q_BNTH, k_BKSH, v_BKSH = (pad_tokens(x, 2, missing) for x in (q_BNTH, k_BKSH, v_BKSH))
        segments_BT = None if segments_BT is None else pad_tokens(segments_BT, 1, missing)

    def compute(scores):
        out_BNTH = kernel.compute(q_BNTH, k_BKSH, v_BKSH, scores, segments_BT, **given)
        return out_BNTH[:, :, :length] if missing else out_BNTH

    if scores.window is None or is_full is None:
        return compute(scores)
    unbounded = dataclasses.replace(scores, window=None)
    return jax.lax.cond(is_full, lambda: compute(unbounded), lambda: compute(scores))


def pad_tokens(x: jax.Array, axis: int, n_padding: int) -> jax.Array:
    """Repeats the last place `missing` times: no token sees a later one, and each sees itself, so
    that all rows stay finite and the others do not change.
    """
    widths = [(0, n_padding if at == axis else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths, mode='edge')
