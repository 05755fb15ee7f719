"""RMSNorm, softmax and cross-entropy over rows by PyTorch, compiled, and by Liger, on a GPU."""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

ROUNDS = 7
EPS = 1e-6


def _functions(name: str) -> dict[str, Callable]:
    """Returns the functions (x, scale or labels) -> y to differentiate."""
    if name == 'Liger':
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return {
            'rms_norm': lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPS),
            'cross_entropy': lambda x, y: LigerCrossEntropyFunction.apply(
                x, y, None, -100, 1e-4, 0.0, 'sum'
            )[0],
        }

    def cross_entropy(x, labels):
        x = x.float()
        log_z = torch.logsumexp(x, -1)
        label_logit = x.gather(-1, labels[:, None])[:, 0]
        return (log_z - label_logit + 1e-4 * log_z**2).sum()

    def softmax(x, _):
        return torch.softmax(x, -1)

    def rms_norm(x, scale):
        return F.rms_norm(x, scale.shape, scale, EPS)

    functions = {'rms_norm': rms_norm, 'softmax': softmax, 'cross_entropy': cross_entropy}
    return {name: torch.compile(function, dynamic=False) for name, function in functions.items()}


def seconds(name: str, case: str, shape: tuple[int, int], dtype: str, count: int) -> float:
    """Returns the seconds of a call of `case`, over `count` sets of arrays."""
    operation, direction = case.split()
    functions = _functions(name)
    if operation not in functions:
        raise NotImplementedError(f'{name} has no {operation}')
    sets = [_draw(operation, shape, dtype, direction == 'both') for _ in range(count)]
    # Liger's cross-entropy overwrites its logits: they are right in the first call only.
    function = functions[operation]

    def run():
        for x, g, scale_or_labels in sets:
            if direction == 'forward':
                with torch.no_grad():
                    function(x, scale_or_labels)
            else:
                y = function(x, scale_or_labels)
                inputs = [x, scale_or_labels] if operation == 'rms_norm' else [x]
                torch.autograd.grad(y, inputs, None if y.ndim == 0 else g)

    return _median_seconds(run) / count


def time_attention(shape: tuple[int, ...]) -> float:
    """Causal attention of [B, N, T, H], forward and backward, in bfloat16."""
    q, k, v = (
        torch.randn(shape, device='cuda', dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    g = torch.randn_like(q)

    def run():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, [q, k, v], g)

    return _median_seconds(run)


def _median_seconds(run: Callable[[], None]) -> float:
    """Returns seconds, after three rounds that do not count."""
    milliseconds = []
    for _ in range(ROUNDS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds[3:]) / 1e3


def _draw(operation, shape, dtype, is_differentiated):
    kind = getattr(torch, dtype)
    x, g = (torch.randn(shape, device='cuda', dtype=kind) for _ in range(2))
    x.requires_grad_(is_differentiated)
    if operation == 'rms_norm':
        scale_or_labels = torch.ones(shape[1:], device='cuda', dtype=kind).requires_grad_(
            is_differentiated
        )
    else:
        scale_or_labels = torch.randint(0, shape[1], shape[:1], device='cuda')
    return x, g, scale_or_labels
