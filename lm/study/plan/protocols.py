"""Protocols make the cells of a sweep comparable: equal tokens, FLOPs, time or epochs.

    config.sweep = {'optim.name': ('adamw', 'soap'), 'protocol': 'equal_flops'}
    config.sweep = {'model.norm': ('rmsnorm', 'layernorm'), 'protocol': 'equal_time:hours=6'}

The first cell is the baseline. A protocol sets the steps of every cell, or another field, and
refuses cells that break it; with config.tune the cells are the arms. A warm-up keeps its number of
steps from the config, so its share changes with the length of a run (a length of the baseline,
`tune.lengths`, scales it). Without a protocol all cells have the steps of the config.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from lm.config.mixture import parse_mixture as parse_mixture
from lm.config.recipe import Recipe
from lm.config.resolve import build_config, flatten
from lm.data import check_epochs, steps_in_epoch
from lm.run.program import step_flops
from lm.study.plan.cells import PROTOCOL, Cell, Changes, expand_sweep, group_by_program, make_cell
from lm.study.plan.settings import LR, SEEDS
from modules.choices import choose
from modules.options import Option, check_inline_options, parse_part

PROTOCOL_PATH = 'sweep.protocol'
STEPS, BATCH, EPOCHS = 'train.steps', 'data.batch_size', 'data.epochs'
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


@dataclasses.dataclass(frozen=True)
class AppliedProtocol:
    """A protocol with the terms it gives to each cell.

    Attributes:
      name: name of the protocol.
      options: its options.
      cells: the cells without overrides.
      terms: the terms of each cell.
      notes: conditions that it cannot check.
    """

    name: str
    options: Mapping[str, Any]
    cells: Sequence[Cell]
    terms: Sequence[Terms]
    notes: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[Changes]:
        """Returns the fields that the protocol sets in each cell."""
        return [dict(terms.overrides) for terms in self.terms]

    def summary_lines(self) -> list[str]:
        """Returns the lines printed at the start of a sweep."""
        steps = [int(terms.quantities['steps']) for terms in self.terms]
        options = ', '.join(f'{name}={value}' for name, value in self.options.items())
        step_range = f'{min(steps):,}' + f' to {max(steps):,}' * (min(steps) < max(steps))
        headline = (
            f'protocol {self.name}{f" ({options})" if options else ""}: {step_range} steps per cell'
        )
        return [headline, *(f'NOTE: {note}' for note in self.notes)]

    def record(self) -> dict[str, Any]:
        """Returns the entry of `sweep.json`, with the terms once for all seeds."""
        entries = []
        for cell, terms in zip(self.cells, self.terms, strict=True):
            changes = {path: value for path, value in cell.changes.items() if path not in SEEDS}
            entry = {'changes': changes, 'sets': dict(terms.overrides), **terms.quantities}
            if entry not in entries:
                entries.append(entry)
        return {'name': self.name, 'options': dict(self.options), 'of_each': entries}


@dataclasses.dataclass(frozen=True)
class ProtocolRow:
    """A row of PROTOCOLS.

    Attributes:
      compute_terms: (cells, measurements, options) -> the terms of each cell.
      fixed_fields: fields that no cell may change, because the protocol sets or needs them.
      check: raises ValueError for cells with configs that break the protocol.
      needs: 'text' or 'time', if configs alone do not determine the terms.
    """

    compute_terms: Callable[..., list[Terms]]
    fixed_fields: tuple[str, ...] = (STEPS,)
    check: Callable[[Sequence[Cell]], None] = lambda cells: None
    needs: str = ''


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol with options, as config.sweep names it."""

    name: str
    row: ProtocolRow
    options: Mapping[str, Any]

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises ValueError for cells with configs that break the protocol."""
        for cell in cells:
            for path in self.row.fixed_fields:
                if path in cell.changes:
                    raise ValueError(
                        f'sweep cell {cell.changes}: the protocol {self.name} determines {path}, '
                        f'but this cell sets {path}={cell.changes[path]}. Leave it out of '
                        'config.sweep, or leave out the protocol'
                    )
        self.row.check(cells)

    def apply(self, cells: Sequence[Cell], measurements: Measurements) -> AppliedProtocol:
        """Returns the terms of each cell. Raises ValueError if a cell cannot meet them."""
        self.check(cells)
        terms = self.row.compute_terms(cells, measurements, **self.options)
        return AppliedProtocol(
            self.name, self.options, cells, terms, tuple(list_notes(cells, terms))
        )


def parse_protocol(sweep: Any) -> Protocol | None:
    """Returns the protocol that config.sweep names, or None.

    Raises ValueError for an unknown name or option.
    """
    if not isinstance(sweep, Mapping) or sweep.get(PROTOCOL) is None:
        return None
    text = sweep[PROTOCOL]
    if not isinstance(text, str):
        raise ValueError(
            f'{PROTOCOL_PATH} must be one name, such as equal_tokens or equal_time:hours=6; got '
            f'{text!r}'
        )
    name, options = parse_part(PROTOCOL_PATH, text)
    row = choose(PROTOCOLS, name, PROTOCOL_PATH)
    return Protocol(name, row, check_inline_options(PROTOCOL_PATH, row, name, options))


def resolve_protocol(base: Mapping[str, Any], sweep: Any) -> Protocol | None:
    """Returns the protocol of a sweep after checking its cells.

    Uses no device. Raises ValueError as `parse_protocol` and `Protocol.check` do.
    """
    protocol = parse_protocol(sweep)
    if protocol is not None:
        protocol.check(expand_sweep(base, sweep))
    return protocol


def apply_protocol(
    protocol: Protocol, base: Mapping[str, Any], sweep: Any, measurements: Measurements
) -> AppliedProtocol:
    """Returns the terms of each cell of a sweep.

    Args:
      protocol: the protocol.
      base: the config that all cells start from, as nested dicts.
      sweep: config.sweep.
      measurements: text, devices and step times of this machine.

    Returns:
      The protocol with its terms.

    Raises:
      ValueError: if a cell cannot meet its terms, or if the text is too short for them.
    """
    cells = expand_sweep(base, sweep)
    applied = protocol.apply(cells, measurements)
    check_text_length(apply_overrides(base, cells, applied.overrides), measurements.read_rows)
    return applied


def apply_overrides(
    base: Mapping[str, Any], cells: Sequence[Cell], overrides: Sequence[Changes]
) -> list[Cell]:
    """Returns the cells with the fields that a protocol sets. Their `changes` remain the sweep's.

    Args:
      base: the config that all cells start from, as nested dicts.
      cells: cells without overrides.
      overrides: fields that the protocol sets in each cell.

    Returns:
      The cells.

    Raises:
      ValueError: as `lm.study.plan.cells.make_cell` does.
    """
    start, applied = build_config(base), []
    for cell, changes in zip(cells, overrides, strict=True):
        try:
            new_cell = make_cell(start, cell.changes | changes, cell.ignored)
        except ValueError as error:
            raise ValueError(f'sweep cell {cell.changes}, with {changes}: {error}') from error
        applied.append(dataclasses.replace(new_cell, changes=cell.changes))
    return applied


def check_text_length(cells: Iterable[Cell], rows: Callable[[Recipe], Any]) -> None:
    """Raises ValueError if the text is too short for the steps of a cell."""
    longest = {}
    for cell in cells:
        longest_cell = longest.setdefault(cell.recipe.data, cell)
        if cell.recipe.train.steps > longest_cell.recipe.train.steps:
            longest[cell.recipe.data] = cell
    for data, cell in longest.items():
        try:
            check_epochs(data, cell.recipe.train.steps, rows(cell.recipe))
        except ValueError as error:
            raise ValueError(f'sweep cell {cell.changes}: {error}') from error


def list_notes(cells: Sequence[Cell], terms: Sequence[Terms]) -> list[str]:
    """Returns notes on properties that no protocol equalises, although a reader may expect it."""
    notes, first = [], cells[0].recipe
    steps = {cell_terms.quantities['steps'] for cell_terms in terms}
    if len(steps) > 1 and (warmup := flatten(first).get('optim.warmup_steps')):
        notes.append(
            f'cells have {min(steps):,} to {max(steps):,} steps, but all warm up for {warmup:,} '
            '(optim.warmup_steps)'
        )
    over_batch = {
        norm.name
        for cell in cells
        for norm in cell.recipe.norms.values()
        if norm.row.leaks and cell.recipe.data.batch_size != first.data.batch_size
    }
    for name in sorted(over_batch):
        notes.append(
            f'{name} computes its statistics over the batch, and batch sizes differ between cells. '
            'To keep the number of sequences equal, use ghost_batchnorm'
        )
    tokenizers = {cell.recipe.data.tokenizer for cell in cells}
    if len(tokenizers) > 1:
        notes.append('cells have different tokenizers, so equal tokens are not equal text')
    return notes


def tokens_per_step(recipe: Recipe) -> int:
    """Returns the number of positions in a batch, including padding."""
    return recipe.data.batch_size * recipe.data.seq_len


def _step_terms(recipe: Recipe, steps: int, **numbers: float) -> Terms:
    """Returns the terms of a cell that trains for a number of steps."""
    quantities = {'steps': steps, 'tokens': steps * tokens_per_step(recipe)}
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
    first = cells[0].recipe
    tokens = first.train.steps * tokens_per_step(first)
    terms = []
    for cell in cells:
        advice = f'The nearest {BATCH} that works is {nearest_batch(cell.recipe, tokens)}.'
        per_step = tokens_per_step(cell.recipe)
        terms.append(
            _step_terms(
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
    flops = [step_flops(cell.recipe, measurements.platform) for cell in cells]
    total = cells[0].recipe.train.steps * flops[0]
    min_steps = math.ceil(0.5 / FLOPS_TOLERANCE)
    advice = f'Increase train.steps: {min_steps} steps per cell are always near enough.'
    return [
        _step_terms(
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
        terms.append(_step_terms(cell.recipe, n, seconds=n * sec, seconds_a_step=sec))
    return terms


def one_epoch(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Trains every cell on all of its training text once: steps = rows / batch_size, rounded down.

    A row is seq_len tokens, so the steps depend on the row length and batch size of each cell. In a
    mixture, the epoch ends when the first source ends.
    """
    terms = []
    for cell in cells:
        steps = steps_in_epoch(measurements.read_rows(cell.recipe), cell.recipe.data.batch_size)
        if steps < 1:
            raise ValueError(
                f'sweep cell {cell.changes}: the training text is shorter than one batch of '
                f'{cell.recipe.data.batch_size} rows of {cell.recipe.data.seq_len} tokens; reduce '
                f'{BATCH}, or use more text'
            )
        terms.append(_step_terms(cell.recipe, steps))
    return terms


def _check_one_epoch(cells: Sequence[Cell]) -> None:
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
                    f'protocol: {", ".join(sorted(set(PROTOCOLS) - {"one_epoch"}))}'
                )


def regime_adaptation(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Gives cells with batches of B as many updates as the baseline with B0, at lr sqrt(B / B0).

    A larger batch thus sees B / B0 times the tokens: the gap between large and small batches came
    from fewer updates, and a step with constant covariance grows with the root of the batch
    (arXiv:1705.08741, sections 4 and 5). The epochs that config.data allows grow with the tokens.
    If arms are tuned, the rate is the centre of the arm's search. Ghost batches, which the paper
    uses for norms over the batch, are left to the config.
    """
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


def _check_batches(cells: Sequence[Cell]) -> None:
    """Raises ValueError if all cells have the same batch size."""
    if len({cell.recipe.data.batch_size for cell in cells}) < 2:
        raise ValueError(
            f'the protocol regime_adaptation needs cells with different {BATCH}, but all have '
            f'{cells[0].recipe.data.batch_size}; make it an axis of config.sweep'
        )


PROTOCOLS = {
    'equal_flops': ProtocolRow(equal_flops),
    'equal_time': ProtocolRow(equal_time, needs='time'),
    'equal_tokens': ProtocolRow(equal_tokens),
    'one_epoch': ProtocolRow(one_epoch, (STEPS, EPOCHS), _check_one_epoch, 'text'),
    'regime_adaptation': ProtocolRow(regime_adaptation, (STEPS, EPOCHS), _check_batches),
}
