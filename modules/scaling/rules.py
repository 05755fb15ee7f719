"""Published rules for learning rate, batch size and the allocation of compute, as plain numbers.

Batches count tokens, losses are in nats, compute is 6 N D FLOPs. N leaves embeddings out in Step
Law and in Kaplan's rules, and counts all parameters in Chinchilla's. All arguments must be positive
and finite; a ValueError names an argument that is not.

The `Origin` of a rule has the range of its experiments and the source of its constants. Power laws
of the critical batch in tokens (arXiv:2410.21676, arXiv:2505.13738) are left out: only their
exponents, near 0.47, could be confirmed, and not the factors before them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

FLOPS_PER_PF_DAY = 1e15 * 24 * 3600
LOSS_RANGE = 0.01, 100.0  # nats; beyond, the power of `critical_batch` leaves all experiments


class Origin(NamedTuple):
    """Source of a rule and the range of its experiments."""

    source: str
    read_in: str  # the text from which its constants were read
    # {quantity: (minimum, maximum)} of parameters, tokens, batch_tokens, or batch_ratio, the batch
    # over the batch for which the learning rate was tuned; empty if unknown.
    ranges: Mapping[str, tuple[float, float]] = {}


class Allocation(NamedTuple):
    """Division of a compute budget."""

    parameters: float
    tokens: float


class Overhead(NamedTuple):
    """Steps and tokens with a batch, over the fewest steps and tokens to the same loss."""

    steps: float
    tokens: float


class LossSurface(NamedTuple):
    """L = E + a / N^alpha + b / D^beta; an allocation does not depend on E."""

    a: float
    alpha: float
    b: float
    beta: float


HOFFMANN_SURFACE = LossSurface(a=406.4, alpha=0.33917, b=410.7, beta=0.28491)
BESIROGLU_SURFACE = LossSurface(a=482.01, alpha=0.3478, b=2085.43, beta=0.3658)

KAPLAN_RANGE = {'parameters': (768, 1.5e9), 'tokens': (22e6, 23e9)}
CHINCHILLA_RANGE = {'parameters': (70e6, 16e9), 'tokens': (5e9, 500e9)}
STEP_LAW = Origin(
    'arXiv:2503.04715',
    "the authors' 1000 bootstrap fits; range: their dense runs (github step-law/steplaw)",
    {'parameters': (2.14e8, 1.08e9), 'tokens': (4e9, 1e11), 'batch_tokens': (2**15, 2**22)},
)
LINEAR_SGD = Origin(
    'arXiv:1706.02677',
    "quotes of the paper's rule and figure 1: 64 to 8192 images, SGD, rates for 256",
    {'batch_ratio': (1 / 4, 32)},
)
SQRT_SGD = Origin(
    'arXiv:1705.08741',
    "the authors' code and commands: up to 4096 images, rates for 128 (github eladhoffer/bigBatch)",
    {'batch_ratio': (1, 32)},
)
SQRT_ADAM = Origin('arXiv:2205.10287', "the paper's abstract, which has the power alone")
NOISE_SCALE = Origin('arXiv:1812.06162', 'notes of others that quote its equation')
KAPLAN = Origin(
    'arXiv:2001.08361', 'the text of the paper, section 5.1 and tables 5 and 6', KAPLAN_RANGE
)
HOFFMANN = Origin(
    'arXiv:2203.15556',
    'the text of the paper (A, B); exponents unrounded, from github '
    'epoch-research/analyzing-chinchilla',
    CHINCHILLA_RANGE,
)
BESIROGLU = Origin(
    'arXiv:2404.10102',
    "the authors' notebook and data (github epoch-research/analyzing-chinchilla)",
    {'parameters': (5.7e7, 1.62e10), 'tokens': (8.1e8, 3.2e11)},
)
TWENTY_TOKENS = Origin(
    'arXiv:2203.15556', 'the text of the paper, table 3 (approach 1)', CHINCHILLA_RANGE
)
ONE_EPOCH = Origin('arXiv:1906.06669', 'others that cite it, not the paper: not checked')


def step_law_rate(parameters: float, tokens: float) -> float:
    """1.79 N^-0.713 D^0.307: the peak, for AdamW and a cosine down to 1e-5, at `step_law_batch`.

    N counts no embeddings.
    """
    check_positive(parameters=parameters, tokens=tokens)
    return 1.79 * parameters**-0.713 * tokens**0.307


def step_law_batch(tokens: float) -> float:
    """0.58 D^0.571 tokens, whatever the size of the model."""
    check_positive(tokens=tokens)
    return 0.58 * tokens**0.571


def linear_rate(base_lr: float, base_batch: float, batch: float) -> float:
    """base_lr B / B0, for SGD (arXiv:1706.02677).

    Args:
      base_lr: tuned for `base_batch`.
      base_batch: B0, tokens.
      batch: B, tokens.

    Returns:
      The learning rate for B.
    """
    check_positive(base_lr=base_lr, base_batch=base_batch, batch=batch)
    return base_lr * batch / base_batch


def sqrt_rate(base_lr: float, base_batch: float, batch: float) -> float:
    """base_lr sqrt(B / B0): for SGD arXiv:1705.08741, for Adam arXiv:2205.10287.

    For Adam the paper scales betas and epsilon too.

    Args:
      base_lr: tuned for `base_batch`.
      base_batch: B0, tokens.
      batch: B, tokens.

    Returns:
      The learning rate for B.
    """
    check_positive(base_lr=base_lr, base_batch=base_batch, batch=batch)
    return base_lr * math.sqrt(batch / base_batch)


def saturating_rate(base_lr: float, base_batch: float, batch: float, critical: float) -> float:
    """base_lr (1 + C / B0) / (1 + C / B): linear far below the critical batch C, flat far above.

    The ratio of lr_max / (1 + C / B) at two batches, for SGD (arXiv:1812.06162).

    Args:
      base_lr: tuned for `base_batch`.
      base_batch: B0, tokens.
      batch: B, tokens.
      critical: C, tokens.

    Returns:
      The learning rate for B.
    """
    check_positive(base_lr=base_lr, base_batch=base_batch, batch=batch, critical=critical)
    return base_lr * (1 + critical / base_batch) / (1 + critical / batch)


def critical_batch(loss: float) -> float:
    """2.1e8 / L^(1 / 0.21) tokens (arXiv:2001.08361, table 5).

    The loss is on WebText2, with a vocabulary of 50257; other data has another loss.
    """
    check_positive(loss=loss)
    low, high = LOSS_RANGE
    if not low <= loss <= high:
        raise ValueError(f'loss must be from {low:g} to {high:g} nats, got {loss:g}')
    return 2.1e8 / loss ** (1 / 0.21)


def overhead(batch: float, critical: float) -> Overhead:
    """1 + C / B times the fewest steps, 1 + B / C times the fewest tokens, to the same loss.

    From (S / S_min - 1)(E / E_min - 1) = 1 with C = E_min / S_min (arXiv:1812.06162; for language
    models arXiv:2001.08361, section 5.1).
    """
    check_positive(batch=batch, critical=critical)
    return Overhead(1 + critical / batch, 1 + batch / critical)


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D."""
    check_positive(parameters=parameters, tokens=tokens)
    return 6 * parameters * tokens


def kaplan_allocation(flops: float) -> Allocation:
    """1.3e9 C^0.73 parameters without embeddings, 2e10 C^0.27 tokens; C = flops in PF-days.

    C is the compute with batches far below the critical batch, and the tokens are for the critical
    batch, 2 C / (6 N) (arXiv:2001.08361, table 6; its equation 6.7 has 4e10 C^0.26).
    """
    check_positive(flops=flops)
    days = flops / FLOPS_PER_PF_DAY
    return Allocation(1.3e9 * days**0.73, 2e10 * days**0.27)


def kaplan_batch(flops: float) -> float:
    """2e6 C^0.24 tokens: the critical batch at the final loss of `kaplan_allocation`."""
    check_positive(flops=flops)
    return 2e6 * (flops / FLOPS_PER_PF_DAY) ** 0.24


def chinchilla_allocation(flops: float, surface: LossSurface) -> Allocation:
    """The least L = E + a / N^alpha + b / D^beta with 6 N D = flops, all parameters counted.

    N = G (flops / 6)^(beta / (alpha + beta)), G = (alpha a / (beta b))^(1 / (alpha + beta))
    (arXiv:2203.15556, equation 4). `HOFFMANN_SURFACE` has the paper's exponents unrounded: its
    table A3 follows from these, and the 0.34 and 0.28 of its text miss it by a fifth.
    `BESIROGLU_SURFACE` is a fit to the same runs, read off the paper's figure, and agrees with the
    paper's approaches 1 and 2.
    """
    check_positive(flops=flops)
    a, alpha, b, beta = surface
    scale = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    parameters = scale * (flops / 6) ** (beta / (alpha + beta))
    return Allocation(parameters, flops / 6 / parameters)


def twenty_tokens(parameters: float) -> float:
    """20 N: the result of approaches 1 and 2 of arXiv:2203.15556."""
    check_positive(parameters=parameters)
    return 20 * parameters


def one_epoch_tokens(parameters: float) -> float:
    """5 N, each seen once (arXiv:1906.06669)."""
    check_positive(parameters=parameters)
    return 5 * parameters


def check_positive(**numbers: float) -> None:
    """Raises ValueError, by name, for a number that is not positive and finite."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f'{name} must be a positive number, got {value:g}')
