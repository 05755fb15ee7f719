"""Evidence for claims: studies, which are tuned sweeps, and measures, which are computed.

A study is named by its config file, as train.py takes it, and a measure by `measure:NAME`. Both say
what they have cost, whether they are still as they were asked for, and estimates of quantities. A
study that takes chips nobody here may hold is named `CONFIG on TOPOLOGY`: without records of runs
it is out of reach, and has the cost that `tpu.plan` gives it.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.claims.estimates import Estimate
from eval.claims.measures.rows import MEASURES
from eval.claims.normal_form import digest
from lm.config.resolve import differences, resolve, with_dtype
from lm.launch.command import ConfigParser
from lm.record.upgrade import resolve_stored
from lm.record.workdir import SWEEP, drop_mesh_fields
from lm.storage.files import read_json, seal_record, write_json
from lm.study.arm import Ablation
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import split_sweep
from lm.study.tables.ablation import compare_pair, describe_progress, read_ablation
from lm.study.tables.results import gather, read_sweep
from modules.choices import choose

OPEN, STALE, OUT_OF_REACH = 'open', 'stale', 'out of reach here'
MEASURE = 'measure:'
CHANGED = '{} has changed since it was computed'
TOPOLOGY_SEPARATOR = ' on '  # between the config of a study and the chips that it takes
Selection = Mapping[
    str, Any
]  # what a condition says of its quantity: {'arm': {...}}, {'value': 'x'}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A row of QUANTITIES: a number of arms of a study. words: with the names of both arms."""

    estimate: Callable[[Ablation, int, int], Estimate | None]
    label: str
    unit: str


def loss_difference(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the loss of an arm less that of another, each at its best values, by fresh seeds.

    The interval has the allowances of both: an end is infinite where an arm is still at an edge of
    what was tried, which could make it better without bound. An arm that diverges at every value is
    infinitely worse than one that does not.
    """
    if ablation.study.tuning.open_wave is None:
        dead, other_dead = (ablation.is_dead(i) for i in (arm, against))
        if dead != other_dead:
            value = math.inf if dead else -math.inf
            return Estimate(value, value, value, 0)
    found = compare_pair(ablation, arm, against)
    if found is None:
        return None
    return Estimate(found.difference, found.low, found.high, found.n, found.deviation)


def speedup(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the tokens the baseline needs for the arm's loss over the arm's
    (`lm.study.speedup`); against: the baseline, 0.
    """
    found = ablation.speedup(arm) if against == 0 else None
    return found and Estimate(
        found.value, found.low, found.high, len(ablation.arms[arm].fresh_losses)
    )


QUANTITIES: Mapping[str, Quantity] = {
    'difference': Quantity(loss_difference, 'loss of {arm} - loss of {against}', 'nats per token'),
    'speedup': Quantity(speedup, 'speed-up of {arm} over {against}', ''),
}


@dataclasses.dataclass(frozen=True)
class StudyEvidence:
    """A tuned sweep.

    state: OPEN, STALE, OUT_OF_REACH or '', ended. why: of a state, in words. ablation: None before
    its first run, and where it is stale. topology: the chips that it takes, '' for none.
    """

    name: str
    folder: Path
    arms: ArmPlan
    state: str
    why: str
    ablation: Ablation | None
    topology: str = ''
    trains = True

    @property
    def has_records(self) -> bool:
        """Whether its folder has runs, begun or ended, or there is a plan of it."""
        return (self.folder / SWEEP).exists() or (bool(self.topology) and self.plan.exists())

    @property
    def runs(self) -> int:
        """Returns how many runs have ended."""
        every = range(len(self.arms.arms)) if self.ablation else ()
        return sum(sum(self.ablation.count_runs(i)) for i in every)

    @property
    def fresh_runs(self) -> int:
        """Returns how many runs of fresh seeds, which verdicts are of, have ended."""
        every = range(len(self.arms.arms)) if self.ablation else ()
        return sum(self.ablation.count_runs(i)[1] for i in every)

    @property
    def core_seconds(self) -> float:
        """Returns the seconds that its runs took, times the cores of each's machine."""
        every = self.ablation.arms if self.ablation else ()
        records = [record for arm in every for record in arm.records.values()]
        return sum(
            (r['wall_sec'] or 0.0) / (r['side_by_side'] or 1) * count_cores(r['device'])
            for r in records
        )

    @property
    def cost(self) -> float:
        """Returns about the operations that it takes: 6 a token and weight of its blocks."""
        found = 0.0
        for cell in self.arms.first_cells:
            model, data = cell.recipe.model, cell.recipe.data
            weights = 12 * model.n_layers * model.d_model**2
            found += 6 * weights * cell.recipe.train.steps * data.batch_size * data.seq_len
        return found * self.arms.tune.typical_runs

    @property
    def command(self) -> list[str]:
        """Returns what `python` trains it with."""
        return ['train.py', f'--config={self.config}', f'--workdir={self.folder}']

    @property
    def config(self) -> str:
        """Returns the config file, as train.py takes it."""
        return self.name.partition(TOPOLOGY_SEPARATOR)[0]

    @property
    def plan(self) -> Path:
        """Returns the file of its plan, whose name changes with what would be trained."""
        asked = json.dumps([cell.name for cell in self.arms.first_cells] + [self.arms.record()])
        digest = hashlib.sha256(f'{asked} {self.topology}'.encode()).hexdigest()[:8]
        return self.folder.with_name('plans') / f'{self.folder.name}-{digest}.json'

    @property
    def plan_command(self) -> list[str]:
        """Returns what `python` plans it with."""
        chips = f'--topology={self.topology}'
        return ['-m', 'tpu.plan', f'--config={self.config}', chips, f'--out={self.plan}']

    def describe(self, quantity: str, selection: Selection) -> tuple[str, str]:
        """Returns a quantity in words, and its unit. Raises ValueError where it names no arm."""
        places = self._select_arms(selection)
        known = self.ablation or self.arms
        arm, against = (known.arms[i].name for i in places)
        row = QUANTITIES[quantity]
        return row.label.format(arm=arm, against=against), row.unit

    def estimate(self, quantity: str, selection: Selection) -> Estimate | None:
        """Returns a quantity; None where it is not known, or not defined."""
        if self.ablation is None:
            return None
        return QUANTITIES[quantity].estimate(self.ablation, *self._select_arms(selection))

    def _select_arms(self, selection: Selection) -> tuple[int, int]:
        return self.select_arm(selection['arm']), self.select_arm(selection.get('against'))

    def select_arm(self, changes: Selection | None) -> int:
        """Returns the arm that these changes name; 0, the baseline, for None. Of several that have
        them among their own, it is the one that has fewest. Raises ValueError where that is none,
        or not one alone.
        """
        if changes is None:
            return 0
        every = [one.changes for one in self.arms.arms if one.is_judged]
        found = [i for i, own in enumerate(every) if changes.items() <= own.items()]
        least = min((len(every[i]) for i in found), default=0)
        found = [i for i in found if len(every[i]) == least]
        if len(found) != 1:
            many = 'no arm' if not found else f'{len(found)} arms'
            raise ValueError(f'{self.name} has {many} with {dict(changes)}; its arms: {every}')
        return found[0]


@dataclasses.dataclass(frozen=True)
class MeasureEvidence:
    """A computation, without runs. values: {} before it has been made, and where it is stale."""

    name: str
    path: Path
    state: str
    why: str
    values: Mapping[str, Estimate]
    core_seconds: float = 0.0
    runs: int = 0
    fresh_runs: int = 0
    cost: float = 0.0  # seconds, against the minutes of any study

    @property
    def current_digest(self) -> str:
        """Returns the digest of what computes it now."""
        return measure_digest(self.name.removeprefix(MEASURE))

    @property
    def has_records(self) -> bool:
        """Whether it has been computed."""
        return self.path.exists()

    @property
    def trains(self) -> bool:
        """Whether it fits weights; others are closed forms and numbers of what is drawn."""
        return MEASURES[self.name.removeprefix(MEASURE)].trains

    @property
    def command(self) -> list[str]:
        """Returns what `python` computes it with."""
        return ['-m', 'eval.claims.measures', self.name.removeprefix(MEASURE), str(self.path)]

    def describe(self, quantity: str, selection: Selection) -> tuple[str, str]:
        """Returns a value in words, without a unit. Raises ValueError for one it does not have."""
        del quantity
        known = MEASURES[self.name.removeprefix(MEASURE)].values
        choose(dict.fromkeys(known), selection['value'], self.name)
        return selection['value'].replace('_', ' '), ''

    def estimate(self, quantity: str, selection: Selection) -> Estimate | None:
        """Returns a value; None before it is known."""
        del quantity
        return self.values.get(selection['value'])


Evidence = StudyEvidence | MeasureEvidence


def count_cores(device: str | None) -> int:
    """Returns 2 of '2-core x86_64 CPU', and 8 of '8 x TPU v5e', whose devices are counted."""
    known = re.match(r'(\d+)(-core| x )', device or '')
    return int(known[1]) if known else 1


def open_evidence(name: str, workdir: Path) -> Evidence:
    """Returns a study or a measure with the records that it has.

    Raises:
      ValueError: for a config without config.tune, a measure that is none, and a record that
        cannot be read.
    """
    if name.startswith(MEASURE):
        return _open_measure(name, workdir)
    return _open_study(name, workdir)


def _open_study(name: str, workdir: Path) -> StudyEvidence:
    config, _, topology = name.partition(TOPOLOGY_SEPARATOR)
    base, sweep, tune = split_sweep(ConfigParser('config').parse(config))
    if tune is None:
        raise ValueError(f'{config} has no config.tune, so that its arms have no verdicts')
    path, _, given = config.partition(':')
    folder = workdir / '-'.join(filter(None, (Path(path).stem, given)))
    arms = ArmPlan(base, sweep, tune)
    study = StudyEvidence(name, folder, arms, OPEN, 'no run has begun', None, topology)
    if not (folder / SWEEP).exists():
        return _read_plan(study) if topology else study
    record = read_sweep(folder)
    ablation = read_ablation(record, gather(folder))
    if changed := _list_changes(record, base, arms):
        why = f'{config} has changed since its runs in {folder} in {", ".join(changed)}; move that '
        return dataclasses.replace(study, state=STALE, why=why + 'away to train it anew')
    why = describe_progress(ablation)
    return dataclasses.replace(study, state=OPEN if why else '', why=why, ablation=ablation)


def _list_changes(record: Mapping[str, Any], base: Mapping[str, Any], arms: ArmPlan) -> list[str]:
    """Names what makes another study of it than the one on record: fields, or its arms.

    A field that an older version did not have is none, and neither is where it is trained: a mesh,
    or the type of products that a device has by default.
    """
    was = resolve_stored(record['base'])
    now = resolve(with_dtype(base, was.model.dtype))
    found = [*drop_mesh_fields(differences(was, now))]
    is_same = _drop_search_version(record.get('tune') or {}) == _drop_search_version(arms.record())
    return found if is_same else [*found, 'config.tune or its arms']


def _read_plan(study: StudyEvidence) -> StudyEvidence:
    """A study without runs, and what they would cost on the chips that they take."""
    why = f'it takes {study.topology}, and is not planned yet'
    if study.plan.exists():
        record = read_json(study.plan)
        low, high = (n * record['chip_hours'] for n in record['waves'])
        why = f'{low:,.0f} to {high:,.0f} chip-hours of {record["topology"]} would decide'
    return dataclasses.replace(study, state=OUT_OF_REACH, why=why)


def _drop_search_version(tune: Mapping[str, Any]) -> Any:
    """The part of a record that makes another study of it: without the version of the search."""
    return json.loads(json.dumps({k: v for k, v in tune.items() if k != 'search_version'}))


def _open_measure(name: str, workdir: Path) -> MeasureEvidence:
    short = name.removeprefix(MEASURE)
    choose(MEASURES, short, 'measure')
    path = workdir / 'measures' / f'{short}.json'
    measure = MeasureEvidence(name, path, OPEN, 'it has not been computed', {})
    if not path.exists():
        return measure
    record = read_json(path)
    if record['code'] != measure.current_digest:
        return dataclasses.replace(measure, state=STALE, why=CHANGED.format(name))
    values = {key: _parse_estimate(given) for key, given in record['values'].items()}
    sec = record['core_seconds']
    return dataclasses.replace(measure, state='', why='', values=values, core_seconds=sec)


def _parse_estimate(numbers: Mapping[str, Any]) -> Estimate:
    """Reads one back: JSON has null for what is no number."""
    return Estimate(**{key: math.nan if value is None else value for key, value in numbers.items()})


@functools.cache
def measure_digest(name: str) -> str:
    """Returns the digest of a measure, by what it runs through in eval.claims."""
    function = choose(MEASURES, name, 'measure').function
    return digest(function.__module__, function.__name__)


def compute_measure(name: str, path: Path) -> None:
    """Computes a measure and writes its record."""
    began = time.process_time()
    found = choose(MEASURES, name, 'measure').compute()
    values = {
        key: {name: None if math.isnan(x) else x for name, x in dataclasses.asdict(one).items()}
        for key, one in found.items()
    }
    record = {'values': values, 'code': measure_digest(name)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, seal_record(record | {'core_seconds': time.process_time() - began}))
