"""Protocols: what the cells of a sweep have in common besides their base, so that they compare.

    config.sweep = {'optim.name': ('adamw', 'soap'), 'protocol': 'equal_flops'}
    config.sweep = {'model.norm': ('rmsnorm', 'layernorm'), 'protocol': 'equal_time:hours=6'}

The first cell is the baseline. A protocol sets the steps of every cell, or another field, and
refuses cells that break it; with config.tune the cells are the arms. A warm-up keeps the steps that
the config gives it: it is another share of a run of another length (a length of the baseline,
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
from lm.study.plan.cells import PROTOCOL, Cell, Changes, group_by_program, make_cell
from lm.study.plan.cells import expand_sweep as cells_of
from lm.study.plan.settings import LR, SEEDS
from modules.choices import choose
from modules.options import Option, check_inline_options, parse_part

PROTOCOL_PATH = 'sweep.protocol'
STEPS, BATCH, EPOCHS = 'train.steps', 'data.batch_size', 'data.epochs'
SYNTHETIC = 'synthetic:'
Groups = Sequence[Sequence[Cell]]  # by program
# Shares by which a whole number of steps may miss what is to be equal. Half a step of 500 is the
# first; times are measured to a few per cent at best.
TOKENS_TOLERANCE, FLOPS_TOLERANCE, TIME_TOLERANCE = 0.001, 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Answers that a protocol needs and no config has.

    platform: of the devices, as 'cpu'. rows: gives the training rows of a config, prepared where
    they are not yet. seconds: gives the seconds of a step of each program, measured before
    training; a program is named by the cells that share it.
    """

    platform: str
    read_rows: Callable[[Recipe], Any]
    measure_seconds: Callable[[Groups], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of one cell. sets: fields that it gets. numbers: what they are to be equal in."""

    overrides: Changes
    quantities: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class AppliedProtocol:
    """A protocol with the terms of every cell, in their order. notes: what it cannot see to."""

    name: str
    options: Mapping[str, Any]
    cells: Sequence[Cell]
    terms: Sequence[Terms]
    notes: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[Changes]:
        """Returns the fields that each cell gets."""
        return [dict(one.overrides) for one in self.terms]

    def summary_lines(self) -> list[str]:
        """Says what was agreed, a line each: the protocol, and what it cannot see to."""
        steps = [int(one.quantities['steps']) for one in self.terms]
        options = ', '.join(f'{name}={value}' for name, value in self.options.items())
        ran = f'{min(steps):,}' + f' to {max(steps):,}' * (min(steps) < max(steps))
        said = f'protocol {self.name}{f" ({options})" if options else ""}: {ran} steps a cell'
        return [said, *(f'NOTE: {note}' for note in self.notes)]

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of it: the terms once for all seeds."""
        of_each = []
        for one, terms in zip(self.cells, self.terms, strict=True):
            own = {path: value for path, value in one.changes.items() if path not in SEEDS}
            entry = {'changes': own, 'sets': dict(terms.overrides), **terms.quantities}
            if entry not in of_each:
                of_each.append(entry)
        return {'name': self.name, 'options': dict(self.options), 'of_each': of_each}


@dataclasses.dataclass(frozen=True)
class ProtocolRow:
    """A row of PROTOCOLS.

    terms: (cells, means, options) -> the terms of each cell. held: fields that no cell may change,
    because the protocol sets or needs them. check: raises ValueError for cells that break it, by
    their configs alone. asks: what its terms need besides configs: 'text' or 'time'.
    """

    compute_terms: Callable[..., list[Terms]]
    fixed_fields: tuple[str, ...] = (STEPS,)
    check: Callable[[Sequence[Cell]], None] = lambda cells: None
    needs: str = ''


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol as config.sweep names it."""

    name: str
    row: ProtocolRow
    options: Mapping[str, Any]

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises ValueError for cells that break the protocol by their configs alone."""
        for one in cells:
            for path in self.row.fixed_fields:
                if path in one.changes:
                    raise ValueError(
                        f'sweep cell {one.changes}: the protocol {self.name} settles {path} for '
                        f'every cell, and this one sets {path}={one.changes[path]}; leave it out '
                        'of config.sweep, or leave out the protocol'
                    )
        self.row.check(cells)

    def apply(self, cells: Sequence[Cell], measurements: Measurements) -> AppliedProtocol:
        """Returns the terms of every cell. Raises ValueError where these cannot be met."""
        self.check(cells)
        terms = self.row.compute_terms(cells, measurements, **self.options)
        return AppliedProtocol(
            self.name, self.options, cells, terms, tuple(list_notes(cells, terms))
        )


def parse_protocol(sweep: Any) -> Protocol | None:
    """Returns the protocol that config.sweep names, None where it names none. Raises ValueError for
    a name or an option that is none.
    """
    if not isinstance(sweep, Mapping) or sweep.get(PROTOCOL) is None:
        return None
    given = sweep[PROTOCOL]
    if not isinstance(given, str):
        raise ValueError(
            f'{PROTOCOL_PATH} must be one name, such as equal_tokens or equal_time:hours=6; got {given!r}'
        )
    name, options = parse_part(PROTOCOL_PATH, given)
    row = choose(PROTOCOLS, name, PROTOCOL_PATH)
    return Protocol(name, row, check_inline_options(PROTOCOL_PATH, row, name, options))


def resolve_protocol(base: Mapping[str, Any], sweep: Any) -> Protocol | None:
    """Returns the protocol of a sweep once its cells are checked. Raises ValueError as `read` and
    `Protocol.check` do; no device is used.
    """
    found = parse_protocol(sweep)
    if found is not None:
        found.check(cells_of(base, sweep))
    return found


def apply_protocol(
    protocol: Protocol, base: Mapping[str, Any], sweep: Any, measurements: Measurements
) -> AppliedProtocol:
    """Returns the terms of every cell of a sweep. Raises ValueError where they cannot be met, or
    the text is too short for them.
    """
    found = cells_of(base, sweep)
    settled = protocol.apply(found, measurements)
    check_text_length(apply_overrides(base, found, settled.overrides), measurements.read_rows)
    return settled


def apply_overrides(
    base: Mapping[str, Any], cells: Sequence[Cell], overrides: Sequence[Changes]
) -> list[Cell]:
    """Returns the cells with the fields that a protocol sets. Their `changes` stay those that the
    sweep gives. Raises ValueError as `lm.study.plan.cells.cell` does.
    """
    start, found = build_config(base), []
    for one, own in zip(cells, overrides, strict=True):
        try:
            made = make_cell(start, one.changes | own, one.ignored)
        except ValueError as error:
            raise ValueError(f'sweep cell {one.changes}, with {own}: {error}') from error
        found.append(dataclasses.replace(made, changes=one.changes))
    return found


def check_text_length(cells: Iterable[Cell], rows: Callable[[Recipe], Any]) -> None:
    """Raises ValueError where the text is too short for the steps that a cell has."""
    asked = {}
    for one in cells:
        known = asked.setdefault(one.recipe.data, one)
        if one.recipe.train.steps > known.recipe.train.steps:
            asked[one.recipe.data] = one
    for data, one in asked.items():
        try:
            check_epochs(data, one.recipe.train.steps, rows(one.recipe))
        except ValueError as error:
            raise ValueError(f'sweep cell {one.changes}: {error}') from error


def list_notes(cells: Sequence[Cell], terms: Sequence[Terms]) -> list[str]:
    """Says what no protocol changes and a reader may expect it to."""
    found, first = [], cells[0].recipe
    steps = {own.quantities['steps'] for own in terms}
    if len(steps) > 1 and (warmup := flatten(first).get('optim.warmup_steps')):
        found.append(
            f'cells have {min(steps):,} to {max(steps):,} steps, and each warms up for the '
            f'{warmup:,} of optim.warmup_steps'
        )
    over_batch = {
        norm.name
        for one in cells
        for norm in one.recipe.norms.values()
        if norm.row.leaks and one.recipe.data.batch_size != first.data.batch_size
    }
    for name in sorted(over_batch):
        found.append(
            f'{name} takes its statistics over the batch, which cells change: whether to keep them '
            'over as many sequences, by ghost batches, is for the config to say'
        )
    tokenizers = {one.recipe.data.tokenizer for one in cells}
    if len(tokenizers) > 1:
        found.append('cells have tokenizers of their own, so that equal tokens are not equal text')
    return found


def tokens_per_step(recipe: Recipe) -> int:
    """Returns the places of a batch, padding included."""
    return recipe.data.batch_size * recipe.data.seq_len


def _step_terms(recipe: Recipe, steps: int, **numbers: float) -> Terms:
    """The terms of a cell that trains for so many steps."""
    own = {'steps': steps, 'tokens': steps * tokens_per_step(recipe)}
    return Terms({STEPS: steps}, own | numbers)


def _nearest_steps(
    one: Cell, total: float, per_step: float, tolerance: float, unit: str, advice: str
) -> int:
    """The number of steps nearest to total / a_step. Raises ValueError where it misses the total by
    more than a share `off`; `how`: what to do then.
    """
    steps = max(1, round(total / per_step))
    missed = abs(steps * per_step / total - 1)
    if missed > tolerance:
        raise ValueError(
            f'sweep cell {one.changes}: the baseline has {total:,.6g} {unit}, and {steps:,} steps '
            f'of {per_step:,.6g} come {missed:.2%} from that, of which {tolerance:.1%} may be. {advice}'
        )
    return steps


def equal_tokens(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Trains every cell on as many tokens as the baseline: steps = tokens / (batch_size seq_len).

    What is held equal where an optimizer or a loss is to be judged by what it makes of data
    (arXiv:2509.02046 compares optimizers so).
    """
    first = cells[0].recipe
    tokens = first.train.steps * tokens_per_step(first)
    found = []
    for one in cells:
        how = f'The nearest {BATCH} that works is {nearest_batch(one.recipe, tokens)}.'
        a_step = tokens_per_step(one.recipe)
        found.append(
            _step_terms(
                one.recipe, _nearest_steps(one, tokens, a_step, TOKENS_TOLERANCE, 'tokens', how)
            )
        )
    return found


def nearest_batch(recipe: Recipe, tokens: int) -> int:
    """Returns the batch nearest to the config's that comes to `tokens` in whole steps, of as many
    microbatches.
    """
    now, parts = recipe.data.batch_size, recipe.train.microbatches

    def works(batch: int) -> bool:
        a_step = batch * recipe.data.seq_len
        return abs(max(1, round(tokens / a_step)) * a_step / tokens - 1) <= TOKENS_TOLERANCE

    near = sorted(range(parts, 2 * now + parts, parts), key=lambda batch: abs(batch - now))
    return next(filter(works, near), parts)


def equal_flops(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Gives every cell the baseline's operations: steps = F / f, f those of the cell's own step.

    f = (6 N + attention) batch_size seq_len with N the weights that a token is multiplied by, the
    readout and a token's experts included (arXiv:2001.08361, section 2.1). An optimizer's own
    products, and what is computed twice under model.remat, are not counted: equal_time has both.
    """
    flops = [step_flops(one.recipe, measurements.platform) for one in cells]
    total = cells[0].recipe.train.steps * flops[0]
    how = f'Give the baseline more steps: a cell needs {math.ceil(0.5 / FLOPS_TOLERANCE)} to be that near.'
    return [
        _step_terms(
            one.recipe,
            n := _nearest_steps(one, total, f, FLOPS_TOLERANCE, 'FLOPs', how),
            flops=n * f,
        )
        for one, f in zip(cells, flops, strict=True)
    ]


def equal_time(
    cells: Sequence[Cell],
    measurements: Measurements,
    *,
    hours: Annotated[
        float | None, Option('of training; None: as long as the baseline takes', 1e-6, 1e6)
    ] = None,
) -> list[Terms]:
    """Gives every cell as long to train as the baseline, or `hours`, at its own speed here.

    steps = 3600 hours * tokens a second / (batch_size seq_len), with the speed measured before
    training and kept in throughput.json, so that a resumed command finds the same steps. The
    published classes are 6, 12, 24, 48 and 96 hours of one named accelerator (arXiv:2309.11197,
    Languini). Evaluation, checkpoints and compilation are no part of the time.
    """
    programs = group_by_program(list(cells))
    measured = zip(programs, measurements.measure_seconds(programs), strict=True)
    a_step = {one.name: sec for group, sec in measured for one in group}
    first = cells[0]
    total = first.recipe.train.steps * a_step[first.name] if hours is None else 3600 * hours
    how = 'Give the baseline more steps.' if hours is None else 'Give them more hours.'
    found = []
    for one in cells:
        sec = a_step[one.name]
        n = _nearest_steps(one, total, sec, TIME_TOLERANCE, 'seconds', how)
        found.append(_step_terms(one.recipe, n, seconds=n * sec, seconds_a_step=sec))
    return found


def one_epoch(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Trains every cell on all of its training text once: steps = rows / batch_size, rounded down.

    A row is seq_len tokens, so that a cell with rows or batches of its own has steps of its own. Of
    a mixture the source that ends first ends the epoch.
    """
    found = []
    for one in cells:
        steps = steps_in_epoch(measurements.read_rows(one.recipe), one.recipe.data.batch_size)
        if steps < 1:
            raise ValueError(
                f'sweep cell {one.changes}: its training text is less than one batch of '
                f'{one.recipe.data.batch_size} rows of {one.recipe.data.seq_len} tokens; make '
                f'{BATCH} smaller, or name more text'
            )
        found.append(_step_terms(one.recipe, steps))
    return found


def _check_one_epoch(cells: Sequence[Cell]) -> None:
    for one in cells:
        data = one.recipe.data
        if data.epochs > 1:
            raise ValueError(
                f'sweep cell {one.changes}: the protocol one_epoch takes the text once, and '
                f'{EPOCHS}={data.epochs}; set it to 1'
            )
        sources = [data.source]
        if data.mixture is not None:
            sources = [own.source for own in parse_mixture(data.mixture)]
        for source in sources:
            if source.startswith(SYNTHETIC):
                raise ValueError(
                    f'sweep cell {one.changes}: the protocol one_epoch takes a text once, and '
                    f'{source} is drawn as long as it is asked for; name a text in data.source, or '
                    f'another protocol: {", ".join(sorted(set(PROTOCOLS) - {"one_epoch"}))}'
                )


def regime_adaptation(cells: Sequence[Cell], measurements: Measurements) -> list[Terms]:
    """Gives cells with batches of B for the baseline's B0 as many updates, at lr sqrt(B / B0).

    A larger batch thus sees B / B0 times the tokens: the gap between large and small batches came
    from fewer updates, and a step whose covariance is kept grows with the root of the batch
    (arXiv:1705.08741, sections 4 and 5). The epochs that config.data allows grow as the tokens do.
    Where arms are tuned, the rate is the centre of the arm's search. The paper's ghost batches, for
    norms over the batch, are the config's choice.
    """
    first, found = cells[0].recipe, []
    for one in cells:
        recipe = one.recipe
        ratio = recipe.data.batch_size / first.data.batch_size
        lr, sets = flatten(recipe)[LR] * math.sqrt(ratio), {}
        if ratio != 1:
            sets[LR] = lr
            sets |= {EPOCHS: math.ceil(ratio * recipe.data.epochs)} if ratio > 1 else {}
        steps = recipe.train.steps
        tokens = steps * tokens_per_step(recipe)
        found.append(Terms(sets, {'steps': steps, 'tokens': tokens, 'lr': lr}))
    return found


def _check_batches(cells: Sequence[Cell]) -> None:
    if len({one.recipe.data.batch_size for one in cells}) < 2:
        raise ValueError(
            f'the protocol regime_adaptation is for cells that differ in {BATCH}, and all have '
            f'{cells[0].recipe.data.batch_size}; make it an axis of config.sweep'
        )


PROTOCOLS = {
    'equal_flops': ProtocolRow(equal_flops),
    'equal_time': ProtocolRow(equal_time, needs='time'),
    'equal_tokens': ProtocolRow(equal_tokens),
    'one_epoch': ProtocolRow(one_epoch, (STEPS, EPOCHS), _check_one_epoch, 'text'),
    'regime_adaptation': ProtocolRow(regime_adaptation, (STEPS, EPOCHS), _check_batches),
}
