"""Algebra that folds norms into neighbouring matrices without changing the function.

Arrays are NumPy's or JAX's, of any float type, and may have leading axes [...] such as the layer's.
A matrix that reads the stream is [..., D, O], with a bias [..., O]; a matrix that writes to it is
[..., I, D]. In float64 every identity holds to about 1e-15. Main source: arXiv:2305.14858.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Arrays = Mapping[str, Any]


class Affine(NamedTuple):
    """y = c(x) * scale + shift, [..., D]; c subtracts the mean if `centred`. None: 1 and 0."""

    scale: Any = None
    shift: Any = None
    centred: bool = False


def fold_into_reader(affine: Affine, kernel_DO: Any, bias_O: Any = None) -> tuple[Any, Any]:
    """Returns (A', a') with x A' + a' = y A + a for y = affine(x).

    A' = (I - 1 1^T / D) diag(scale) A, without the first factor if nothing is centred, and a' =
    shift A + a, or None if there is neither. Sources: running statistics arXiv:2208.01313, a
    removed norm arXiv:2507.02559.

    Args:
      affine: the affine map to fold.
      kernel_DO: A, the matrix that reads y.
      bias_O: a; None: no bias.
    """
    if affine.shift is not None:
        shift_O = (affine.shift[..., None, :] @ kernel_DO)[..., 0, :]
        bias_O = shift_O if bias_O is None else shift_O + bias_O
    if affine.scale is not None:
        kernel_DO = affine.scale[..., :, None] * kernel_DO
    if affine.centred:
        kernel_DO = kernel_DO - kernel_DO.mean(-2, keepdims=True)
    return kernel_DO, bias_O


def recentre_writer(kernel_ID: Any) -> Any:
    """Returns W minus its mean over D, for a matrix, an embedding or a bias that writes to the
    stream.

    If all writers are so, the stream of a pre-norm model has mean 0: layernorm and rmsnorm agree.
    """
    return kernel_ID - kernel_ID.mean(-1, keepdims=True)


def compress_writer(kernel_ID: Any) -> Any:
    """Drops the last coordinate of a stream that sums to zero, W [..., I, D - 1]."""
    return kernel_ID[..., :-1]


def compress_reader(kernel_DO: Any) -> Any:
    """Returns A[:-1] - A[-1:], which reads the last coordinate as minus the sum of the others."""
    return kernel_DO[..., :-1, :] - kernel_DO[..., -1:, :]


def learned_affine(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """Returns the learned scale and bias.

    Args:
      params: parameters of the norm.
      stats: running statistics; unused.
      eps: unused.
    """
    return Affine(params.get('scale'), params.get('bias'))


def batch_affine(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias as an affine map.

    Args:
      params: parameters of the norm.
      stats: has `mean` and `variance`.
      eps: added under the root.
    """
    scale = params.get('scale', 1.0) / (stats['variance'] + eps) ** 0.5
    return Affine(scale, params.get('bias', 0.0) - stats['mean'] * scale)


def unified_affine(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """Returns x / sqrt(mean_square + eps) * scale + bias as an affine map.

    Args:
      params: parameters of the norm.
      stats: has `mean_square`.
      eps: added under the root.
    """
    return Affine(params['scale'] / (stats['mean_square'] + eps) ** 0.5, params['bias'])


def removal_affine(params: Arrays, stats: Arrays, eps: float) -> Affine:
    """Returns x / deviation * scale + bias as an affine map, with one deviation per norm.

    Args:
      params: parameters of the norm.
      stats: has `deviation`.
      eps: unused.
    """
    per_channel = stats['deviation'][..., None]
    return Affine(params.get('scale', 1.0) / per_channel, params.get('bias'))


AffineFunction = Callable[[Arrays, Arrays, float], Affine]

# Norm -> the learned affine map that follows x / rms(x) or standardize(x).
LEARNED_AFFINE: dict[str, AffineFunction] = {'layernorm': learned_affine, 'rmsnorm': learned_affine}
# Norm that is affine in evaluation -> its affine map.
CONSTANT_AFFINE: dict[str, AffineFunction] = {
    'batchnorm': batch_affine,
    'ghost_batchnorm': batch_affine,
    'layernorm_removal': lambda *args: removal_affine(*args)._replace(centred=True),
    'rmsnorm_removal': removal_affine,
    'unified': unified_affine,
}
