"""cuDNN's fused attention on GPUs, through JAX.

On Hopper and later, documents are passed as offsets into a row. JAX's function for that has no
public name (jax 0.11 and 0.12), and its vmap rule drops the offsets; `_merge_runs` replaces that
rule.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from modules.kernels.attention.base import Scores
from modules.numerics import ATTENTION_OUTPUT
from modules.parallel.axes import count_axis_shards

# A row of T tokens may have M = max(MIN_DOCUMENTS, T / TOKENS_PER_DOCUMENT) documents. cuDNN keeps
# softmax statistics of 4 B M N T bytes: as if each document were as long as the row.
TOKENS_PER_DOCUMENT, MIN_DOCUMENTS = 64, 32
OFFSET_PARAMETERS = ('q_seqlen', 'kv_seqlen', 'q_offsets', 'kv_offsets', 'scale', 'mask_type')
OFFSET_PARAMETERS += ('sliding_window_length',)


def cudnn(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention by cuDNN, which never stores T x T scores.

    Computes the same as `reference`, with `scale` and `window`. JAX shards the call over the batch
    and the heads. Segments are runs of equal numbers: tokens of two runs do not see each other. On
    Hopper and later GPUs, a row has at most `max_documents`; rows with more are NaN. Ampere has no
    offsets: there, segments become a bias [B, 1, T, T] in the type of q, and no block of keys is
    skipped.

    Args:
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: the scale and the window.
      segments_BT: the number of each token's segment; None: a single segment.

    Returns:
      [B, N, T, H] in the type of v.

    Raises:
      ValueError: if cuDNN is not installed, or JAX lacks the function.
    """
    check_cudnn()
    arrays = [jnp.swapaxes(x, 1, 2) for x in (q_BNTH, k_BKSH, v_BKSH)]
    scale = scores.compute_scale(q_BNTH.shape[-1])
    if segments_BT is not None and has_offsets():
        out_BTNH = _attend_documents(*arrays, scale, scores.window, segments_BT)
        return jnp.swapaxes(out_BTNH, 1, 2)
    same_B1TS = None
    if segments_BT is not None:
        same_B1TS = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    out_BTNH = jax.nn.dot_product_attention(
        *arrays,
        mask=same_B1TS,
        scale=scale,
        is_causal=True,
        # (back, ahead), without the token itself
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation='cudnn',
    )
    return jnp.swapaxes(out_BTNH, 1, 2)


def check_cudnn() -> None:
    """Raises ValueError without cuDNN, or with a JAX that cannot pass documents as offsets."""
    try:
        fused.check_cudnn_version()
    except RuntimeError as error:
        raise ValueError(
            f'kernels.attention=cudnn needs cuDNN: {error} Install it with uv sync --extra cuda.'
        ) from error
    missing = set(OFFSET_PARAMETERS) - set(
        inspect.signature(fused.dot_product_attention).parameters
    )
    if missing:
        raise ValueError(
            f'kernels.attention=cudnn needs jax 0.11 or 0.12: in jax {jax.__version__} its '
            f'function has no {", ".join(sorted(missing))}. Install one of these versions, or '
            'choose kernels.attention=blocked.'
        )


def assume_capability(capability: str) -> None:
    """Makes JAX compile cuDNN calls for a compute capability, such as '9.0', in this process.

    JAX would otherwise query the local devices and the cuDNN library, which compiling does not
    need.
    """

    def parse_version(text: str) -> list[int]:
        return [int(part) for part in text.split('.')]

    # ty: the functions that these replace have other parameter names.
    fused.check_cudnn_version = lambda: 91000  # ty: ignore[invalid-assignment]
    fused.check_compute_capability = lambda required: (  # ty: ignore[invalid-assignment]
        parse_version(capability) >= parse_version(required)
    )
    fused.is_cuda_compute_capability_equal = (  # ty: ignore[invalid-assignment]
        lambda queried: capability == queried
    )


def max_documents(length: int) -> int:
    """Returns the most documents that a row of `length` tokens may have on the local devices."""
    return max(MIN_DOCUMENTS, length // TOKENS_PER_DOCUMENT) if has_offsets() else length


def has_offsets() -> bool:
    """Returns whether the devices take documents as offsets: Hopper and later."""
    return fused.check_compute_capability('9.0')


def lengths_and_offsets(segments_BT: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the length [B, M] of each run of equal numbers and its start [B, M + 1], both int32.

    Unused entries are -1. These are sums over the row, because XLA does not shard a scatter.

    Args:
      segments_BT: the number of each token's segment.
      capacity: M, the most runs of a row.
    """
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    number_B1T = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)[:, None]
    index_1M1 = jnp.arange(capacity, dtype=jnp.int32)[None, :, None]
    lengths_BM = jnp.sum(number_B1T == index_1M1, axis=2, dtype=jnp.int32)
    starts_BM = jnp.sum(number_B1T < index_1M1, axis=2, dtype=jnp.int32)
    lengths_BM, starts_BM = (jnp.where(lengths_BM > 0, x, -1) for x in (lengths_BM, starts_BM))
    return lengths_BM, jnp.pad(starts_BM, ((0, 0), (0, 1)), constant_values=-1)


def _attend_documents(q_BTNH, k_BSKH, v_BSKH, scale, window, segments_BT) -> jax.Array:
    """Computes attention within each document; NaN in rows with too many documents."""
    length = segments_BT.shape[1]
    elements = q_BTNH.size // (count_axis_shards('B') * count_axis_shards('N'))
    if elements >= 2**31:
        raise ValueError(
            'kernels.attention=cudnn indexes documents with 32 bits, so the queries of a device '
            f'may have at most 2,147,483,647 elements; got {elements:,}. Use more '
            'train.microbatches, or more devices.'
        )
    if jax.__version_info__ < (0, 12):  # its key offsets are wrong by a factor of N / K
        k_BSKH, v_BSKH = (
            jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH)
        )
    lengths_BM, offsets_BM = lengths_and_offsets(segments_BT, max_documents(length))
    fits_B = jnp.sum(jnp.maximum(lengths_BM, 0), axis=1) == length
    # NaN enters through q, as XLA fuses this `where` with the operation that computes q.
    q_BTNH = jnp.where(fits_B[:, None, None, None], q_BTNH, jnp.nan)
    return _attend((scale, window), q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM) -> jax.Array:
    """Computes attention within documents; options: (scale, window).

    Under `jax.vmap` the rows of all runs are computed in one call.
    """
    return _attend_with_residuals(options, q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM)[0]


def _bind_kernel(options, lengths_BM, offsets_BM) -> Callable[..., jax.Array]:
    scale, window = options
    return functools.partial(
        fused.dot_product_attention,
        q_seqlen=lengths_BM,
        kv_seqlen=lengths_BM,
        q_offsets=offsets_BM,
        kv_offsets=offsets_BM,
        scale=scale,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )


def _vjp(options, q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM) -> tuple[Any, list, list]:
    """Returns the pullback, the available arrays, and the index of each residual among them.

    Available are the arguments and, as the last, the output. A residual that is not among them has
    the index None.
    """
    inputs = (q_BTNH, k_BSKH, v_BSKH)
    out_BTNH, pull = jax.vjp(_bind_kernel(options, lengths_BM, offsets_BM), *inputs)
    available = [*inputs, lengths_BM, offsets_BM, out_BTNH]
    leaves = jax.tree.leaves(pull)
    indices = [next((i for i, x in enumerate(available) if x is leaf), None) for leaf in leaves]
    return pull, available, indices


def _attend_with_residuals(options, *arrays) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the output and the residuals that are neither arguments nor the output."""

    def compute(*arrays):
        pull, available, indices = _vjp(options, *arrays)
        residuals = zip(jax.tree.leaves(pull), indices, strict=True)
        return available[-1], [residual for residual, index in residuals if index is None]

    # Named, so that remat policies can keep the output and its residuals (`modules.numerics`).
    return checkpoint_name(_merge_runs(compute)(*arrays), ATTENTION_OUTPUT)


def _forward(options, *arrays):
    out_BTNH, extra_residuals = _attend_with_residuals(options, *arrays)
    return out_BTNH, (arrays, out_BTNH, extra_residuals)


def _backward(options, residuals, grad_BTNH):
    def compute(grad_BTNH, arrays, out_BTNH, extra_residuals):
        indices = []

        def trace_pullback(*arrays):
            pull, _, leaf_indices = _vjp(options, *arrays)
            indices.extend(leaf_indices)
            return pull

        # A function cannot be a residual. Its structure is traced again, and filled with the arrays
        # that the forward pass has kept.
        structure = jax.tree.structure(jax.eval_shape(trace_pullback, *arrays))
        available, extra = [*arrays, out_BTNH], iter(extra_residuals)
        leaves = [next(extra) if index is None else available[index] for index in indices]
        return jax.tree.unflatten(structure, leaves)(grad_BTNH)

    return *_merge_runs(compute)(grad_BTNH, *residuals), None, None


_attend.defvjp(_forward, _backward)


def _merge_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of arrays [B, ..] compute all runs in one call under `jax.vmap`."""
    compute = jax.custom_batching.custom_vmap(function)

    @compute.def_vmap
    def batch_rule(runs, is_batched, *arrays):
        def flatten_runs(x, has_runs):
            x = x if has_runs else jnp.broadcast_to(x, (runs, *x.shape))
            return x.reshape(runs * x.shape[1], *x.shape[2:])

        stacked = compute(*jax.tree.map(flatten_runs, arrays, tuple(is_batched)))
        stacked = jax.tree.map(lambda x: x.reshape(runs, x.shape[0] // runs, *x.shape[1:]), stacked)
        return stacked, jax.tree.map(lambda _: True, stacked)

    return compute
