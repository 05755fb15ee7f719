"""Evaluates published rules for learning rate, batch size, model size and data.

    python -m eval.rules --parameters=124e6 --tokens=2.5e9 [--batch_tokens=5e5]
        [--base_lr=3e-3 --base_batch=1e5 [--base_tokens=1e9]] [--loss=3.3]
        [--out=rules.json]
    python -m eval.rules --workdir=SWEEP [--out=rules.json]

Each row of the table is a value by a rule, and whether this size is within the
range of the rule's experiments. The lines below the table give that range, the
paper and the source of the constants. --batch_tokens adds the cost of that
batch relative to the critical batch. --base_lr and --base_batch add that
learning rate, scaled to --batch_tokens; --base_tokens, --base_weight_decay,
--base_b2 and --base_eps add what the rules do with these.

--workdir tests the rules of transfer: the arms of a sweep with config.tune have
other batches or numbers of tokens than the first arm. The learning rate that a
rule predicts from the first arm is compared with the rate tuned for each arm.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from absl import flags

from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.storage.files import write_json
from lm.study.tables.text import format_table
from modules.scaling import rules
from modules.scaling.rules import Origin
from modules.scaling.transfer import TRANSFERS, TunedSettings, transfer_settings

WITHIN, BEYOND, UNKNOWN = 'within', 'beyond', 'unknown'


def _flag_field(text: str) -> Any:
    """Returns a field that is a flag with this help text."""
    return field(default=None, metadata={'help': text})


@dataclass(frozen=True)
class RuleInputs:
    """The inputs of the rules; each field is a flag. Batches are in tokens, the loss is in nats.

    Raises ValueError if a required number is missing, or not positive.
    """

    parameters: float | None = _flag_field('Parameters of the model, without embeddings.')
    tokens: float | None = _flag_field('Training tokens.')
    batch_tokens: float | None = _flag_field('Tokens per batch.')
    base_lr: float | None = _flag_field('Learning rate that was tuned with --base_batch.')
    base_batch: float | None = _flag_field('Tokens per batch with --base_lr.')
    base_tokens: float | None = _flag_field('Training tokens with --base_lr; default: --tokens.')
    base_weight_decay: float | None = _flag_field('Weight decay with --base_lr.')
    base_b2: float | None = _flag_field('The b2 of Adam with --base_lr.')
    base_eps: float | None = _flag_field('The eps of Adam with --base_lr.')
    loss: float | None = _flag_field('Loss in nats, for the critical batch; default: by compute.')

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if value is not None}
        missing = [f'--{name}' for name in ('parameters', 'tokens') if name not in numbers]
        if missing:
            raise ValueError(
                f'{" and ".join(missing)} missing: set both, such as --parameters=124e6 '
                '--tokens=2.5e9'
            )
        rules.check_positive(**numbers)
        if self.loss is not None:
            rules.critical_batch(self.loss)  # it has a range
        if self.base_b2 is not None and not self.base_b2 < 1:
            raise ValueError(
                f'--base_b2 must be above 0 and below 1, such as 0.95; got {self.base_b2:g}'
            )
        if ('base_lr' in numbers) != ('base_batch' in numbers):
            raise ValueError(
                'set --base_lr and --base_batch together: a learning rate and its tokens per batch'
            )
        for name in ('base_tokens', 'base_weight_decay', 'base_b2', 'base_eps'):
            if name in numbers and 'base_lr' not in numbers:
                raise ValueError(f'--{name} belongs to a tuned learning rate: set --base_lr too')
        if 'base_lr' in numbers and 'batch_tokens' not in numbers:
            raise ValueError('--base_lr needs --batch_tokens, the batch to scale it to')


@dataclass(frozen=True)
class Rule:
    """The value of a rule. outside: the quantities beyond its range, as text."""

    name: str
    what: str
    value: float
    unit: str
    range: str
    holds: str
    outside: str
    source: str
    read_in: str


def evaluate_rule(
    name: str, description: str, value: float, unit: str, fit: Origin, **quantities: float
) -> Rule:
    """Compares the inputs of a rule with the range of its experiments.

    Args:
      name: name of the rule.
      description: description of the value.
      value: the result of the rule.
      unit: unit of the value.
      fit: the origin of the rule.
      **quantities: they decide whether the rule is within its range.
    """
    spans, outside = [], []
    for quantity in [quantity for quantity in quantities if quantity in fit.ranges]:
        label, (lower, upper) = quantity.replace('_', ' '), fit.ranges[quantity]
        spans.append(f'{label} {format_number(lower)} to {format_number(upper)}')
        if not lower <= quantities[quantity] <= upper:
            outside.append(
                f'{label} {format_number(quantities[quantity])} '
                f'({format_number(lower)} to {format_number(upper)})'
            )
    holds = BEYOND if outside else WITHIN if spans else UNKNOWN
    span, outside_text = ', '.join(spans) or UNKNOWN, ', '.join(outside)
    return Rule(name, description, value, unit, span, holds, outside_text, fit.source, fit.read_in)


def format_number(value: float) -> str:
    """Returns three significant digits, such as 2.5e9 or 0.0023."""
    return f'{value:.3g}'.replace('e+0', 'e').replace('e+', 'e')


def apply_rules(inputs: RuleInputs) -> list[Rule]:
    """Returns every rule with known inputs."""
    n, d = inputs.parameters, inputs.tokens
    assert n is not None and d is not None  # RuleInputs refuses it
    size, batch = {'parameters': n, 'tokens': d}, rules.step_law_batch(d)
    flops = rules.training_flops(n, d)
    critical = rules.critical_batch(inputs.loss) if inputs.loss else rules.kaplan_batch(flops)
    critical_label = f'critical batch for this {"loss" if inputs.loss else "compute"}'
    rate = rules.step_law_rate(n, d)
    rule_values = [
        evaluate_rule('step_law', 'learning rate, AdamW', rate, '', rules.STEP_LAW, **size),
        evaluate_rule(
            'step_law', 'batch', batch, 'tokens', rules.STEP_LAW, **size, batch_tokens=batch
        ),
        evaluate_rule('kaplan', critical_label, critical, 'tokens', rules.KAPLAN, **size),
    ]
    hoffmann = rules.chinchilla_allocation(flops, rules.HOFFMANN_SURFACE)
    besiroglu = rules.chinchilla_allocation(flops, rules.BESIROGLU_SURFACE)
    for name, fit, allocation in (
        ('kaplan', rules.KAPLAN, rules.kaplan_allocation(flops)),
        ('chinchilla', rules.HOFFMANN, hoffmann),
        ('chinchilla_refit', rules.BESIROGLU, besiroglu),
    ):
        quantities = allocation._asdict()
        rule_values.append(
            evaluate_rule(
                name,
                'model for this compute',
                allocation.parameters,
                'parameters',
                fit,
                **quantities,
            )
        )
        rule_values.append(
            evaluate_rule(
                name, 'data for this compute', allocation.tokens, 'tokens', fit, **quantities
            )
        )
    for name, fit, tokens in (
        ('twenty_tokens', rules.TWENTY_TOKENS, rules.twenty_tokens(n)),
        ('one_epoch', rules.ONE_EPOCH, rules.one_epoch_tokens(n)),
    ):
        quantities = size | {'tokens': tokens}
        rule_values.append(
            evaluate_rule(name, 'data for these parameters', tokens, 'tokens', fit, **quantities)
        )
    return rule_values + apply_batch_rules(inputs, critical, size)


def apply_batch_rules(inputs: RuleInputs, critical: float, size: dict[str, float]) -> list[Rule]:
    """Returns rules about the given batch, and learning rates scaled from another batch.

    Args:
      inputs: without a batch there are no rules; without a base rate, no learning rates.
      critical: critical batch, in tokens.
      size: parameters and tokens.
    """
    if inputs.batch_tokens is None:
        return []
    batch = inputs.batch_tokens
    rule_values = [
        evaluate_rule(
            'kaplan', f'{quantity} with this batch', factor, 'x minimum', rules.KAPLAN, **size
        )
        for quantity, factor in zip(
            ('steps', 'tokens'), rules.overhead(batch, critical), strict=True
        )
    ]
    if inputs.base_lr is None:
        return rule_values
    assert inputs.base_batch is not None  # RuleInputs refuses it
    base, ratio = (inputs.base_lr, inputs.base_batch), batch / inputs.base_batch
    linear, root = rules.linear_rate(*base, batch), rules.sqrt_rate(*base, batch)
    saturating = rules.saturating_rate(*base, batch, critical)
    for name, optimizer, value, fit in (
        ('linear', 'SGD', linear, rules.LINEAR_SGD),
        ('sqrt', 'SGD', root, rules.SQRT_SGD),
        ('sqrt', 'Adam', root, rules.SQRT_ADAM),
        ('noise_scale', 'SGD', saturating, rules.NOISE_SCALE),
    ):
        description = f'learning rate, {optimizer}'
        rule_values.append(evaluate_rule(name, description, value, '', fit, batch_ratio=ratio))
    return rule_values + apply_transfers(inputs, ratio)


SETTING_NAMES = {'lr': 'learning rate', 'weight_decay': 'weight decay', 'b2': 'b2', 'eps': 'eps'}


def apply_transfers(inputs: RuleInputs, batch_ratio: float) -> list[Rule]:
    """Returns the settings of --base_lr and the flags beside it, at this batch and these tokens.

    Settings without a flag, and `sqrt`, which is listed before, are left out.

    Args:
      inputs: with a base rate and a batch.
      batch_ratio: the batch over that of the base rate.
    """
    assert inputs.base_lr is not None and inputs.tokens is not None  # RuleInputs refuses it
    tuned = TunedSettings(
        inputs.base_lr, inputs.base_weight_decay or 0.0, inputs.base_b2, inputs.base_eps
    )
    token_ratio = inputs.tokens / (inputs.base_tokens or inputs.tokens)
    rows = []
    for name, transfer in TRANSFERS.items():
        settings = transfer_settings(name, tuned, batch_ratio, token_ratio)
        values = {setting: vars(settings)[setting] for setting in transfer.reads}
        rows += [
            evaluate_rule(name, SETTING_NAMES[setting], value, '', transfer.origin)
            for setting, value in values.items()
            if value and name != 'sqrt'
        ]
    return rows


def format_rules(rule_values: Sequence[Rule]) -> str:
    """Returns a table, warnings about values beyond the range of their rule, and the sources."""
    rows = [
        {
            'rule': rule.name,
            'what': rule.what,
            'value': f'{format_number(rule.value)} {rule.unit}'.rstrip(),
            'range': rule.holds,
        }
        for rule in rule_values
    ]
    warnings = [
        f'NOTE: {rule.name}, {rule.what}: outside the range of its experiments: {rule.outside}'
        for rule in rule_values
        if rule.holds == BEYOND
    ]
    # Ranges and sources are below the table, which then fits 80 columns.
    sources = dict.fromkeys(
        f'{rule.name}: {rule.source}; experiments: {rule.range}; constants from {rule.read_in}'
        for rule in rule_values
    )
    blocks = [format_table(rows, list(rows[0]), 'table'), '\n'.join(warnings), '\n'.join(sources)]
    return '\n\n'.join(block for block in blocks if block)


def write_rules(path: Path, inputs: RuleInputs, rule_values: Sequence[Rule]) -> None:
    """Writes the inputs and values as JSON.

    Args:
      path: the JSON file.
      inputs: the inputs of the rules.
      rule_values: their values.

    Raises:
      ValueError: if the path does not end with .json.
    """
    if path.suffix != '.json':
        raise ValueError(f'--out must end in .json; got {path}')
    rows = {'given': asdict(inputs), 'rules': [asdict(rule) for rule in rule_values]}
    write_json(path, rows)


def print_predictions(workdir: str, path: str) -> None:
    """Prints how the rules of transfer predict the tuned rates of a sweep.

    Args:
      workdir: folder or URL of a sweep with config.tune.
      path: JSON file to write the rows to; empty for none.

    Raises:
      ValueError: for another kind of workdir, or if no arm has another batch or length.
    """
    from lm.record.remote.local_copy import fetch_records
    from lm.study.tables.ablation import describe_progress, read_ablation
    from lm.study.tables.predictions import UNTESTED, compare_predictions, summarise_predictions
    from lm.study.tables.results import gather, read_sweep

    folder = fetch_records(workdir)
    sweep = read_sweep(folder)
    ablation = read_ablation(sweep, gather(folder))
    if ablation is None:
        raise ValueError(f'--workdir={workdir} has no tuned rates: it needs a config.tune')
    if progress := describe_progress(ablation):
        print(f'NOTE: the sweep is not finished: {progress}')
    rows = compare_predictions(sweep, ablation)
    if path:
        write_json(Path(path), {'workdir': workdir, 'predictions': rows})
    tested = [row for row in rows if not str(row['verdict']).startswith(UNTESTED)]
    print(format_table(tested or rows, list(rows[0]), 'table'))
    print('\n'.join(['', *summarise_predictions(rows)]))
    used = {row['rule'] for row in rows}
    summaries = [
        f'{name}: {row.summary} ({row.origin.source})'
        for name, row in TRANSFERS.items()
        if name in used
    ]
    print('\n'.join(['', *summaries]))


def main(_) -> None:
    numbers = {
        input_field.name: flags.FLAGS[input_field.name].value for input_field in fields(RuleInputs)
    }
    if flags.FLAGS.workdir:
        if unused := [f'--{name}' for name, value in numbers.items() if value is not None]:
            raise ValueError(f'--workdir has all sizes; leave {", ".join(unused)} out')
        print_predictions(flags.FLAGS.workdir, flags.FLAGS.out)
        return
    inputs = RuleInputs(**numbers)
    rule_values = apply_rules(inputs)
    if flags.FLAGS.out:
        write_rules(Path(flags.FLAGS.out), inputs, rule_values)
    print(format_rules(rule_values))


if __name__ == '__main__':  # only here: other programs have flags of these names
    for input_field in fields(RuleInputs):
        flags.DEFINE_float(input_field.name, None, input_field.metadata['help'])
    define_path('workdir', None, 'Sweep with config.tune whose tuned rates test the rules.')
    define_path('out', None, 'JSON file to write the results to.')
    run_program(main)
