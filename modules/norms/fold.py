"""Folding norms into the matrices beside them: the same function with fewer parameters or none.

Arrays are numpy's or JAX's, of any float type, and may have leading axes [...] such as the layer's.
A matrix that reads the stream is [..., D, O], with a bias [..., O]; one that writes to it is
[..., I, D]. Nothing here rounds: in float64 every identity holds to about 1e-15.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Arrays = Mapping[str, Any]


class Affine(NamedTuple):
    """y = c(x) * scale + shift over the last axis; c takes off the mean where `centred`.

    scale, shift: [..., D]; None stands for 1 and for 0.
    """

    scale: Any = None
    shift: Any = None
    centred: bool = False


def fold_into_reader(affine: Affine, kernel_DO: Any, bias_O: Any = None) -> tuple[Any, Any]:
    """(A', a') with x A' + a' = y A + a for y = affine(x).

    A' = (I - 1 1^T / D) diag(scale) A, without the first factor where nothing is centred, and
    a' = shift A + a, None where there is neither. Sources: arXiv:2305.14858 (gain and bias),
    arXiv:2208.01313 (running statistics), arXiv:2507.02559 (a removed norm).
    """
    if affine.shift is not None:
        added_O = (affine.shift[..., None, :] @ kernel_DO)[..., 0, :]
        bias_O = added_O if bias_O is None else added_O + bias_O
    if affine.scale is not None:
        kernel_DO = affine.scale[..., :, None] * kernel_DO
    if affine.centred:
        kernel_DO = kernel_DO - kernel_DO.mean(-2, keepdims=True)
    return kernel_DO, bias_O


def recentre_writer(kernel_ID: Any) -> Any:
    """W - mean of W over D: what it adds to the stream has mean zero over D, else is unchanged.

    For embeddings [V, D] and biases [D] too. Where all writers are so, mean(x) = 0 for the stream x
    of a pre-norm model, and layernorm and rmsnorm are the same. Source: arXiv:2305.14858.
    """
    return kernel_ID - kernel_ID.mean(-1, keepdims=True)


def compress_writer(kernel_ID: Any) -> Any:
    """W [..., I, D - 1]: without the last coordinate of a stream that adds up to zero.

    Source: arXiv:2305.14858.
    """
    return kernel_ID[..., :-1]


def compress_reader(kernel_DO: Any) -> Any:
    """A[:-1] - A[-1:] [..., D - 1, O]: reads the last coordinate of x as minus the sum of the rest.

    Its bias stays. Source: arXiv:2305.14858.
    """
    return kernel_DO[..., :-1, :] - kernel_DO[..., -1:, :]


def learned(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """What `layernorm` and `rmsnorm` do after they have normalized."""
    del stats, eps
    return Affine(params.get('scale'), params.get('bias'))


def batch_statistics(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """`batchnorm` in evaluation: (x - mean) / sqrt(variance + eps) * scale + bias."""
    scale = params.get('scale', 1.0) / (stats['variance'] + eps) ** 0.5
    return Affine(scale, params.get('bias', 0.0) - stats['mean'] * scale)


def unified(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """`unified` in evaluation: x / sqrt(mean_square + eps) * scale + bias."""
    return Affine(params['scale'] / (stats['mean_square'] + eps) ** 0.5, params['bias'])


def removed(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """A removed `rmsnorm`: x / deviation * scale, the deviation one number a norm."""
    del eps
    per_channel = stats['deviation'][..., None]
    return Affine(params.get('scale', 1.0) / per_channel, params.get('bias'))


def removed_centred(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """A removed `layernorm`: (x - mean(x)) / deviation * scale + bias."""
    return removed(params, stats, eps)._replace(centred=True)


AffineOf = Callable[[Arrays, Arrays, float], Affine]

# (parameters, statistics, eps) -> the affine map that follows x / rms(x) or standardize(x).
LEARNED: dict[str, AffineOf] = {'layernorm': learned, 'rmsnorm': learned}
# -> the affine map that is all such a norm does in evaluation.
CONSTANT: dict[str, AffineOf] = {
    'batchnorm': batch_statistics,
    'ghost_batchnorm': batch_statistics,
    'layernorm_removal': removed_centred,
    'rmsnorm_removal': removed,
    'unified': unified,
}
