"""Closed forms of the norms in NumPy float64, written from the papers, not from `modules.norms`.

x [M, D] are tokens, p parameters, o options of the layer including defaults. Running statistics are
dicts by name; w [M, 1] weights tokens, 0 for padding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


def mean(x):
    return np.mean(x, -1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, eps):
    return np.sqrt(mean(x**2) + eps)


def std(x, eps):
    return np.sqrt(mean((x - mean(x)) ** 2) + eps)


def affine(y, p):
    return y * p.get('scale', 1.0) + p.get('bias', 0.0)


def split_groups(x, groups):
    return x.reshape(*x.shape[:-1], groups, -1)


def layernorm(x, p, used, o):
    return affine((x - mean(x)) / std(x, o['eps']), p)


def l1norm(x, p, used, o):
    deviation = mean(np.abs(x - mean(x))) + o['eps']
    return affine((x - mean(x)) / deviation * (np.sqrt(2 / np.pi) if o['rescale'] else 1), p)


def rmsnorm(x, p, used, o):
    return affine(x / rms(x, o['eps']), p)


def crmsnorm(x, p, used, o):
    """Returns the first D entries of RMSNorm of the D + 1 entries that sum to zero."""
    whole = np.concatenate([x, -np.sum(x, -1, keepdims=True)], -1)
    return (whole / rms(whole, o['eps']))[:, :-1]


def pre_affine_rmsnorm(x, p, used, o):
    return rmsnorm(x * p['pre_scale'], p, used, o)


def gated_rmsnorm(x, p, used, o):
    n = rmsnorm(x, p, used, o)
    hidden = n @ p['down']
    return n * sigmoid((hidden * sigmoid(hidden)) @ p['up'])


def seednorm(x, p, used, o):
    size = x.shape[-1] // o['heads']
    gain = np.empty_like(x)
    for i in range(o['heads']):
        part = slice(i * size, (i + 1) * size)
        inner = x[:, part] @ p['beta'][part]
        gain[:, part] = p['scale'][part] + p['alpha'][part] * np.tanh(inner)[:, None]
    return x / rms(x, o['eps']) * gain


def ada_rmsnorm(x, p, used, o):
    return x / rms(x, o['eps']) * rms(p['alpha'] * x + p['beta'], o['eps'])


def dyt(x, p, used, o):
    return affine(np.tanh(p['alpha'] * x), p)


def evonorm_s0(x, p, used, o):
    grouped = split_groups(x, o['groups'])
    inverse = np.broadcast_to(1 / std(grouped, o['eps']), grouped.shape).reshape(x.shape)
    return affine(x * sigmoid(p['v'] * x) * inverse, p)


def no_norm(x, p, used, o):
    return x


def batchnorm(x, p, used, o):
    return affine((x - used['mean']) / np.sqrt(used['variance'] + o['eps']), p)


def batch_channel(x, p, used, o):
    y = split_groups(batchnorm(x, p, used, o), o['groups'])
    y = (y - mean(y)) / std(y, o['eps'])
    return (y * p['group_scale'][:, None] + p['group_bias'][:, None]).reshape(x.shape)


def evonorm_b0(x, p, used, o):
    over_batch = np.sqrt(used['variance'] + o['eps'])
    return affine(x / np.maximum(over_batch, p['v'] * x + std(x, o['eps'])), p)


def is_removed(stats, o):
    return stats['updates'] >= o['removal_start'] + o['removal_gap'] * o['order']


def apply_removal(x, p, used, o):
    return affine(x / (used['deviation'] if is_removed(used, o) else rms(x, o['eps'])), p)


def apply_centred_removal(x, p, used, o):
    return apply_removal(x - mean(x), p, used, o)


def moments(x, w):
    n = np.sum(w)
    centre = np.sum(x * w, 0) / n
    return centre, np.sum((x - centre) ** 2 * w, 0) / n, n


def measure_batch(x, w, stats, o):
    """Returns (the statistics that normalize x, the next running statistics)."""
    centre, variance, n = moments(x, w)
    batch_stats = {'mean': centre, 'variance': variance * n / (n - 1)}
    following = {k: (1 - o['momentum']) * stats[k] + o['momentum'] * batch_stats[k] for k in stats}
    return {'mean': centre, 'variance': variance}, following


def measure_ghosts(x, w, stats, o):
    """mu <- (1 - m)^n mu + sum_i (1 - m)^(n - i) m mu_i, and the same for the variance."""
    n, m = o['ghost_batches'], o['momentum']
    part_stats = [measure_batch(*part, stats, o)[0] for part in zip(*ghosts(x, w, n), strict=True)]
    used = {k: np.repeat([s[k] for s in part_stats], len(x) // n, 0) for k in stats}
    following = {k: (1 - m) ** n * stats[k] for k in stats}
    for i, (_, part_w) in enumerate(zip(*ghosts(x, w, n), strict=True), 1):
        size = np.sum(part_w)
        unbiased = part_stats[i - 1] | {
            'variance': part_stats[i - 1]['variance'] * size / (size - 1)
        }
        following = {k: following[k] + (1 - m) ** (n - i) * m * unbiased[k] for k in stats}
    return used, following


def ghosts(x, w, n):
    return np.split(x, n), np.split(w, n)


def measure_estimated(x, w, stats, o):
    centre, _, n = moments(x, w)
    variance = np.sum((x - stats['mean']) ** 2 * w, 0) / n
    batch_stats = {'mean': centre, 'variance': variance}
    following = {k: (1 - o['momentum']) * stats[k] + o['momentum'] * batch_stats[k] for k in stats}
    return following, following


def measure_batch_channel(x, w, stats, o):
    return (measure_estimated if o['estimated'] else measure_batch)(x, w, stats, o)


def measure_removal(x, w, stats, o):
    batch_deviation = np.sum(rms(x, o['eps']) * w) / np.sum(w)
    deviation = o['ema_decay'] * stats['deviation'] + (1 - o['ema_decay']) * batch_deviation
    if stats['updates'] == 0:
        deviation = batch_deviation
    elif is_removed(stats, o):
        deviation = stats['deviation']
    return stats, {'deviation': deviation, 'updates': stats['updates'] + 1}


def measure_centred_removal(x, w, stats, o):
    return measure_removal(x - mean(x), w, stats, o)


def derivative(f, value, step=1e-6):
    """Returns df/dvalue of a scalar f(value), by central differences."""
    value = np.float64(value)
    slopes = np.empty(value.size)
    for i in range(value.size):
        move = np.zeros(value.size)
        move[i] = step
        move = move.reshape(value.shape)
        slopes[i] = (f(value + move) - f(value - move)) / (2 * step)
    return slopes.reshape(value.shape)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The closed form of a norm.

    apply(x, p, used, o) -> y. measure(x, w, stats, o) -> (used, next stats) in training; in
    evaluation, `used` are the running statistics. constant: no gradient through `used`.
    """

    apply: Callable[..., Any]
    measure: Callable[..., Any] | None = None
    constant: bool = False


REFERENCES = {
    'ada_rmsnorm': Reference(ada_rmsnorm),
    'batch_channel': Reference(batch_channel, measure_batch_channel),
    'batchnorm': Reference(batchnorm, measure_batch),
    'crmsnorm': Reference(crmsnorm),
    'dyt': Reference(dyt),
    'evonorm_b0': Reference(evonorm_b0, measure_batch),
    'evonorm_s0': Reference(evonorm_s0),
    'gated_rmsnorm': Reference(gated_rmsnorm),
    'ghost_batchnorm': Reference(batchnorm, measure_ghosts),
    'l1norm': Reference(l1norm),
    'layernorm': Reference(layernorm),
    'layernorm_removal': Reference(apply_centred_removal, measure_centred_removal),
    'none': Reference(no_norm),
    'pre_affine_rmsnorm': Reference(pre_affine_rmsnorm),
    'rmsnorm': Reference(rmsnorm),
    'rmsnorm_removal': Reference(apply_removal, measure_removal),
    'seednorm': Reference(seednorm),
}
