"""Published rules for learning rate, batch size and the allocation of compute.

    python -m eval.rules --parameters=124e6 --tokens=2.5e9 [--batch_tokens=5e5]
        [--base_lr=3e-3 --base_batch=1e5] [--loss=3.3] [--out=rules.json]

A row a rule: its value, the range of the experiments that it was fitted on, whether this size lies
within, and the paper; below, where the constants were read. With a batch, what it costs against the
critical one; with a learning rate that was found at another batch, that rate here.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from absl import app, flags

from lm.launch.command import run_main
from lm.launch.path_flags import define_path
from lm.storage.files import write_json
from lm.study.tables.text import format_table
from modules.scaling import rules
from modules.scaling.rules import Origin

WITHIN, BEYOND, UNKNOWN = 'within', 'beyond', 'not known'


def _flag_field(text: str) -> float | None:
    return field(default=None, metadata={'help': text})


@dataclass(frozen=True)
class RuleInputs:
    """The numbers that rules take; each field is a flag. Batches count tokens; loss is in nats.

    Raises ValueError where a number is missing or not positive.
    """

    parameters: float | None = _flag_field('Parameters of the model, without embeddings.')
    tokens: float | None = _flag_field('Tokens to train on.')
    batch_tokens: float | None = _flag_field('Tokens in a batch.')
    base_lr: float | None = _flag_field('Learning rate that was found with --base_batch.')
    base_batch: float | None = _flag_field('Tokens in the batch of --base_lr.')
    loss: float | None = _flag_field('Loss in nats, for the critical batch; else by compute.')

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
    """The value of one rule. `outside` are the quantities beyond its range, in words."""

    name: str
    what: str
    value: float
    unit: str
    range: str
    holds: str
    outside: str
    source: str
    read_in: str


def evaluate_rule(name: str, what: str, value: float, unit: str, fit: Origin, **at: float) -> Rule:
    """`at` are the quantities that decide whether the rule is within its range."""
    spans, outside = [], []
    for quantity in [quantity for quantity in at if quantity in fit.ranges]:
        words, (least, most) = quantity.replace('_', ' '), fit.ranges[quantity]
        spans.append(f'{words} {format_number(least)} to {format_number(most)}')
        if not least <= at[quantity] <= most:
            outside.append(
                f'{words} {format_number(at[quantity])} ({format_number(least)} to {format_number(most)})'
            )
    holds = BEYOND if outside else WITHIN if spans else UNKNOWN
    span, beyond = ', '.join(spans) or UNKNOWN, ', '.join(outside)
    return Rule(name, what, value, unit, span, holds, beyond, fit.source, fit.read_in)


def format_number(value: float) -> str:
    """Three digits: 2.5e9, 0.0023."""
    return f'{value:.3g}'.replace('e+0', 'e').replace('e+', 'e')


def apply_rules(inputs: RuleInputs) -> list[Rule]:
    """Every rule that the given numbers suffice for."""
    n, d = inputs.parameters, inputs.tokens
    size, batch = {'parameters': n, 'tokens': d}, rules.step_law_batch(d)
    flops = rules.training_flops(n, d)
    critical = rules.critical_batch(inputs.loss) if inputs.loss else rules.kaplan_batch(flops)
    of = f'critical batch at this {"loss" if inputs.loss else "compute"}'
    rate = rules.step_law_rate(n, d)
    found = [
        evaluate_rule('step_law', 'learning rate, AdamW', rate, '', rules.STEP_LAW, **size),
        evaluate_rule(
            'step_law', 'batch', batch, 'tokens', rules.STEP_LAW, **size, batch_tokens=batch
        ),
        evaluate_rule('kaplan', of, critical, 'tokens', rules.KAPLAN, **size),
    ]
    hoffmann = rules.chinchilla_allocation(flops, rules.HOFFMANN_SURFACE)
    besiroglu = rules.chinchilla_allocation(flops, rules.BESIROGLU_SURFACE)
    for name, fit, best in (
        ('kaplan', rules.KAPLAN, rules.kaplan_allocation(flops)),
        ('chinchilla', rules.HOFFMANN, hoffmann),
        ('chinchilla_refit', rules.BESIROGLU, besiroglu),
    ):
        at = best._asdict()
        found.append(
            evaluate_rule(name, 'model for this compute', best.parameters, 'parameters', fit, **at)
        )
        found.append(evaluate_rule(name, 'data for this compute', best.tokens, 'tokens', fit, **at))
    for name, fit, tokens in (
        ('twenty_tokens', rules.TWENTY_TOKENS, rules.twenty_tokens(n)),
        ('one_epoch', rules.ONE_EPOCH, rules.one_epoch_tokens(n)),
    ):
        at = size | {'tokens': tokens}
        found.append(evaluate_rule(name, 'data for these parameters', tokens, 'tokens', fit, **at))
    return found + apply_batch_rules(inputs, critical, size)


def apply_batch_rules(inputs: RuleInputs, critical: float, size: dict[str, float]) -> list[Rule]:
    """Nothing without a batch; learning rates only with one that was found at another batch."""
    if inputs.batch_tokens is None:
        return []
    batch = inputs.batch_tokens
    found = [
        evaluate_rule('kaplan', f'{of} at this batch', least, 'x fewest', rules.KAPLAN, **size)
        for of, least in zip(('steps', 'tokens'), rules.overhead(batch, critical), strict=True)
    ]
    if inputs.base_lr is None:
        return found
    base, ratio = (inputs.base_lr, inputs.base_batch), batch / inputs.base_batch
    linear, root = rules.linear_rate(*base, batch), rules.sqrt_rate(*base, batch)
    saturating = rules.saturating_rate(*base, batch, critical)
    for name, optimizer, value, fit in (
        ('linear', 'SGD', linear, rules.LINEAR_SGD),
        ('sqrt', 'SGD', root, rules.SQRT_SGD),
        ('sqrt', 'Adam', root, rules.SQRT_ADAM),
        ('noise_scale', 'SGD', saturating, rules.NOISE_SCALE),
    ):
        what = f'learning rate, {optimizer}'
        found.append(evaluate_rule(name, what, value, '', fit, batch_ratio=ratio))
    return found


def format_rules(rule_values: Sequence[Rule]) -> str:
    """A table, below it what is beyond its range, and where the constants are from."""
    names = ['rule', 'what', 'value', 'range', 'holds', 'source']
    rows = [
        asdict(one) | {'rule': one.name, 'value': f'{format_number(one.value)} {one.unit}'.rstrip()}
        for one in rule_values
    ]
    beyond = [
        f'{one.name}, {one.what}: beyond the range it was fitted on: {one.outside}'
        for one in rule_values
        if one.holds == BEYOND
    ]
    read = dict.fromkeys(f'{one.source}: constants from {one.read_in}' for one in rule_values)
    blocks = [format_table(rows, names, 'table'), '\n'.join(beyond), '\n'.join(read)]
    return '\n\n'.join(block for block in blocks if block)


def write_rules(path: Path, inputs: RuleInputs, rule_values: Sequence[Rule]) -> None:
    """Writes JSON; ValueError for a path that does not end so."""
    if path.suffix != '.json':
        raise ValueError(f'--out is written as JSON, so that it must end with .json, got {path}')
    rows = {'given': asdict(inputs), 'rules': [asdict(one) for one in rule_values]}
    write_json(path, rows)


def main(_) -> None:
    given = RuleInputs(**{one.name: flags.FLAGS[one.name].value for one in fields(RuleInputs)})
    found = apply_rules(given)
    if flags.FLAGS.out:
        write_rules(Path(flags.FLAGS.out), given, found)
    print(format_rules(found))


if __name__ == '__main__':  # only here: other programs have flags of these names
    for one in fields(RuleInputs):
        flags.DEFINE_float(one.name, None, one.metadata['help'])
    define_path('out', None, 'JSON file to write.')
    app.run(run_main(main))
