"""Evidence for claims: studies, which are tuned sweeps, and measures, which are computed.

A study is named by its config file, as train.py takes it, a measure by `measure:NAME`. Both report
their cost, whether their records are current, and estimates of quantities. A study on accelerators
that are not available here is named `CONFIG on TOPOLOGY`. Without records of runs it is out of
reach, and `tpu.plan` estimates its cost.
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
CHANGED = 'the code of {} has changed since it was computed'
NO_RUNS, NOT_COMPUTED = 'no run has started', 'it has not been computed'
TOPOLOGY_SEPARATOR = ' on '  # between the config of a study and its topology
Selection = Mapping[
    str, Any
]  # how a condition selects its quantity: {'arm': {...}}, {'value': 'x'}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A row of QUANTITIES: a number computed from two arms of a study.

    label: text with places for the names of both arms.
    """

    estimate: Callable[[Ablation, int, int], Estimate | None]
    label: str
    unit: str


def loss_difference(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the loss of an arm minus the loss of another arm, on fresh seeds.

    Each arm has its best values. The interval includes the tuning allowances of both arms. An end
    is infinite if an arm is still at an edge of the values tried, as it could be better without
    bound. An arm that diverges at every value is infinitely worse than an arm that does not.

    Args:
      ablation: the study.
      arm: index of the arm.
      against: index of the arm to subtract.

    Returns:
      The difference in nats per token; None if it is not known yet.
    """
    if ablation.study.tuning.open_wave is None:
        dead, other_dead = (ablation.is_dead(i) for i in (arm, against))
        if dead != other_dead:
            value = math.inf if dead else -math.inf
            return Estimate(value, value, value, 0)
    comparison = compare_pair(ablation, arm, against)
    if comparison is None:
        return None
    return Estimate(
        comparison.difference, comparison.low, comparison.high, comparison.n, comparison.deviation
    )


def speedup(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the tokens that the baseline needs for the arm's loss, over the arm's tokens.

    Args:
      ablation: the study.
      arm: index of the arm.
      against: index of the baseline, 0; speed-ups over other arms are not defined.

    Returns:
      The ratio (`lm.study.speedup`), or None.
    """
    ratio = ablation.speedup(arm) if against == 0 else None
    return (
        None
        if ratio is None
        else Estimate(ratio.value, ratio.low, ratio.high, len(ablation.arms[arm].fresh_losses))
    )


QUANTITIES: Mapping[str, Quantity] = {
    'difference': Quantity(loss_difference, 'loss of {arm} - loss of {against}', 'nats per token'),
    'speedup': Quantity(speedup, 'speed-up of {arm} over {against}', ''),
}


@dataclasses.dataclass(frozen=True)
class StudyEvidence:
    """A tuned sweep.

    state: OPEN, STALE, OUT_OF_REACH, or '' if the study has ended. why: the reason for the state.
    ablation: None before the first run, and if the study is stale. topology: the accelerators it
    needs, '' for none.
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
        """Whether its folder has runs, started or ended, or a plan of it exists."""
        return (self.folder / SWEEP).exists() or (bool(self.topology) and self.plan.exists())

    @property
    def runs(self) -> int:
        """Returns the number of runs that have ended."""
        if self.ablation is None:
            return 0
        return sum(sum(self.ablation.count_runs(i)) for i in range(len(self.arms.arms)))

    @property
    def fresh_runs(self) -> int:
        """Returns the number of ended runs on fresh seeds; verdicts use no other runs."""
        if self.ablation is None:
            return 0
        return sum(self.ablation.count_runs(i)[1] for i in range(len(self.arms.arms)))

    @property
    def core_seconds(self) -> float:
        """Returns the wall time of its runs times the cores of their machines."""
        arms = self.ablation.arms if self.ablation else ()
        records = [record for arm in arms for record in arm.records.values()]
        # Runs that trained side by side share the wall time and the cores.
        return sum(
            (record['wall_sec'] or 0.0)
            / (record['side_by_side'] or 1)
            * count_cores(record['device'])
            for record in records
        )

    @property
    def cost(self) -> float:
        """Estimates its FLOPs: 6 per token and block weight."""
        operations = 0.0
        for cell in self.arms.first_cells:
            model, recipe = cell.recipe.model, cell.recipe
            # 4 d^2 weights of attention and 8 d^2 of the MLP; 2 FLOPs a weight forward, 4 backward.
            weights = 12 * model.n_layers * model.d_model**2
            operations += 6 * weights * recipe.train.steps * recipe.mean_batch_tokens
        return operations * self.arms.tune.typical_runs

    @property
    def command(self) -> list[str]:
        """Returns the arguments of `python` that train it."""
        return ['train.py', f'--config={self.config}', f'--workdir={self.folder}']

    @property
    def config(self) -> str:
        """Returns the config file, as train.py takes it."""
        return self.name.partition(TOPOLOGY_SEPARATOR)[0]

    @property
    def plan(self) -> Path:
        """Returns the path of its plan; the name changes with the runs to train."""
        planned = json.dumps([cell.name for cell in self.arms.first_cells] + [self.arms.record()])
        plan_digest = hashlib.sha256(f'{planned} {self.topology}'.encode()).hexdigest()[:8]
        return self.folder.with_name('plans') / f'{self.folder.name}-{plan_digest}.json'

    @property
    def plan_command(self) -> list[str]:
        """Returns the arguments of `python` that plan it."""
        chips = f'--topology={self.topology}'
        return ['-m', 'tpu.plan', f'--config={self.config}', chips, f'--out={self.plan}']

    def describe(self, quantity: str, selection: Selection) -> tuple[str, str]:
        """Returns the label of a quantity and its unit. Raises ValueError for an unknown arm."""
        indices = self._select_arms(selection)
        study = self.ablation or self.arms
        arm, against = (study.arms[i].name for i in indices)
        row = QUANTITIES[quantity]
        return row.label.format(arm=arm, against=against), row.unit

    def estimate(self, quantity: str, selection: Selection) -> Estimate | None:
        """Returns a quantity; None if it is unknown or undefined."""
        if self.ablation is None:
            return None
        return QUANTITIES[quantity].estimate(self.ablation, *self._select_arms(selection))

    def _select_arms(self, selection: Selection) -> tuple[int, int]:
        return self.select_arm(selection['arm']), self.select_arm(selection.get('against'))

    def select_arm(self, changes: Selection | None) -> int:
        """Returns the index of the arm with these changes; 0, the baseline, for None.

        If several arms contain the changes, the arm with the fewest changes is selected. Raises
        ValueError if no arm, or more than one, remains.
        """
        if changes is None:
            return 0
        arm_changes = [arm.changes for arm in self.arms.arms if arm.is_judged]
        matches = [
            i for i, arm_change in enumerate(arm_changes) if changes.items() <= arm_change.items()
        ]
        fewest = min((len(arm_changes[i]) for i in matches), default=0)
        matches = [i for i in matches if len(arm_changes[i]) == fewest]
        if len(matches) != 1:
            count = 'no arm has' if not matches else f'{len(matches)} arms have'
            raise ValueError(
                f'{dict(changes)} must select one arm of {self.name}, but {count} these changes. '
                f'Its arms: {arm_changes}'
            )
        return matches[0]


@dataclasses.dataclass(frozen=True)
class MeasureEvidence:
    """A computation without runs. values: {} until it is computed, and if it is stale."""

    name: str
    path: Path
    state: str
    why: str
    values: Mapping[str, Estimate]
    core_seconds: float = 0.0
    runs: int = 0
    fresh_runs: int = 0
    cost: float = 0.0  # takes seconds, any study takes minutes

    @property
    def code(self) -> str:
        """Returns the digest of the code that computes it now."""
        return measure_digest(self.name.removeprefix(MEASURE))

    @property
    def has_records(self) -> bool:
        """Whether it has been computed."""
        return self.path.exists()

    @property
    def trains(self) -> bool:
        """Whether it fits weights; other measures are closed forms, or numbers of random draws."""
        return MEASURES[self.name.removeprefix(MEASURE)].trains

    @property
    def command(self) -> list[str]:
        """Returns the arguments of `python` that compute it."""
        return ['-m', 'eval.claims.measures', self.name.removeprefix(MEASURE), str(self.path)]

    def describe(self, quantity: str, selection: Selection) -> tuple[str, str]:
        """Returns the label of a value, without a unit. Raises ValueError for an unknown value."""
        del quantity
        names = MEASURES[self.name.removeprefix(MEASURE)].values
        choose(dict.fromkeys(names), selection['value'], self.name)
        return selection['value'].replace('_', ' '), ''

    def estimate(self, quantity: str, selection: Selection) -> Estimate | None:
        """Returns a value; None before it is computed."""
        del quantity
        return self.values.get(selection['value'])


Evidence = StudyEvidence | MeasureEvidence


def count_cores(device: str | None) -> int:
    """Returns 2 for '2-core x86_64 CPU', and 8 for '8 x TPU v5e': a device counts as a core."""
    match = re.match(r'(\d+)(-core| x )', device or '')
    return int(match[1]) if match else 1


def open_evidence(name: str, workdir: Path) -> Evidence:
    """Returns a study or a measure with its records.

    Raises:
      ValueError: for a config without config.tune, an unknown measure, and an unreadable record.
    """
    if name.startswith(MEASURE):
        return _open_measure(name, workdir)
    return _open_study(name, workdir)


def _open_study(name: str, workdir: Path) -> StudyEvidence:
    config, _, topology = name.partition(TOPOLOGY_SEPARATOR)
    base, sweep, tune = split_sweep(ConfigParser('config').parse(config))
    if tune is None:
        raise ValueError(
            f'{config} must set config.tune to be a study of a claim; without tuning its arms have '
            'no verdicts'
        )
    path, _, variant = config.partition(':')
    folder = workdir / '-'.join(filter(None, (Path(path).stem, variant)))
    arms = ArmPlan(base, sweep, tune)
    study = StudyEvidence(name, folder, arms, OPEN, NO_RUNS, None, topology)
    if not (folder / SWEEP).exists():
        return _read_plan(study) if topology else study
    record = read_sweep(folder)
    ablation = read_ablation(record, gather(folder))
    if changes := _list_changes(record, base, arms):
        why = (
            f'{config} has changed since its runs in {folder}: {", ".join(changes)}. '
            'Move that folder away to train again'
        )
        return dataclasses.replace(study, state=STALE, why=why)
    assert ablation is not None, 'a record without arms differs from the config'
    why = describe_progress(ablation)
    return dataclasses.replace(study, state=OPEN if why else '', why=why, ablation=ablation)


def _list_changes(record: Mapping[str, Any], base: Mapping[str, Any], arms: ArmPlan) -> list[str]:
    """Returns the differences of the recorded study from the current config: fields, or the arms.

    Fields that an older version lacked do not count. The place of training does not count either: a
    mesh, or the default matmul dtype of a device.
    """
    # The default matmul dtype depends on the device, so the current config takes the stored one.
    stored = resolve_stored(record['base'])
    current = resolve(with_dtype(base, stored.model.dtype))
    changes = [*drop_mesh_fields(differences(stored, current))]
    is_same = _drop_search_version(record.get('tune') or {}) == _drop_search_version(arms.record())
    return changes if is_same else [*changes, 'config.tune or its arms']


def _read_plan(study: StudyEvidence) -> StudyEvidence:
    """Returns a study without runs, with the planned cost on the accelerators that it needs."""
    why = f'it needs {study.topology}; --run estimates its cost'
    if study.plan.exists():
        record = read_json(study.plan)
        low, high = (n * record['chip_hours'] for n in record['waves'])
        why = f'{low:,.0f} to {high:,.0f} chip-hours on {record["topology"]} would decide it'
    return dataclasses.replace(study, state=OUT_OF_REACH, why=why)


def _drop_search_version(tune: Mapping[str, Any]) -> Any:
    """Returns a record of tuning without the search version, which does not change the study."""
    return json.loads(json.dumps({k: v for k, v in tune.items() if k != 'search_version'}))


def _open_measure(name: str, workdir: Path) -> MeasureEvidence:
    short = name.removeprefix(MEASURE)
    choose(MEASURES, short, 'measure')
    path = workdir / 'measures' / f'{short}.json'
    measure = MeasureEvidence(name, path, OPEN, NOT_COMPUTED, {})
    if not path.exists():
        return measure
    record = read_json(path)
    if record['code'] != measure.code:
        return dataclasses.replace(measure, state=STALE, why=CHANGED.format(name))
    values = {key: _parse_estimate(numbers) for key, numbers in record['values'].items()}
    core_seconds = record['core_seconds']
    return dataclasses.replace(measure, state='', why='', values=values, core_seconds=core_seconds)


def _parse_estimate(numbers: Mapping[str, Any]) -> Estimate:
    """Reads an estimate of a record; null means nan."""
    fields: dict[str, Any] = {name: math.nan if x is None else x for name, x in numbers.items()}
    return Estimate(**fields)


@functools.cache
def measure_digest(name: str) -> str:
    """Returns the digest of a measure's code within eval.claims."""
    function = choose(MEASURES, name, 'measure').function
    return digest(function.__module__, function.__name__)


def compute_measure(name: str, path: Path) -> None:
    """Computes a measure and writes its record."""
    start = time.process_time()  # of all cores: core-seconds
    estimates = choose(MEASURES, name, 'measure').compute()
    values = {
        key: {
            name: None if math.isnan(x) else x for name, x in dataclasses.asdict(estimate).items()
        }
        for key, estimate in estimates.items()
    }
    record = {'values': values, 'code': measure_digest(name)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, seal_record(record | {'core_seconds': time.process_time() - start}))
