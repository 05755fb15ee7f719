"""The terms that each protocol gives the cells of a sweep: steps, or another field.

A protocol is a function (cells, measurements, options) -> the `Terms` of each cell, the baseline
first, and a row of `PROTOCOLS` (`lm.study.plan.protocols`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from lm.config.mixture import parse_mixture
from lm.config.recipe import Recipe
from lm.config.resolve import flatten, update_recipe
from lm.config.stages import parse_stages
from lm.data import steps_in_epoch
from lm.run.program import build_without_text, step_flops
from lm.run.tables import parameter_count
from lm.study.plan.cells import Cell, Changes, group_by_program
from lm.study.plan.settings import LR
from modules.options import Option

STEPS, BATCH, EPOCHS = 'train.steps', 'data.batch_size', 'data.epochs'
SECONDS = 'train.seconds'
D_FF = 'model.d_ff'
SYNTHETIC = 'synthetic:'
Groups = Sequence[Sequence[Cell]]  # by program
# Relative errors allowed by rounding to a whole number of steps. The first is half a step of 500;
# times are measured to a few per cent at best.
TOKENS_TOLERANCE, FLOPS_TOLERANCE, TIME_TOLERANCE = 0.001, 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Information that a protocol needs beyond the configs.

    Attributes:
      platform: platform of the devices, such as 'cpu'.
      read_rows: returns the training rows of a config, and prepares them if necessary.
      measure_seconds: returns the seconds of a step of each program, measured before training. A
        program is given as the cells that share it.
    """

    platform: str
    read_rows: Callable[[Recipe], Any]
    measure_seconds: Callable[[Groups], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of one cell.

    Attributes:
      overrides: fields that the protocol sets.
      quantities: quantities that the protocol compares, by name.
    """

    overrides: Changes
    quantities: Mapping[str, float]


def tokens_per_step(recipe: Recipe) -> float:
    """Returns the number of positions in a batch, including padding; the mean with stages."""
    if recipe.train.stages is None:
        return recipe.data.batch_size * recipe.data.seq_len
    return recipe.mean_batch_tokens


def refuse_stages(protocol: str, cells: Sequence[Cell], only_tokens: bool = False) -> None:
    """Raises ValueError if a protocol that determines steps cannot do so for stages.

    Args:
      protocol: its name.
      cells: cells of the sweep.
      only_tokens: whether stages that end at shares of the run are supported.
    """
    for cell in cells:
        stages = cell.recipe.train.stages
        if stages is None or (only_tokens and all(s.is_share for s in parse_stages(stages))):
            continue
        remedy = 'End its stages at shares of the run' if only_tokens else 'Leave train.stages out'
        raise ValueError(
            f'sweep cell {cell.changes}: the protocol {protocol} sets train.steps, but with '
            f'train.stages={stages} steps differ from each other. {remedy}, or '
            'leave config.sweep.protocol out.'
        )


def step_terms(recipe: Recipe, steps: int, **numbers: float) -> Terms:
    """Returns the terms of a cell that trains for a number of steps."""
    quantities = {'steps': steps, 'tokens': round(steps * tokens_per_step(recipe))}
    return Terms({STEPS: steps}, quantities | numbers)


def _nearest_steps(
    cell: Cell, total: float, per_step: float, tolerance: float, unit: str, advice: str
) -> int:
    """Returns the number of steps nearest to total / per_step.

    Raises ValueError, with `advice`, if it misses the total by more than a share `tolerance`.
    """
    steps = max(1, round(total / per_step))
    error = abs(steps * per_step / total - 1)
    if error > tolerance:
        raise ValueError(
            f'sweep cell {cell.changes}: the baseline has {total:,.6g} {unit}, and {steps:,} steps '
            f'of {per_step:,.6g} {unit} miss that by {error:.2%}; at most {tolerance:.1%} is '
            f'allowed. {advice}'
        )
    return steps


def equal_tokens(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Trains every cell on as many tokens as the baseline: steps = tokens / (batch_size seq_len).

    This compares optimizers or losses by their use of data (as arXiv:2509.02046 compares
    optimizers).
    """
    refuse_stages('equal_tokens', cells, only_tokens=True)
    first = cells[0].recipe
    tokens = round(first.train.steps * tokens_per_step(first))
    terms = []
    for cell in cells:
        advice = f'The nearest {BATCH} that works is {nearest_batch(cell.recipe, tokens)}.'
        per_step = tokens_per_step(cell.recipe)
        terms.append(
            step_terms(
                cell.recipe,
                _nearest_steps(cell, tokens, per_step, TOKENS_TOLERANCE, 'tokens', advice),
            )
        )
    return terms


def nearest_batch(recipe: Recipe, tokens: int) -> int:
    """Returns the batch size nearest to the config's for which `tokens` are a whole number of
    steps.

    The batch is divisible by the number of microbatches.
    """
    configured, parts = recipe.data.batch_size, recipe.train.microbatches

    def is_exact(batch: int) -> bool:
        per_step = batch * recipe.data.seq_len
        return abs(max(1, round(tokens / per_step)) * per_step / tokens - 1) <= TOKENS_TOLERANCE

    candidates = sorted(
        range(parts, 2 * configured + parts, parts), key=lambda batch: abs(batch - configured)
    )
    return next(filter(is_exact, candidates), parts)


def equal_flops(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Gives every cell the baseline's operations: steps = F / f, f per step of the cell.

    f = (6 N + attention) batch_size seq_len with N the weights that a token is multiplied by,
    including the readout and a token's experts (arXiv:2001.08361, section 2.1). The products of an
    optimizer, and recomputation under model.remat, are not counted; equal_time includes both.
    """
    refuse_stages('equal_flops', cells, only_tokens=True)
    flops = [step_flops(cell.recipe, measurements.platform) for cell in cells]
    total = cells[0].recipe.train.steps * flops[0]
    min_steps = math.ceil(0.5 / FLOPS_TOLERANCE)
    advice = f'Increase train.steps: {min_steps} steps per cell are always near enough.'
    return [
        step_terms(
            cell.recipe,
            n := _nearest_steps(cell, total, f, FLOPS_TOLERANCE, 'FLOPs', advice),
            flops=n * f,
        )
        for cell, f in zip(cells, flops, strict=True)
    ]


def equal_time(
    cells: Sequence[Cell],
    measurements: Measurements,
    *,
    hours: Annotated[
        float | None, Option('training time; None: that of the baseline', 1e-6, 1e6)
    ] = None,
) -> list[Terms]:
    """Gives every cell as long to train as the baseline, or `hours`, at its own speed here.

    steps = 3600 hours * tokens per second / (batch_size seq_len). The speed is measured before
    training and kept in throughput.json, so that a resumed command finds the same steps. The
    published classes are 6, 12, 24, 48 and 96 hours of one named accelerator (arXiv:2309.11197,
    Languini). The time excludes evaluation, checkpoints and compilation.

    Args:
      cells: cells of the sweep, the baseline first.
      measurements: text, devices and step times of this machine.
      hours: hours of training; None: as long as the baseline takes.

    Returns:
      The terms of each cell.
    """
    refuse_stages('equal_time', cells)
    programs = group_by_program(list(cells))
    measured = zip(programs, measurements.measure_seconds(programs), strict=True)
    step_sec = {cell.name: sec for group, sec in measured for cell in group}
    first = cells[0]
    total = first.recipe.train.steps * step_sec[first.name] if hours is None else 3600 * hours
    advice = 'Increase train.steps.' if hours is None else 'Increase hours.'
    terms = []
    for cell in cells:
        sec = step_sec[cell.name]
        n = _nearest_steps(cell, total, sec, TIME_TOLERANCE, 'seconds', advice)
        terms.append(step_terms(cell.recipe, n, seconds=n * sec, seconds_a_step=sec))
    return terms


def one_epoch(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Trains every cell on all of its training text once: steps = rows / batch_size, rounded down.

    A row is seq_len tokens, so the steps depend on the row length and batch size of each cell. In a
    mixture, the epoch ends when the first source ends.
    """
    refuse_stages('one_epoch', cells)
    terms = []
    for cell in cells:
        steps = steps_in_epoch(measurements.read_rows(cell.recipe), cell.recipe.data.batch_size)
        if steps < 1:
            raise ValueError(
                f'sweep cell {cell.changes}: the training text is shorter than one batch of '
                f'{cell.recipe.data.batch_size} rows of {cell.recipe.data.seq_len} tokens; reduce '
                f'{BATCH}, or use more text'
            )
        terms.append(step_terms(cell.recipe, steps))
    return terms


def check_one_epoch(cells: Sequence[Cell]) -> None:
    """Raises ValueError for several epochs, and for synthetic text, which has no end."""
    for cell in cells:
        data = cell.recipe.data
        if data.epochs > 1:
            raise ValueError(
                f'sweep cell {cell.changes}: the protocol one_epoch reads the text once, but '
                f'{EPOCHS}={data.epochs}; set it to 1'
            )
        sources = [data.source]
        if data.mixture is not None:
            sources = [component.source for component in parse_mixture(data.mixture)]
        for source in sources:
            if source.startswith(SYNTHETIC):
                raise ValueError(
                    f'sweep cell {cell.changes}: the protocol one_epoch reads a text once, but '
                    f'{source} has no end. Choose a finite text as data.source, or another '
                    'protocol, such as equal_tokens'
                )


def regime_adaptation(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Gives cells with batches of B as many updates as the baseline with B0, at lr sqrt(B / B0).

    A larger batch thus sees B / B0 times the tokens: the gap between large and small batches came
    from fewer updates, and a step with constant covariance grows with the root of the batch
    (arXiv:1705.08741, sections 4 and 5). The epochs that config.data allows grow with the tokens.
    If arms are tuned, the rate is the centre of the arm's search. Ghost batches, which the paper
    uses for norms over the batch, are left to the config.
    """
    refuse_stages('regime_adaptation', cells)
    first, terms = cells[0].recipe, []
    for cell in cells:
        recipe = cell.recipe
        ratio = recipe.data.batch_size / first.data.batch_size
        lr, overrides = flatten(recipe)[LR] * math.sqrt(ratio), {}
        if ratio != 1:
            overrides[LR] = lr
            overrides |= {EPOCHS: math.ceil(ratio * recipe.data.epochs)} if ratio > 1 else {}
        steps = recipe.train.steps
        tokens = steps * tokens_per_step(recipe)
        terms.append(Terms(overrides, {'steps': steps, 'tokens': tokens, 'lr': lr}))
    return terms


def check_batches(cells: Sequence[Cell]) -> None:
    """Raises ValueError if all cells have the same batch size."""
    if len({cell.recipe.data.batch_size for cell in cells}) < 2:
        raise ValueError(
            f'the protocol regime_adaptation needs cells with different {BATCH}, but all have '
            f'{cells[0].recipe.data.batch_size}; make it an axis of config.sweep'
        )


def equal_parameters(
    cells: Sequence[Cell],
    measurements: Measurements,
    *,
    multiple: Annotated[int, Option('model.d_ff is a multiple of this', 1)] = 1,
) -> list[Terms]:
    """Widens the MLPs of every cell until it has the parameters of the largest cell.

    A method that adds parameters, such as value embeddings, is thus compared with a wider baseline.
    The steps are unchanged; parameters without products then cost the method fewer FLOPs, which the
    report shows. `model.d_ff` is the field that changes: the count is linear in it.

    Args:
      cells: cells of the sweep, the baseline first.
      measurements: the platform.
      multiple: model.d_ff is rounded to a multiple of it.

    Returns:
      The terms of each cell.
    """

    def count(recipe):
        return parameter_count(
            build_without_text(recipe, recipe.data.tokenizer, measurements.platform)
        )

    counts = [count(cell.recipe) for cell in cells]
    largest, terms = max(counts), []
    for cell, parameters in zip(cells, counts, strict=True):
        width, overrides = cell.recipe.model.d_ff, {}
        per_unit = count(update_recipe(cell.recipe, {D_FF: width + 1})) - parameters
        target = multiple * round((width + (largest - parameters) / per_unit) / multiple)
        if target > width:
            overrides[D_FF] = target
            parameters += (target - width) * per_unit
        error = abs(parameters / largest - 1)
        if error > FLOPS_TOLERANCE:
            raise ValueError(
                f'sweep cell {cell.changes}: with {D_FF}={max(target, width)} it has '
                f'{parameters:,} parameters, and the largest cell {largest:,}; they may differ by '
                f'{FLOPS_TOLERANCE:.0%}. Choose a smaller equal_parameters:multiple'
            )
        steps = cell.recipe.train.steps
        tokens = round(steps * tokens_per_step(cell.recipe))
        terms.append(Terms(overrides, {'steps': steps, 'tokens': tokens, 'parameters': parameters}))
    return terms
