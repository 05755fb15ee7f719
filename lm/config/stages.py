"""Stages of a run: the syntax of train.stages, and the steps, tokens and batches of each stage.

    stages = UNTIL: FIELD=VALUE FIELD=VALUE ...; UNTIL: ...; ...
    UNTIL    0.3 or 30% (of the tokens of the run), 2000000, 2M or 1.5B (tokens), 1 (the end)
    FIELD    batch_size, seq_len, microbatches, mixture (as in web:0.7,code:0.3), lr_factor

What a stage does not name is as in the config's own fields: data.batch_size, data.seq_len,
train.microbatches and data.mixture.

train.steps remains the number of optimizer steps, and the tokens follow. A step of stage `i` has
`u_i = batch_size seq_len` tokens, so that stages that end at tokens `e_i` have
`n_i = (e_i - e_(i-1)) / u_i` steps; the tokens of the run are the `D` for which `sum n_i` is
train.steps. Stages end at whole steps. From there on everything counts whole steps and the tokens
that they have: a schedule is at `tokens / D` (`token_steps`), which is `step / train.steps` where
all steps have as many tokens. Its lengths in steps, such as optim.warmup_steps, are therefore steps
of the mean number of tokens.

A change of the batch changes no other setting unless train.stage_rule names a rule, whose factors
are those for the tokens of the stage's step over those of the config's own; `lr_factor` is a factor
for the stage itself. Factors of the learning rate act as the schedule does, on all groups of
parameters, and weight decay follows as its rule says. The momentum per step stays.

The rows of data.seq_len are cut into parts for shorter rows (`lm.data.stage_rows`), so that the
last stage, the validation and the context of the model have data.seq_len.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.fields import NO_RULE, Config
from lm.config.mixture import parse_mixture
from modules.choices import choose, suggest_nearest
from modules.scaling.transfer import TRANSFERS, SettingFactors

STAGES, RULE = 'train.stages', 'train.stage_rule'
EXAMPLE = (
    f"For example: --config.{STAGES}='0.3: batch_size=8; 0.8: batch_size=16; 1: lr_factor=0.5'."
)
SIZES = {
    'batch_size': 'data.batch_size',
    'seq_len': 'data.seq_len',
    'microbatches': 'train.microbatches',
}
NAMES = (*SIZES, 'mixture', 'lr_factor')
UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'B': 10**9, 'T': 10**12}
LARGEST = 2**31 - 1  # devices count with 32 bits


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The shape of a batch, which a compiled step has.

    Attributes:
      batch_size: rows.
      seq_len: tokens of a row.
      microbatches: parts that are computed one after another.
    """

    batch_size: int
    seq_len: int
    microbatches: int

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True)
class StageText:
    """A stage as train.stages writes it.

    Attributes:
      text: the stage.
      until: its end, in tokens or as a share of the run.
      is_share: which of them.
      values: the fields that it names.
    """

    text: str
    until: Fraction
    is_share: bool
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainingStage:
    """Steps with batches of one shape and one mixture.

    Attributes:
      start, stop: steps of the run before it and at its end.
      start_tokens, stop_tokens: the same in tokens.
      shape: the shape of its batches.
      weights: {source: weight} of its mixture; None: data.mixture, or a single source.
      factors: factors of the settings of the optimizer.
    """

    start: int
    stop: int
    start_tokens: int
    stop_tokens: int
    shape: BatchShape
    weights: Mapping[str, float] | None
    factors: SettingFactors


def parse_stages(text: str) -> tuple[StageText, ...]:
    """Parses train.stages. Raises ValueError, which names the stage, for text of another form."""
    parts = [part.strip() for part in text.strip().removesuffix(';').split(';')]
    parsed = []
    for number, part in enumerate(parts, start=1):
        try:
            parsed.append(_parse_stage(part))
        except ValueError as error:
            raise ValueError(f'{STAGES}, stage {number}, {part!r}: {error} {EXAMPLE}') from None
    *earlier, last = parsed
    for number, stage in enumerate(earlier, start=1):
        if stage.is_share and stage.until >= 1:
            raise ValueError(
                f'{STAGES}, stage {number}, {stage.text!r}, lasts to the end of the run, so that '
                f'the stages after it never begin. {EXAMPLE}'
            )
    if not last.is_share or last.until != 1:
        raise ValueError(
            f'the last stage of {STAGES} must last to the end of the run, 1 or 100%; got '
            f'{last.text!r}. {EXAMPLE}'
        )
    return tuple(parsed)


def _parse_stage(text: str) -> StageText:
    until, _, fields = text.partition(':')
    values: dict[str, Any] = {}
    for word in fields.split():
        name, equals, value = word.partition('=')
        if not equals or not value:
            raise ValueError(f'fields have the form NAME=VALUE, without spaces; got {word!r}.')
        name = name.removeprefix('data.').removeprefix('train.')
        if name not in NAMES:
            hint = suggest_nearest(name, NAMES)
            raise ValueError(f'a stage may name {", ".join(NAMES)}; got {name!r}.{hint}')
        if name in values:
            raise ValueError(f'{name} is named twice.')
        values[name] = _parse_value(name, value)
    return StageText(text, *_parse_until(until.strip()), values)


def _parse_until(text: str) -> tuple[Fraction, bool]:
    """Returns (3/10, True) for '30%' and '0.3', (2000000, False) for '2M'."""
    match = re.fullmatch(r'(\d[\d_]*(?:\.\d+)?|\.\d+)(%|[KMBT]?)', text)
    if match is None:
        raise ValueError(
            'a stage begins with its end and a colon: 0.3 or 30% (of the run), 2M or 1.5B '
            f'(tokens), or 1 (the end of the run); got {text!r}.'
        )
    number, unit = Fraction(match[1].replace('_', '')), match[2]
    is_share = unit == '%' or (not unit and number <= 1)
    value = number / 100 if unit == '%' else number * UNITS[unit]
    if is_share and not 0 < value <= 1:
        raise ValueError(f'the end as a share of the run must be above 0, at most 1; got {text}.')
    return value, is_share


def _parse_value(name: str, text: str) -> Any:
    if name == 'mixture':
        return _parse_weights(text)
    if name == 'lr_factor':
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not 0 < factor < math.inf:
            raise ValueError(f'lr_factor must be a number above 0; got {text!r}.')
        return factor
    if not re.fullmatch(r'[1-9]\d*', text) or int(text) > LARGEST:
        raise ValueError(f'{name} must be a whole number from 1 to {LARGEST}; got {text!r}.')
    return int(text)


def _parse_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for entry in text.split(','):
        name, colon, number = entry.partition(':')
        try:
            weight = float(number) if colon else math.nan
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise ValueError(
                'a mixture has the form NAME:WEIGHT,NAME:WEIGHT, with the names of data.mixture '
                f'and weights above 0; got {text!r}. Sources that it does not name are not read.'
            )
        if name in weights:
            raise ValueError(f'its mixture names {name!r} twice.')
        weights[name] = weight
    return weights


def config_shape(config: Config) -> BatchShape:
    """Returns the shape of a batch by the config's own fields."""
    return BatchShape(config.data.batch_size, config.data.seq_len, config.train.microbatches)


def plan_stages(config: Config) -> tuple[TrainingStage, ...]:
    """Returns the stages of a run, with their steps and tokens; without train.stages, one stage.

    Raises ValueError if the stages cannot be parsed, or have no steps.
    """
    shape, steps, text = config_shape(config), config.train.steps, config.train.stages
    if text is None:
        tokens = steps * shape.tokens
        return (TrainingStage(0, steps, 0, tokens, shape, None, SettingFactors()),)
    parsed = parse_stages(text)
    shapes = [
        dataclasses.replace(shape, **{n: v for n, v in stage.values.items() if n in SIZES})
        for stage in parsed
    ]
    stops = _stop_steps(parsed, shapes, steps)
    planned, start, tokens = [], 0, 0
    for stage, stage_shape, stop in zip(parsed, shapes, stops, strict=True):
        stop_tokens = tokens + (stop - start) * stage_shape.tokens
        factors = SettingFactors()
        if config.train.stage_rule != NO_RULE:
            rule = TRANSFERS[config.train.stage_rule]
            factors = rule.factors(stage_shape.tokens / shape.tokens, 1.0)
        if (lr_factor := stage.values.get('lr_factor')) is not None:
            factors = dataclasses.replace(factors, lr=factors.lr * lr_factor)
        weights = stage.values.get('mixture')
        planned.append(
            TrainingStage(start, stop, tokens, stop_tokens, stage_shape, weights, factors)
        )
        start, tokens = stop, stop_tokens
    return tuple(planned)


def _stop_steps(parsed: Sequence[StageText], shapes: Sequence[BatchShape], steps: int) -> list[int]:
    """Returns the number of steps at the end of each stage.

    With ends `e_i = a_i D + c_i`, of which one of `a_i` and `c_i` is 0, the number of steps is
    linear in `D`.
    """
    per_token, constant, before = Fraction(0), Fraction(0), (Fraction(0), Fraction(0))
    for stage, shape in zip(parsed, shapes, strict=True):
        end = (stage.until, Fraction(0)) if stage.is_share else (Fraction(0), stage.until)
        per_token += (end[0] - before[0]) / shape.tokens
        constant += (end[1] - before[1]) / shape.tokens
        before = end
    budget = (steps - constant) / per_token if per_token > 0 else Fraction(0)
    stops, total, end = [], Fraction(0), Fraction(0)
    for number, (stage, shape) in enumerate(zip(parsed, shapes, strict=True), start=1):
        previous, end = end, stage.until * budget if stage.is_share else stage.until
        total += (end - previous) / shape.tokens
        stops.append(math.floor(total + Fraction(1, 2)))
        if end <= previous or stops[-1] == (stops[-2] if len(stops) > 1 else 0):
            raise ValueError(
                f'{STAGES}, stage {number}, {stage.text!r}, would have no step: with train.steps='
                f'{steps} the run has about {max(0, round(budget)):,} tokens, and the stage would '
                f'begin at {round(previous):,} and end at {round(end):,}. Increase train.steps, or '
                'let the stage end later.'
            )
    return stops


def drop_equal_stages(config: Config) -> dict[str, Any]:
    """Returns {train.stages: None} if no stage differs from the config's own fields, else {}."""
    if config.train.stages is None:
        return {}
    shape = config_shape(config)
    for stage in plan_stages(config):
        if stage.shape != shape or stage.factors != SettingFactors():
            return {}
        if stage.weights is not None and _shares(stage.weights) != mixture_shares(config):
            return {}
    return {STAGES: None}


def mixture_shares(config: Config) -> dict[str, float]:
    """Returns {source: share} of data.mixture; {} without one."""
    if config.data.mixture is None:
        return {}
    return _shares({part.name: part.weight for part in parse_mixture(config.data.mixture)})


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in sorted(weights.items())}


def stage_changes(stage: TrainingStage) -> dict[str, Any]:
    """Returns {path: value} that make a config without stages have the batches of a stage."""
    sizes = dataclasses.asdict(stage.shape)
    return {STAGES: None, RULE: NO_RULE} | {path: sizes[name] for name, path in SIZES.items()}


def find_stage(stages: Sequence[TrainingStage], step: int) -> int:
    """Returns the index of the stage after `step` steps; the last one at the end of the run."""
    return next((i for i, stage in enumerate(stages) if step < stage.stop), len(stages) - 1)


def count_tokens(stages: Sequence[TrainingStage], step: int) -> int:
    """Returns the tokens of the first `step` steps, padding included."""
    stage = stages[find_stage(stages, step)]
    return stage.start_tokens + (step - stage.start) * stage.shape.tokens


def token_steps(stages: Sequence[TrainingStage], step: Any) -> Any:
    """Returns the tokens of the first `step` steps, in steps of the mean number of tokens.

    Equal to `step` if all steps have as many tokens; train.steps at the end of the run.

    Args:
      stages: the stages of the run.
      step: number of steps, one or an array; may be a tracer.
    """
    if _is_even(stages):
        return step
    mean = stages[-1].stop_tokens / stages[-1].stop
    values = [
        # From the end, which is then exact, as a decay to 0 needs.
        stage.stop_tokens / mean - (stage.stop - step) * (stage.shape.tokens / mean)
        for stage in stages
    ]
    return _select_stage(stages, step, values)


def schedule_step(stages: Sequence[TrainingStage], step: Any) -> Any:
    """Returns the step of a schedule that counts tokens, in which the update ends that is next.

    Args:
      stages: the stages of the run.
      step: number of updates done, one or an array; may be a tracer.
    """
    return step if _is_even(stages) else token_steps(stages, step + 1) - 1


def _is_even(stages: Sequence[TrainingStage]) -> bool:
    """Returns whether all steps have as many tokens."""
    return len({stage.shape.tokens for stage in stages}) <= 1


def stage_factor(stages: Sequence[TrainingStage], step: Any, values: Sequence[float]) -> Any:
    """Returns the factor of a setting in the step after `step` steps; 1 if it is always 1.

    Args:
      stages: the stages of the run.
      step: number of steps done, one or an array; may be a tracer.
      values: the factor of each stage.
    """
    if len({*values}) <= 1:
        return next(iter(values), 1.0)
    return _select_stage(stages, step + 1, [jnp.float32(value) for value in values])


def is_one(factor: Any) -> bool:
    """Returns whether a `stage_factor` is 1 in all steps, so that nothing has to be multiplied."""
    return isinstance(factor, float) and factor == 1.0


def _select_stage(stages: Sequence[TrainingStage], step: Any, values: Sequence[Any]) -> jax.Array:
    """Returns the value of the stage that step number `step`, from 1, belongs to."""
    selected = values[-1]
    for stage, value in reversed([*zip(stages[:-1], values[:-1], strict=True)]):
        selected = jnp.where(step <= stage.stop, value, selected)
    return selected


def check_stages(recipe: Any) -> None:
    """Raises ValueError for stages that do not fit the other fields of a recipe.

    `lm.model.check` checks the sizes of each stage like those of a config.
    """
    config, rule = recipe.config, recipe.train.stage_rule
    if config.train.stages is None:
        if rule != NO_RULE:
            raise ValueError(
                f'{RULE}={rule} has no effect without {STAGES} whose batches differ from the '
                f"config's own. Leave it out. {EXAMPLE}"
            )
        return
    names, seq_len = mixture_shares(config), config.data.seq_len
    parsed, stages = parse_stages(config.train.stages), recipe.stages
    for number, (text, stage) in enumerate(zip(parsed, stages, strict=True), start=1):
        place, shape = f'{STAGES}, stage {number}, {text.text!r}', stage.shape
        for name in text.values.get('mixture', ()):
            if not names:
                raise ValueError(
                    f'{place}, weighs the sources of data.mixture, but the text is data.source='
                    f'{config.data.source}. Set data.mixture to all sources of the run.'
                )
            choose(names, name, f'{place}: a source of its mixture')
        if seq_len % shape.seq_len:
            raise ValueError(
                f'{place}: its rows are parts of rows of data.seq_len, so that its seq_len must '
                f'divide data.seq_len; got {shape.seq_len} and {seq_len}. If {shape.seq_len} is '
                'the longest, set data.seq_len to it, and name the shorter ones in the stages.'
            )
        if rule != NO_RULE and 'lr_factor' in text.values:
            raise ValueError(
                f'{place}, has an lr_factor, but {RULE}={rule} determines the factors of all '
                'stages. Leave one of them out.'
            )
    if stages[-1].shape.seq_len != seq_len:
        raise ValueError(
            f'the last stage of {STAGES} must have rows of data.seq_len, as validation has; got '
            f'{stages[-1].shape.seq_len} and {seq_len}. Add a last stage without seq_len, or set '
            'data.seq_len.'
        )
    if rule != NO_RULE:
        _check_rule(recipe, rule)


def _check_rule(recipe: Any, rule: str) -> None:
    """Raises ValueError if a factor of train.stage_rule has no setting, or exceeds its bounds."""
    stages = recipe.stages
    if all(stage.factors == SettingFactors() for stage in stages):
        raise ValueError(
            f'{RULE}={rule} has no effect, because all stages have as many tokens per step as '
            'data.batch_size x data.seq_len. Leave it out.'
        )
    changes = {
        'b2': any(stage.factors.memory != 1 for stage in stages),
        'eps': any(stage.factors.eps != 1 for stage in stages),
    }
    for option in (option for option, is_changed in changes.items() if is_changed):
        optimizers = [part for part in recipe.optimizers.values() if option in part.options]
        if not optimizers:
            raise ValueError(
                f'{RULE}={rule} changes {option}, which no optimizer of this config has. Choose '
                f'{RULE}=sqrt, or none.'
            )
        for part in optimizers:
            path = part.option_path(option)
            if path not in recipe.traced_values:
                raise ValueError(f'{RULE}={rule} changes {path}, which is not set. Set it.')
            for stage in stages if option == 'b2' else ():
                changed = 1 - (1 - part.options[option]) * stage.factors.memory
                if changed < 0:
                    raise ValueError(
                        f'{RULE}={rule}: {path}={part.options[option]:g} would become '
                        f'{changed:g} in batches of {stage.shape.batch_size} rows of '
                        f'{stage.shape.seq_len} tokens. Increase it, or choose {RULE}=sqrt.'
                    )
