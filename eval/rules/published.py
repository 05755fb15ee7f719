"""Each published rule at one size of model and data, with the range that it was fitted on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.text import render
from modules.scaling import rules
from modules.scaling.rules import Fit

WITHIN, BEYOND, UNKNOWN = 'within', 'beyond', 'not known'


@dataclass(frozen=True)
class Given:
    """What the rules are asked about. Batches count tokens; loss is in nats.

    ValueError where a number is missing or not positive.
    """

    parameters: float | None = None
    tokens: float | None = None
    batch_tokens: float | None = None
    base_lr: float | None = None
    base_batch: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if value is not None}
        missing = [f'--{name}' for name in ('parameters', 'tokens') if name not in numbers]
        if missing:
            raise ValueError(
                f'{" and ".join(missing)} missing: give both, as --parameters=124e6 --tokens=2.5e9'
            )
        rules.check_positive(**numbers)
        if ('base_lr' in numbers) != ('base_batch' in numbers):
            raise ValueError(
                '--base_lr and --base_batch go together: a rate and its batch, in tokens'
            )
        if 'base_lr' in numbers and 'batch_tokens' not in numbers:
            raise ValueError('--base_lr needs --batch_tokens, the batch to scale the rate to')


@dataclass(frozen=True)
class Rule:
    """What one rule says. `outside` are the quantities beyond its range, in words."""

    name: str
    what: str
    value: float
    unit: str
    range: str
    holds: str
    outside: str
    source: str
    read_in: str


def rule(name: str, what: str, value: float, unit: str, fit: Fit, **at: float) -> Rule:
    """`at` are the quantities that decide whether the rule is within its range."""
    outside = [
        f'{words(quantity)} {short(value_at)} ({span(fit, quantity)})'
        for quantity, value_at in at.items()
        if quantity in fit.on and not fit.on[quantity][0] <= value_at <= fit.on[quantity][1]
    ]
    judged = [quantity for quantity in at if quantity in fit.on]
    holds = BEYOND if outside else WITHIN if judged else UNKNOWN
    spans = ', '.join(f'{words(quantity)} {span(fit, quantity)}' for quantity in judged)
    return Rule(
        name,
        what,
        value,
        unit,
        spans or UNKNOWN,
        holds,
        ', '.join(outside),
        fit.source,
        fit.read_in,
    )


def words(quantity: str) -> str:
    return quantity.replace('_', ' ')


def span(fit: Fit, quantity: str) -> str:
    least, most = fit.on[quantity]
    return f'{short(least)} to {short(most)}'


def short(value: float) -> str:
    """Three digits: 2.5e9, 0.0023."""
    return f'{value:.3g}'.replace('e+0', 'e').replace('e+', 'e')


def published(given: Given) -> list[Rule]:
    """Every rule that the given numbers suffice for."""
    return [*rates_and_batches(given), *allocations(given), *at_the_batch(given)]


def rates_and_batches(given: Given) -> list[Rule]:
    size = {'parameters': given.parameters, 'tokens': given.tokens}
    rate = rules.step_law_rate(given.parameters, given.tokens)
    batch = rules.step_law_batch(given.tokens)
    found = [
        rule('step_law', 'learning rate, AdamW', rate, '', rules.STEP_LAW, **size),
        rule('step_law', 'batch', batch, 'tokens', rules.STEP_LAW, **size, batch_tokens=batch),
    ]
    critical = critical_batch(given)
    of = 'at this loss' if given.loss else 'at this compute'
    return [
        *found,
        rule('kaplan', f'critical batch {of}', critical, 'tokens', rules.KAPLAN, **size),
    ]


def critical_batch(given: Given) -> float:
    """By the loss where it is given, else by the compute."""
    if given.loss:
        return rules.critical_batch(given.loss)
    return rules.kaplan_batch(rules.training_flops(given.parameters, given.tokens))


def allocations(given: Given) -> list[Rule]:
    """Of the compute 6 N D of the given size, and tokens for the given parameters."""
    flops = rules.training_flops(given.parameters, given.tokens)
    hoffmann = rules.chinchilla_allocation(flops, rules.HOFFMANN_SURFACE)
    besiroglu = rules.chinchilla_allocation(flops, rules.BESIROGLU_SURFACE)
    found = []
    for name, fit, best in (
        ('kaplan', rules.KAPLAN, rules.kaplan_allocation(flops)),
        ('chinchilla', rules.HOFFMANN, hoffmann),
        ('chinchilla_refit', rules.BESIROGLU, besiroglu),
    ):
        at = best._asdict()
        found.append(rule(name, 'model for this compute', best.parameters, 'parameters', fit, **at))
        found.append(rule(name, 'data for this compute', best.tokens, 'tokens', fit, **at))
    for name, fit, tokens in (
        ('twenty_tokens', rules.TWENTY, rules.twenty_tokens(given.parameters)),
        ('one_epoch', rules.ONE_EPOCH, rules.one_epoch_tokens(given.parameters)),
    ):
        at = {'parameters': given.parameters, 'tokens': tokens}
        found.append(rule(name, 'data for these parameters', tokens, 'tokens', fit, **at))
    return found


def at_the_batch(given: Given) -> list[Rule]:
    """Nothing without a batch; learning rates only with one that was found at another batch."""
    if given.batch_tokens is None:
        return []
    size = {'parameters': given.parameters, 'tokens': given.tokens}
    batch, critical = given.batch_tokens, critical_batch(given)
    steps, tokens = rules.overhead(batch, critical)
    found = [
        rule('kaplan', 'steps at this batch', steps, 'x fewest', rules.KAPLAN, **size),
        rule('kaplan', 'tokens at this batch', tokens, 'x fewest', rules.KAPLAN, **size),
    ]
    if given.base_lr is None:
        return found
    base, what, ratio = (given.base_lr, given.base_batch), 'learning rate', batch / given.base_batch
    linear, root = rules.linear_rate(*base, batch), rules.sqrt_rate(*base, batch)
    saturating = rules.saturating_rate(*base, batch, critical)
    for name, words, value, fit in (
        ('linear', f'{what}, SGD', linear, rules.LINEAR_SGD),
        ('sqrt', f'{what}, SGD', root, rules.SQRT_SGD),
        ('sqrt', f'{what}, Adam', root, rules.SQRT_ADAM),
        ('noise_scale', f'{what}, SGD', saturating, rules.NOISE_SCALE),
    ):
        found.append(rule(name, words, value, '', fit, batch_ratio=ratio))
    return found


def as_text(found: Sequence[Rule]) -> str:
    """A table, below it what is beyond its range, and where the constants are from."""
    rows = [
        {
            'rule': one.name,
            'what': one.what,
            'value': f'{short(one.value)} {one.unit}'.rstrip(),
            'range': one.range,
            'holds': one.holds,
            'source': one.source,
        }
        for one in found
    ]
    beyond = [
        f'{one.name}, {one.what}: beyond the range it was fitted on: {one.outside}'
        for one in found
        if one.holds == BEYOND
    ]
    read = dict.fromkeys(f'{one.source}: constants from {one.read_in}' for one in found)
    blocks = [render(rows, list(rows[0]), 'table'), '\n'.join(beyond), '\n'.join(read)]
    return '\n\n'.join(block for block in blocks if block)


def write(path: Path, given: Given, found: Sequence[Rule]) -> None:
    """As JSON; ValueError for a path that does not end so."""
    if path.suffix != '.json':
        raise ValueError(f'--out is written as JSON, so that it must end with .json, got {path}')
    rows = {'given': asdict(given), 'rules': [asdict(one) for one in found]}
    path.write_text(json.dumps(rows, indent=2) + '\n')
