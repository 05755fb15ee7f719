"""Protocols make the cells of a sweep comparable: equal tokens, FLOPs, time, parameters or epochs.

    config.sweep = {'optim.name': ('adamw', 'soap'), 'protocol': 'equal_flops'}
    config.sweep = {'model.norm': ('rmsnorm', 'layernorm'), 'protocol': 'equal_time:hours=6'}

The first cell is the baseline. A protocol sets the steps of every cell, or another field, and
refuses cells that break it; with config.tune the cells are the arms. A warm-up keeps its number of
steps from the config, so its share changes with the length of a run (a length of the baseline,
`tune.lengths`, scales it). Without a protocol all cells have the steps of the config.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm.config.recipe import Recipe
from lm.config.resolve import build_config, flatten
from lm.run.program import check_run_epochs
from lm.study.plan.cells import PROTOCOL, Cell, Changes, expand_sweep, make_cell
from lm.study.plan.settings import SEEDS
from lm.study.plan.terms import (
    D_FF,
    EPOCHS,
    SECONDS,
    STEPS,
    Measurements,
    Terms,
    check_batches,
    check_one_epoch,
    equal_flops,
    equal_parameters,
    equal_time,
    equal_tokens,
    one_epoch,
    regime_adaptation,
)
from lm.study.tables.text import format_number
from modules.choices import choose
from modules.options import check_inline_options, parse_part

PROTOCOL_PATH = 'sweep.protocol'


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
        options = ', '.join(f'{name}={format_number(v)}' for name, v in self.options.items())
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

    train.seconds stands for equal_time:hours with as many hours. Uses no device. Raises ValueError
    as `parse_protocol` and `Protocol.check` do, and for train.seconds beside a protocol.
    """
    protocol, seconds = parse_protocol(sweep), flatten(build_config(base))[SECONDS]
    if seconds is not None:
        if protocol is not None:
            raise ValueError(
                f'{SECONDS}={seconds:g} and {PROTOCOL_PATH}={protocol.name} both determine the '
                f'steps of the cells. Leave out one of them; {SECONDS} alone is '
                f'equal_time:hours={seconds / 3600:g}'
            )
        protocol = Protocol('equal_time', PROTOCOLS['equal_time'], {'hours': seconds / 3600})
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
        key = cell.recipe.data, cell.recipe.train.stages
        longest_cell = longest.setdefault(key, cell)
        if cell.recipe.train.steps > longest_cell.recipe.train.steps:
            longest[key] = cell
    for cell in longest.values():
        try:
            check_run_epochs(cell.recipe, rows(cell.recipe))
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


PROTOCOLS = {
    'equal_flops': ProtocolRow(equal_flops),
    'equal_parameters': ProtocolRow(equal_parameters, (D_FF,)),
    'equal_time': ProtocolRow(equal_time, (STEPS, SECONDS), needs='time'),
    'equal_tokens': ProtocolRow(equal_tokens),
    'one_epoch': ProtocolRow(one_epoch, (STEPS, EPOCHS), check_one_epoch, 'text'),
    'regime_adaptation': ProtocolRow(regime_adaptation, (STEPS, EPOCHS), check_batches),
}
