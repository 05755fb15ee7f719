"""The table of causal softmax attention kernels, and `attend`, which calls one by name.

A kernel takes q [B, N, T, H] and k, v [B, K, S, H] with S = T and K dividing N (grouped queries,
arXiv:2305.13245), `Scores`, and optionally segments [B, T]: a token attends to itself and to
earlier tokens of its own segment. It returns [B, N, T, H] in the type of v. `reference` defines the
operation; the others equal it to rounding (tests/modules/test_attention_kernels.py) and raise an
error that names any unsupported option.
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

    compute: (q, k, v, scores, segments_BT), and by name sinks_N, slopes_N, key_bias_BKS, prefix_BT
    and dropout_BNTS if it supports them. supports: the fields of `Scores` that it reads. platforms;
    dtypes of q, k and v; head_dims: None means any. length_multiple: `attend` pads rows to a
    multiple of it. forward_mode: contains 'logits' or 'gradient' if forward-mode differentiation of
    a model's logits or their gradient works. holds_scores: whether it materializes all scores, for
    a softmax of `kernels.softmax`. check_context_axis(length, parts): raises ValueError for a row
    length that it cannot shard over `parts` devices; None: it needs whole rows.
    max_documents(length): the most documents that a row may have; None: no limit. check: its rule
    for the rest of the config (`modules.facts`).
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
        """Returns whether q, k and v may have this type and width; None: any."""
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
    # On Ampere documents are a mask, and the gradient then needs an even length. JAX itself checks
    # that heads wider than 128 run on Hopper.
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
    """Raises ValueError if a kernel does not support what an attention layer needs.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      scores: the scores of the layer.
      dtype: the type of q, k and v; None: not checked.
      head_dim: the width of a head, H; None: not checked.
    """
    kernel, needed = choose(ATTENTION_KERNELS, name, 'kernels.attention'), scores.changed_fields()
    unsupported = [
        f'{field}={value}' for field, value in needed.items() if field not in kernel.supports
    ]
    if kernel.dtypes is not None and not kernel.accepts(dtype, None):
        unsupported.append(f'model.dtype={dtype} (only {", ".join(kernel.dtypes)})')
    if kernel.head_dims is not None and not kernel.accepts(None, head_dim):
        widths = kernel.head_dims
        unsupported.append(
            f'heads of width {head_dim} (only {widths[0]} to {widths[-1]} in steps of '
            f'{widths.step})'
        )
    if unsupported:
        alternatives = [
            alternative + (f' (on {", ".join(row.platforms)})' if row.platforms else '')
            for alternative, row in ATTENTION_KERNELS.items()
            if row.supports >= needed.keys() and row.accepts(dtype, head_dim)
        ]
        raise ValueError(
            f'kernels.attention={name} does not support {", ".join(unsupported)}. These kernels '
            f'do: {", ".join(alternatives)}.'
        )


def check_documents(name: str, segments: np.ndarray) -> None:
    """Raises ValueError if a row has more documents than a kernel supports.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      segments: the number of the document of each token, [.., T].
    """
    kernel, length = ATTENTION_KERNELS[name], segments.shape[-1]
    if kernel.max_documents is None:
        return
    n_documents = 1 + int(np.count_nonzero(np.diff(segments), axis=-1).max())
    if n_documents > (limit := kernel.max_documents(length)):
        raise ValueError(
            f'kernels.attention={name} supports at most {limit} documents in a row of {length:,} '
            f'tokens, counting padding as one; this row has {n_documents}. Choose '
            'kernels.attention=blocked, or data.mask_documents=False.'
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
    """Computes attention with a kernel chosen by name.

    Args:
      name: a row of `ATTENTION_KERNELS`.
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: the equation of the scores.
      segments_BT: tokens with different numbers do not see each other; None: rows are whole.
      sinks_N: a logit of each head that stands for no token.
      slopes_N: the decrease of a head's logits per token of distance.
      key_bias_BKS: added to all logits of a key.
      is_full: a scalar that turns the window off where true; traced if a scan's layers differ.
      prefix_BT: tokens with the same nonzero number see each other, later ones too.
      dropout_BNTS: drops probabilities in training (`modules.dropout.Dropout`).
      softmax: a kernel in `SOFTMAX_KERNELS`, for `reference` only; None: plain operations.
      options: options of the kernel.

    Returns:
      [B, N, T, H] in the type of v.

    Raises:
      ValueError: for options that the kernel does not support, and for an array without its field
        of `scores` or vice versa.
    """
    check_scores(name, scores, q_BNTH.dtype.name, q_BNTH.shape[-1])
    kernel_args = scores.collect_arrays(
        sinks_N=sinks_N,
        slopes_N=slopes_N,
        key_bias_BKS=key_bias_BKS,
        prefix_BT=prefix_BT,
        dropout_BNTS=dropout_BNTS,
    )
    if softmax is not None:
        kernel_args['softmax'] = softmax
    kernel_args |= options or {}
    kernel, length = ATTENTION_KERNELS[name], q_BNTH.shape[2]
    n_padding = -length % kernel.length_multiple
    if n_padding:
        q_BNTH, k_BKSH, v_BKSH = (pad_tokens(x, 2, n_padding) for x in (q_BNTH, k_BKSH, v_BKSH))
        segments_BT = None if segments_BT is None else pad_tokens(segments_BT, 1, n_padding)

    def compute(scores):
        out_BNTH = kernel.compute(q_BNTH, k_BKSH, v_BKSH, scores, segments_BT, **kernel_args)
        return out_BNTH[:, :, :length] if n_padding else out_BNTH

    if scores.window is None or is_full is None:
        return compute(scores)
    # A kernel's window is static, so a traced choice needs two calls, of which one runs.
    unbounded = dataclasses.replace(scores, window=None)
    return jax.lax.cond(is_full, lambda: compute(unbounded), lambda: compute(scores))


def pad_tokens(x: jax.Array, axis: int, n_padding: int) -> jax.Array:
    """Repeats the last token `n_padding` times.

    No token sees a later one, and each sees itself, so that all rows stay finite and the original
    tokens do not change.

    Args:
      x: tokens along `axis`.
      axis: the axis of tokens.
      n_padding: tokens to add.
    """
    widths = [(0, n_padding if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, mode='edge')
