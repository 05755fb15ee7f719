"""Learning-rate schedules: the fraction of the peak at each step.

Steps count from 0, and step t of a warm-up of w has (t + 1) / w, so that the first step is not
wasted. A decay reaches its end, final_lr_fraction, at the last step, t = steps - 1: with 0 the last
step changes no weight, and n - 1 of n steps train. In optax and nanoGPT a decay ends a step after
the last, and optax's warm-up begins with a step at 0 instead. All numbers may be tracers: lengths
are data, and pieces are joined by `where`.

Below, p is the progress of the decay, from 0 to 1, and r is final_lr_fraction.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from modules.choices import suggest_nearest
from modules.facts import accept_any, longest_horizon, row_decorator
from modules.optim.base import up_to_1
from modules.options import Option

Warmup = Annotated[
    int, Option('steps of linear warm-up', 0, math.inf, time_unit='steps', traced=True)
]
Cycles = Annotated[
    int, Option('number of equal cycles, each decaying from the peak', 1, traced=True)
]
End = Annotated[float, up_to_1('learning rate at the last step, as a share of the peak')]

# decays: whether the rate falls before the end. lasts: see `modules.facts.longest`. decay_starts:
# decay_starts(steps, **options) lists the last step before each decay; None: without a plateau.
schedule_row = row_decorator(
    decays=True, lasts=longest_horizon, check=accept_any, decay_starts=None
)


def _warmup(step, warmup_steps):
    return jnp.minimum(1.0, (step + 1) / jnp.maximum(warmup_steps, 1.0))


def _progress(step, start, stop):
    """Returns 0 up to `start` and 1 in the last step, stop - 1, even if stop is near start."""
    return jnp.clip((step + 1 - start) / jnp.clip(stop - start, 1e-6, None), 0.0, 1.0)


def _cosine(progress, final):
    return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


@schedule_row(decays=False)
def constant(step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0) -> jax.Array:
    """Constant: `f = 1`."""
    return _warmup(step, warmup_steps)


def check_cycles(recipe: Any, part: Any) -> None:
    """Raises ValueError if a cycle would have fewer than two steps."""
    cycles, steps = part.options['cycles'], recipe.train.steps - part.options['warmup_steps']
    if 2 * cycles > max(steps, 2):
        raise ValueError(
            f'optim.cycles must leave at least two steps per cycle; got {cycles} cycles for the '
            f'{steps} steps after the warm-up. Largest that works: {max(steps // 2, 1)}.'
        )


@schedule_row(check=check_cycles)
def cyclic(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    cycles: Cycles = 4,
) -> jax.Array:
    """SGDR, several cosine decays (arXiv:1608.03983): `f = r + (1 - r) (1 + cos(pi p)) / 2`.

    `p` is the progress of a cycle, of `cycles` cycles of equal length. A cycle of a whole number of
    steps ends at `r`, and so does the run. A step shared by two cycles belongs to the cycle that
    contains its middle.
    """
    length = jnp.maximum(steps - warmup_steps, 1.0) / cycles
    n_decayed = step + 1 - warmup_steps
    cycle = jnp.clip(jnp.floor((n_decayed - 0.5) / length), 0.0, cycles - 1.0)
    progress = jnp.clip(n_decayed / length - cycle, 0.0, 1.0)
    return _warmup(step, warmup_steps) * _cosine(progress, final_lr_fraction)


def check_final_lr(recipe: Any, part: Any) -> None:
    """Raises ValueError for an end of 0, which no factor reaches."""
    if part.options['final_lr_fraction'] == 0:
        raise ValueError(
            f'{part} multiplies the learning rate by a constant factor per step and never reaches '
            '0, so optim.final_lr_fraction must be above 0; got 0. Leave it out, set it to a '
            'value such as 0.01, or choose optim.schedule=linear, which reaches 0.'
        )


@schedule_row(check=check_final_lr)
def exponential(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.1
) -> jax.Array:
    """Exponential decay (arXiv:1512.00567): `f = r^p`.

    Each step multiplies the rate by the same factor, so `r` must be above 0. The paper has a factor
    of 0.94 every two epochs; the default end, a tenth of the peak, is our choice.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * jnp.power(final_lr_fraction, progress)


@schedule_row()
def inverse_sqrt(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    inverse_sqrt_steps: Annotated[
        int,
        Option('steps before the decay begins', 1, math.inf, time_unit='steps', traced=True),
    ] = 10_000,
) -> jax.Array:
    """Inverse square root, as in T5 (arXiv:1910.10683): `f = sqrt(k / max(t, k))`.

    `t` is the number of the step, from 1, and `k` is `inverse_sqrt_steps`, or `warmup_steps` if
    that is larger. T5 has no warm-up: its rate is `1 / sqrt(max(t, k))`, with a peak of
    `1 / sqrt(k)`. If `k` equals the warm-up, this is the schedule of arXiv:1706.03762. The schedule
    has no end, so that a run can be continued.
    """
    flat_steps = jnp.maximum(inverse_sqrt_steps, warmup_steps)
    return _warmup(step, warmup_steps) * jnp.sqrt(flat_steps / jnp.maximum(step + 1, flat_steps))


@schedule_row()
def linear(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.0
) -> jax.Array:
    """Linear decay (arXiv:2502.15938): `f = 1 - (1 - r) p`.

    The paper finds it best to decay to 0, the default.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_fraction) * progress)


@schedule_row()
def power(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    decay_power: Annotated[float, Option('k in (1 - p)^k', 1e-3, 1e3, traced=True)] = 0.9,
) -> jax.Array:
    """Polynomial decay, "poly" (arXiv:1606.00915): `f = r + (1 - r) (1 - p)^k`.

    `k` is `decay_power`.
    """
    remaining = 1 - _progress(step, warmup_steps, steps)
    decaying = (1 - final_lr_fraction) * jnp.power(remaining, decay_power)
    return _warmup(step, warmup_steps) * (final_lr_fraction + decaying)


@schedule_row()
def warmup_cosine(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.0
) -> jax.Array:
    """Cosine decay (arXiv:1608.03983): `f = r + (1 - r) (1 + cos(pi p)) / 2`.

    This is one cycle of the paper's schedule.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * _cosine(progress, final_lr_fraction)


def find_decay_start(steps: int, *, decay_fraction: float, **options: Any) -> list[int]:
    """Returns [the last step at the peak] of `warmup_stable_decay`.

    Args:
      steps: length of the run.
      decay_fraction: share of the run that decays.
      **options: the other options, which do not matter.
    """
    del options
    return [math.floor(steps * (1 - decay_fraction) + 1e-4)]  # 0.7 * 10 may be just below 7


DECAY_SHAPES = {'linear': lambda progress: progress, 'sqrt': jnp.sqrt}  # of the way to the end


@schedule_row(decay_starts=find_decay_start)
def warmup_stable_decay(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    decay_fraction: Annotated[float, up_to_1('share of the run that decays, at its end')] = 0.2,
    decay_shape: Annotated[
        str, Option('decay by 1 - p, or by 1 - sqrt(p)', choices=tuple(DECAY_SHAPES))
    ] = 'linear',
) -> jax.Array:
    """WSD, warm-up, stable, decay (arXiv:2404.06395): the peak, then a decay in the last part of
    the run.

    - `decay_shape=linear`: `f = 1 - (1 - r) p`.
    - `decay_shape=sqrt` (arXiv:2405.18392): `f = 1 - (1 - r) sqrt(p)`.

    The decay takes the share `decay_fraction` of the steps.
    """
    progress = _progress(step, steps * (1 - decay_fraction), steps)
    decay = DECAY_SHAPES[decay_shape](progress)
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_fraction) * decay)


# {shape: (progress p, from, to, k) -> share of the peak}
STAGE_SHAPES: dict[str, Callable[..., jax.Array]] = {
    'constant': lambda p, start, end, k: jnp.full_like(p, end),
    'cosine': lambda p, start, end, k: end + (start - end) * _cosine(p, 0.0),
    'exponential': lambda p, start, end, k: start * (end / start) ** p,
    'linear': lambda p, start, end, k: start + (end - start) * p,
    'power': lambda p, start, end, k: end + (start - end) * (1 - p) ** k,
    'sqrt': lambda p, start, end, k: start + (end - start) * jnp.sqrt(p),
}
STAGE_EXAMPLE = 'rest constant, 20% linear to 0'
_STAGE = re.compile(
    r'(?P<length>\S+)\s+(?P<shape>[^\s:]+)(:(?P<power>\S+))?'
    r'(\s+(?P<start>(?!to\b)\S+))?(\s+to\s+(?P<end>\S+))?'
)


@dataclasses.dataclass(frozen=True)
class ScheduleStage:
    """A stage of a schedule, as `parse_stages` reads it."""

    length: float | None  #: in `unit`; None: an equal part of all remaining steps
    unit: str  #: 'steps' or 'share', of the run
    shape: str  #: a row of STAGE_SHAPES
    start: float  #: learning rate before its first step, as a share of the peak
    end: float  #: that of its last step
    power: float  #: k of shape power


@functools.cache
def parse_stages(text: str) -> tuple[ScheduleStage, ...]:
    """Parses the stages of a schedule (`stages`).

    Raises ValueError, which names the stage, for text of another form.
    """
    parsed: list[ScheduleStage] = []
    for number, part in enumerate(text.split(','), start=1):
        try:
            parsed.append(_parse_stage(part.strip(), parsed[-1].end if parsed else 1.0))
        except ValueError as error:
            raise ValueError(
                f'optim.stages, stage {number}, {part.strip()!r}: {error} For example: '
                f'--config.optim.stages="{STAGE_EXAMPLE}".'
            ) from None
    return tuple(parsed)


def _parse_stage(text: str, previous_end: float) -> ScheduleStage:
    match = _STAGE.fullmatch(text)
    if match is None:
        raise ValueError(
            'a stage has the form LENGTH SHAPE FROM to END, of which FROM may be left out, or '
            'LENGTH constant.'
        )
    shape = match['shape']
    if shape not in STAGE_SHAPES:
        hint = suggest_nearest(shape, STAGE_SHAPES)
        raise ValueError(
            f'the shape must be one of {", ".join(STAGE_SHAPES)}; got {shape!r}.{hint}'
        )
    if (match['power'] is not None) != (shape == 'power'):
        raise ValueError('an exponent belongs to power, and to no other shape, as in power:1.2.')
    is_constant = shape == 'constant'
    if is_constant == (match['end'] is not None):
        raise ValueError(
            'constant has a single rate, as in constant 0.5, or keeps that before it.'
            if is_constant
            else f'{shape} needs the rate at its end, as in {shape} to 0.'
        )
    start = previous_end if match['start'] is None else _parse_rate(match['start'])
    end = start if is_constant else _parse_rate(match['end'])
    if is_constant and end == 0:
        raise ValueError('a constant learning rate of 0 trains nothing.')
    if shape == 'exponential' and not (start and end):
        raise ValueError(
            'exponential multiplies by a constant factor, so its ends must be above 0.'
        )
    power = 1.0 if match['power'] is None else _parse_number(match['power'], 'the exponent')
    if not 1e-3 <= power <= 1e3:
        raise ValueError(f'the exponent must be between 0.001 and 1000; got {power:g}.')
    return ScheduleStage(*_parse_length(match['length']), shape, start, end, power)


def _parse_length(text: str) -> tuple[float | None, str]:
    """Returns (30.0, 'steps') for '30', (0.3, 'share') for '0.3' and '30%', (None, '') for
    'rest'.
    """
    if text == 'rest':
        return None, ''
    is_percent = text.endswith('%')
    length = _parse_number(text.removesuffix('%'), 'the length')
    if not is_percent and '.' not in text:
        return length, 'steps'
    share = length / 100 if is_percent else length
    if share > 1:
        raise ValueError(f'a length with a point or % is a share of the run; got {text}.')
    return share, 'share'


def _parse_rate(text: str) -> float:
    rate = _parse_number(text, 'a rate')
    if rate > 1:
        raise ValueError(f'a rate is a share of the peak, optim.lr, from 0 to 1; got {text}.')
    return rate


def _parse_number(text: str, name: str) -> float:
    if not re.fullmatch(r'\d+(\.\d*)?(e-?\d+)?|\.\d+', text):
        lengths = ', or rest' if name == 'the length' else ''
        raise ValueError(f'{name} must be a number of at least 0{lengths}; got {text!r}.')
    return float(text)


def stage_stops(
    parsed: Iterable[ScheduleStage], steps: Any, warmup_steps: Any, numpy: Any = jnp
) -> list[Any]:
    """Returns the number of steps from the warm-up to the end of each stage.

    Args:
      parsed: the stages.
      steps: length of the run, which may be a tracer.
      warmup_steps: steps before the first stage.
      numpy: the module that computes; NumPy for numbers, before JAX may start.
    """
    lengths = [_stage_steps(stage, steps) for stage in parsed]
    free = numpy.maximum(steps - warmup_steps - sum(n for n in lengths if n is not None), 0.0)
    equal_part = free / max(lengths.count(None), 1)
    stops, total = [], 0.0
    for length in lengths:
        total = total + (equal_part if length is None else length)
        stops.append(numpy.round(total))
    return stops


def _stage_steps(stage: ScheduleStage, steps: Any) -> Any:
    """Returns the steps of a stage, None for an equal part of the remaining ones."""
    return stage.length and stage.length * (steps if stage.unit == 'share' else 1)


def check_stages(recipe: Any, part: Any) -> None:
    """Raises ValueError if stages cannot be parsed, or are longer or shorter than the run."""
    parsed, warmup_steps = parse_stages(part.options['stages']), part.options['warmup_steps']
    lengths = [_stage_steps(stage, recipe.train.steps) for stage in parsed]
    total, steps = sum(n for n in lengths if n is not None), recipe.train.steps - warmup_steps
    after = f' after optim.warmup_steps={warmup_steps}' * bool(warmup_steps)
    if warmup_steps and parsed[0].start == 0:
        raise ValueError(
            f'the first stage of optim.stages rises from 0{after}, which end at the peak. Leave '
            'that stage out, or set optim.warmup_steps=0.'
        )
    if round(total) > max(steps, 0):
        raise ValueError(
            f'the stages of optim.stages take {total:,.10g} steps, but train.steps='
            f'{recipe.train.steps} leaves {max(steps, 0):,}{after}. Make one of them shorter, or '
            'give it the length rest.'
        )
    if round(total) < steps and None not in lengths:
        raise ValueError(
            f'the stages of optim.stages take {total:,.10g} steps, but train.steps='
            f'{recipe.train.steps} leaves {steps:,}{after}. Give one of them the length rest, '
            'which fills the run.'
        )


def find_stage_decays(
    steps: int, *, stages: str, warmup_steps: int = 0, **options: Any
) -> list[int]:
    """Returns the last step before each decay of `stages`; stages that fall in a row are one decay.

    Args:
      steps: length of the run.
      stages: the text of the stages.
      warmup_steps: steps before the first stage.
      **options: the other options, which do not matter.
    """
    del options
    parsed = parse_stages(stages)
    stops = stage_stops(parsed, np.float32(steps), warmup_steps, np)  # rounded as in training
    stops = [int(stop) + warmup_steps for stop in stops]
    starts, previous_end, was_falling = [], 1.0 if warmup_steps else parsed[0].start, False
    for stage, start in zip(parsed, [warmup_steps, *stops], strict=False):
        falls = stage.end < stage.start or stage.start < previous_end
        if falls and not was_falling:
            starts.append(start)
        previous_end, was_falling = stage.end, falls
    return starts


@schedule_row(check=check_stages, decay_starts=find_stage_decays)
def stages(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    stages: Annotated[
        str,
        Option(f'stages after the warm-up, such as {STAGE_EXAMPLE!r}, in shares of the peak'),
    ] = STAGE_EXAMPLE,
) -> jax.Array:
    """Stages in a row, each with its length, shape and ends: trapezoid, WSD-S, cycles.

    Stages are separated by commas, and each has the form `LENGTH SHAPE FROM to END`:

        LENGTH   100 (steps), 20% or 0.2 (of the run), rest (an equal part of what remains)
        SHAPE    linear, cosine, sqrt, exponential, power:1.2, constant
        FROM     rate before the first step; by default that before, in the first stage 1
        END      rate of the last step; constant has none

    With the progress `p`, from `1 / n` in the first of `n` steps to 1 in the last, and ends `a` and
    `b`, `f = b + (a - b) h(p)`: `h` is `1 - p` for linear, `(1 + cos(pi p)) / 2` for cosine,
    `1 - sqrt(p)` for sqrt and `(1 - p)^k` for power; exponential has `f = a (b / a)^p`. Stages end
    at whole steps, to which shares are rounded. Examples:

        warmup_cosine        rest cosine to 0
        warmup_stable_decay  rest constant, 20% sqrt to 0
        cyclic               rest cosine to 0, rest cosine 1 to 0, rest cosine 1 to 0
        WSD-S                rest constant, 10% linear to 0, rest constant 1, 10% linear to 0
        power cooldown       60% constant, rest power:1.2 to 0

    The warm-up is that of `warmup_steps`; with 0 it may be a stage too, `100 linear 0 to 1`. Each
    period of WSD-S (arXiv:2410.05192) ends in a decay, and the next starts at the peak. With one
    shape and few numbers, use the schedule of that name: its numbers can be swept in one program,
    while each text of stages is compiled.
    """
    parsed = parse_stages(stages)
    stops = stage_stops(parsed, steps, warmup_steps)
    n_done = jnp.clip(step + 1.0 - warmup_steps, 0.0, jnp.maximum(stops[-1], 0.0))
    fraction = jnp.full_like(n_done, parsed[-1].end)
    for stage, start, stop in reversed(list(zip(parsed, [0.0, *stops], stops, strict=False))):
        progress = jnp.clip((n_done - start) / jnp.maximum(stop - start, 1.0), 0.0, 1.0)
        value = STAGE_SHAPES[stage.shape](progress, stage.start, stage.end, stage.power)
        fraction = jnp.where(n_done <= stop, value, fraction)
    return _warmup(step, warmup_steps) * fraction


SCHEDULES = {
    'constant': constant,
    'cyclic': cyclic,
    'exponential': exponential,
    'inverse_sqrt': inverse_sqrt,
    'linear': linear,
    'power': power,
    'stages': stages,
    'warmup_cosine': warmup_cosine,
    'warmup_stable_decay': warmup_stable_decay,
}
