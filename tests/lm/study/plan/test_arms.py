"""Arms and their cells of config.tune, and the next cells by the folders of a workdir."""

import math
import random

import numpy as np
import pytest

from lm.config.resolve import digest, resolve
from lm.record.workdir import SUMMARY
from lm.storage.files import seal_record, write_json
from lm.study.arm import Ablation, Arm, describe_budget
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.plan.search import OCTAVE, VERSION, Point
from lm.study.plan.settings import Grid, parse_tune
from lm.study.train.ledger import open_sweep, read_sweep
from lm.study.verdicts import FIRST_FRESH_SEED
from tests.helpers import tiny_raw

LR = {'optim.lr': None}
NORMS = {'model.norm': ('rmsnorm', 'layernorm')}
BEST = {'rmsnorm': 0.002, 'layernorm': 0.012}  # learning rates


@pytest.fixture(scope='module')
def two():
    """Returns an ablation of two norms, for tests that need only its config."""
    return ArmPlan(tiny_raw(), NORMS, LR)


def final_loss(cell) -> float:
    """Returns a parabola in log2(lr) that each seed shifts; inf two octaves above the best."""
    recipe = cell.recipe
    z = math.log2(recipe.optim.lr / BEST[recipe.model.norm])
    jitter = np.random.default_rng((recipe.train.seed, cell.arm_position['arm'])).standard_normal()
    return math.inf if z > 2.2 else 3 + 0.01 * z**2 + 0.001 * float(jitter)


def end(cell, workdir, loss=None, **fields) -> None:
    """Writes the files of an ended run with this loss. fields: further fields of its summary."""
    loss = final_loss(cell) if loss is None else loss
    record = {'status': 'done', 'validation_ce': loss}
    if math.isinf(loss):
        record = {'status': 'diverged', 'validation_ce': 3.0}  # of an earlier step
    (workdir / cell.name).mkdir(parents=True)
    write_json(workdir / cell.name / SUMMARY, seal_record(record | fields))


def list_runs(ablation, workdir) -> list[tuple]:
    """Returns (arm, place, seed, stage) of every run so far, including the runs that come next."""
    staged = enumerate(ablation.load_ablation(workdir).study.stages)
    return [(i, *point, stage) for i, by_point in staged for point, stage in by_point.items()]


def train(ablation, workdir, shuffled=lambda runs: runs, max_waves=99) -> list[list]:
    """Ends all runs of each wave, and returns the runs so far after each wave."""
    waves = []
    for _ in range(max_waves):
        runs = list_runs(ablation, workdir)
        new_cells = [c for c in ablation.make_cells(runs) if not (workdir / c.name).exists()]
        if not new_cells:
            return waves
        waves.append(runs)
        for cell in shuffled(new_cells):
            end(cell, workdir)
    return waves


class TestArms:
    def test_first_cell_is_the_baseline_arm(self, two):
        assert [arm.name for arm in two.arms] == ['model.norm=rmsnorm', 'model.norm=layernorm']
        assert [cell.changes['optim.lr'] for cell in two.first_cells] == [0.003, 0.003]
        assert all(arm.is_judged for arm in two.arms)

    def test_config_without_sweep_is_one_arm(self):
        (arm,) = ArmPlan(tiny_raw(), None, LR).arms
        assert arm.name == 'the base' and arm.changes == {}

    def test_tuned_value_is_centre_but_no_change(self):
        """Catches an arm with the value of its centre in every run."""
        sweep = ({'optim.name': 'adamw'}, {'optim.name': 'lion', 'optim.lr': 3e-4})
        plan = ArmPlan(tiny_raw(), sweep, LR)
        assert [arm.changes for arm in plan.arms] == [{'optim.name': n} for n in ('adamw', 'lion')]
        assert [arm.grid.centres['optim.lr'] for arm in plan.arms] == [0.003, 3e-4]
        cell = plan.make_cell(1, Point((OCTAVE,), 0), 'scan')
        assert cell.recipe.optim.lr == pytest.approx(6e-4)

    @pytest.mark.parametrize(
        ('setting', 'centre'), [(None, 0.003), (0.01, 0.01), ((1e-3, 4e-3), 2e-3)]
    )
    def test_explicit_value_is_centre_for_all_arms(self, setting, centre):
        plan = ArmPlan(tiny_raw(), NORMS, {'optim.lr': setting})
        assert [arm.grid.centres['optim.lr'] for arm in plan.arms] == pytest.approx([centre] * 2)

    def test_baseline_lengths_are_arms_without_verdict(self):
        """Warm-up keeps its share of the steps."""
        raw = tiny_raw({'train.steps': 40, 'optim.warmup_steps': 10})
        starts = ArmPlan(raw, NORMS, LR | {'lengths': (0.5, 1, 1.5)}).starts
        assert [start.arm.is_judged for start in starts] == [True, True, False, False]
        step_counts = [
            (start.recipe.train.steps, start.recipe.optim.warmup_steps) for start in starts
        ]
        assert step_counts == [(40, 10), (40, 10), (20, 5), (60, 15)]
        assert {start.recipe.model.norm for start in starts[2:]} == {'rmsnorm'}
        assert starts[2].arm.name == 'baseline at 0.5 of its steps'

    def test_weight_decay_is_coupled_to_lr_by_its_rule(self):
        tuned = LR | {'optim.weight_decay': None}
        rules = {'optim.decay_rule': ('decoupled', 'independent')}
        product, apart = ArmPlan(tiny_raw({'optim.weight_decay': 0.1}), rules, tuned).arms
        moved = [
            {path: v / arm.grid.centres[path] for path, v in arm.grid.values((OCTAVE, 0)).items()}
            for arm in (product, apart)
        ]
        assert moved[0] == {'optim.lr': 2, 'optim.weight_decay': 0.5}
        assert moved[1] == {'optim.lr': 2, 'optim.weight_decay': 1}

    def test_description_counts_runs(self, two):
        assert two.description == '2 arms of at least 15 runs (usually 25)'
        limited = ArmPlan(tiny_raw(), None, LR | {'budget': 20})
        assert limited.description == '1 arm of at least 15 runs (usually 20)'


@pytest.mark.parametrize(
    ('sweep', 'tune', 'message'),
    [
        ({'optim.lr': (1e-3, 1e-2)}, LR, 'tuned and swept, so that two arms differ in nothing'),
        ({'optim.lr': (1e-3, 1e-2)} | NORMS, LR, 'Leave it out of config.sweep'),
        (({}, {'optim.name': 'adamw', 'optim.lr': 1e-2}), LR, 'differ in nothing else'),
        (
            ({}, {'optim.name': 'lion', 'optim.lr': 3e-4}),
            {'optim.lr': 1e-3},
            "write 'optim.lr': None in config.tune",
        ),
        ({'zip': {'optim.lr': (1, 2), 'model.norm': ('dyt', 'none')}}, {'optim.lr': 1.0}, 'swept'),
        ({'train.seed': (0, 1)}, LR, r'train\.seed is swept.* tune\.seeds'),
        (({}, {}), LR, 'the same run'),
        (None, {'optim.momentum': 0.9}, 'read by no part of the base'),
        (
            {'optim.name': ('sgd', 'adamw')},
            {'optim.momentum': None},
            'read by no part of optim.name=adamw',
        ),
        (None, {'loss.label_smoothing': None}, r'=0\.0 is no centre .*: CENTRE}'),
        (None, LR | {'lengths': (0.5, 0.51)}, r'\[0\.5, 0\.51\] of 20, which are \[10, 10\]'),
        (None, LR | {'lengths': (0.99,)}, r'which are \[20\]'),
        (None, LR | {'lengths': (1e-3,)}, '0.001 of 20 steps is none'),
    ],
)
def test_incomparable_arms_are_refused(sweep, tune, message):
    with pytest.raises(ValueError, match=message):
        ArmPlan(tiny_raw(), sweep, tune)


@pytest.mark.parametrize(
    ('tune', 'message'),
    [
        ({'optim.name': None}, 'optim.name is a text, .* an axis of config.sweep'),
        ({'train.steps': None}, 'train.steps is a whole number'),
        ({'model.bias': None}, 'model.bias is True or False'),
        ({'train.seed': None}, 'is a seed: the option seeds'),
        ({'optim.l': None}, "Did you mean 'optim.lr'"),
        ({'lr': None}, "Did you mean 'optim.lr'"),
        (LR | {'smallest_efect': 1}, "Did you mean 'smallest_effect'"),
        ({1: None}, '1 names no config field'),
        ({}, r"""names no field .* --config\.tune="{'optim\.lr': None}\""""),
        ({'budget': 40}, """"{'optim.lr': None, 'budget': 40}\""""),
        ({'optim.lr': '1e-3'}, "above 0, or .* got '1e-3'"),
        ({'optim.lr': 0}, 'above 0, .* got 0$'),
        ({'optim.lr': True}, 'got True'),
        ({'optim.lr': math.inf}, 'got inf'),
        ({'optim.lr': (1e-2, 1e-3)}, r'Did you mean \(0\.001, 0\.01\)'),
        ({'optim.lr': (1, 2, 3)}, r'Did you mean \(1\.0, 3\.0\)'),
        ({'optim.lr': (1e-3,)}, r'got \(0\.001,\)'),
        ({'optim.b2': (0.9, 1.5)}, r'optim\.b2 must be at least 0 and below 1; got 1\.5'),
        (dict.fromkeys(('optim.lr', 'optim.b1', 'optim.b2', 'optim.eps')), '3 fields at most'),
        (LR | {'budget': 14}, 'must be 15 runs an arm at least .*; got 14'),
        (LR | {'budget': 1e2}, r'counts the runs of an arm.*got 100\.0\. Write 100'),
        (LR | {'seeds': (0, 1, 2)}, r'counts the fresh seeds .* from 3 on; got \(0, 1, 2\)'),
        (LR | {'smallest_effect': 0}, 'a number above 0; got 0'),
        (LR | {'test': 'Holm'}, "Did you mean 'holm'"),
        (LR | {'test': ['holm']}, 'one of dunnett, holm'),
        (LR | {'lengths': 0.5}, r'such as \(0\.5, 0\.7, 1\.4\); got 0\.5'),
        ('optim.lr', r"""must be a Python literal.* Did you mean .*="{'optim\.lr': None}\""""),
        ('lr', r"""Did you mean --config\.tune="{'optim\.lr': None}\""""),
        ('{optim.lr: 1e-3}', r"""Did you mean .*{'optim\.lr': 0\.001}"""),
        ('optim.lr=None, optim.b2=0.9', r"""{'optim\.lr': None, 'optim\.b2': 0\.9}"""),
        ("{'optim.lr': 10**-3}", 'and not 10.*For example: '),
        (('optim.lr', 'optim.b2'), r"""must map .*{'optim\.lr': None, 'optim\.b2': None}"""),
        (True, 'got True. For example: '),
    ],
)
def test_invalid_tune_is_refused_with_advice(tune, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_tune(tune)
    assert '\n' not in str(error.value)


def test_option_none_equals_omitted():
    assert parse_tune(LR | dict.fromkeys(('seeds', 'budget', 'test', 'lengths'))) == parse_tune(LR)


class TestCells:
    def test_cell_name_matches_single_run(self, two):
        """A rate that a grid has trained is thus not trained again."""
        cell = two.make_cell(1, Point((0,), 0), 'scan')
        changes = {'model.norm': 'layernorm', 'optim.lr': 0.003}
        assert cell.name == digest(resolve(tiny_raw(changes)))
        (swept,) = expand_sweep(tiny_raw(), {'list': (changes,)})
        assert (cell.name, cell.recipe) == (swept.name, swept.recipe)

    def test_seeds_are_added_to_base_seeds(self):
        raw = tiny_raw({'train.seed': 7, 'data.seed': 3})
        cell = ArmPlan(raw, None, LR).make_cell(0, Point((0,), FIRST_FRESH_SEED), 'look 1')
        assert (cell.recipe.train.seed, cell.recipe.data.seed) == (
            7 + FIRST_FRESH_SEED,
            3 + FIRST_FRESH_SEED,
        )

    def test_arms_with_one_program_form_one_group(self, two, tmp_path):
        """The rates and seeds of a norm share a program. Catches a value that is compiled in."""
        grouped = group_by_program(two.make_cells(list_runs(two, tmp_path)))
        assert [len(group) for group in grouped] == [5, 5]
        assert {cell.arm_position['stage'] for group in grouped for cell in group} == {'scan'}

    def test_cell_has_arm_position(self, two):
        cell = two.make_cell(1, Point((-4,), 2), 'refine')
        assert cell.arm_position == {'arm': 1, 'k': [-4], 'seed': 2, 'stage': 'refine'}
        again = two.make_cell(1, Point((-4,), 2), 'repeat')
        assert again.arm_position['stage'] == 'repeat' and again.name == cell.name


class TestLosses:
    def test_losses_come_from_ended_folders(self, two, tmp_path):
        low, high = (Point((k,), 0) for k in (0, OCTAVE))
        end(two.make_cell(0, low, ''), tmp_path, 2.5)
        end(two.make_cell(0, high, ''), tmp_path, math.inf)
        (tmp_path / two.make_cell(1, low, '').name).mkdir()
        first, second = two.load_ablation(tmp_path).study.losses
        assert first[low] == 2.5 and first[high] == math.inf
        for losses, point in ((second, low), (second, high), (first, Point((0,), 1))):
            assert point not in losses
            with pytest.raises(KeyError):
                losses[point]

    def test_stopped_or_failed_runs_have_no_loss(self, two, tmp_path):
        for cell, status in zip(two.first_cells, ('stopped', 'failed'), strict=True):
            end(cell, tmp_path, 2.0, status=status)
        assert not any(
            Point((0,), 0) in losses for losses in two.load_ablation(tmp_path).study.losses
        )

    def test_losses_are_bits_per_byte_if_tokens_differ(self, tmp_path):
        tokenizers = {'data.tokenizer': ('byte', 'bpe:300')}
        plan = ArmPlan(tiny_raw({'data.source': 'python'}), tokenizers, LR)
        assert plan.metric == 'bits_per_byte'
        end(plan.first_cells[0], tmp_path, 2.0, bits_per_byte=1.5)
        assert plan.load_ablation(tmp_path).study.losses[0][Point((0,), 0)] == 1.5


def test_waves_ignore_completion_order(two, tmp_path):
    """Waves depend neither on the order of ends nor on memory of earlier waves: a new process plans
    each.
    """
    waves = train(two, tmp_path / 'a')
    fresh = ArmPlan(tiny_raw(), NORMS, LR)
    rng = random.Random(0)
    assert train(fresh, tmp_path / 'b', lambda runs: rng.sample(runs, len(runs))) == waves
    stages = {stage for _, _, _, stage in waves[-1]}
    assert {'scan', 'refine', 'look 1'} <= stages
    last = list_runs(ArmPlan(tiny_raw(), NORMS, LR), tmp_path / 'b')
    assert last == waves[-1] and len(last) == len({(arm, k, seed) for arm, k, seed, _ in last})
    study = two.load_ablation(tmp_path / 'a').study
    for arm, (norm, best) in zip(study.picks, BEST.items(), strict=True):
        octaves = math.log2(two.arms[0].grid.values(arm.k)['optim.lr'] / best)
        assert abs(octaves) < 0.3, norm
    of_tuning = [
        [1 for arm, _, seed, _ in last if arm == i and seed < FIRST_FRESH_SEED] for i in (0, 1)
    ]
    assert len(of_tuning[0]) == len(of_tuning[1]) == study.tuning_runs[0]


def test_wave_opens_after_the_previous_ends(two, tmp_path):
    first = list_runs(two, tmp_path)
    *earlier, last = two.make_cells(first)
    for cell in earlier:
        end(cell, tmp_path)
    assert list_runs(two, tmp_path) == first
    end(last, tmp_path)
    assert len(list_runs(two, tmp_path)) > len(first)


def test_sweep_record_has_arms_and_positions(tmp_path):
    raw, sweep = tiny_raw(), ({}, {'model.norm': 'layernorm', 'optim.lr': 0.01})
    plan = ArmPlan(raw, sweep, LR | {'budget': 30, 'lengths': (0.5,)})
    grouped = group_by_program(plan.make_cells(list_runs(plan, tmp_path)))
    open_sweep(tmp_path, resolve(raw), grouped, False, tune=plan.record())
    record = read_sweep(tmp_path)
    tune, listed = record['tune'], record['cells']
    assert tune['fields'] == LR and tune['budget'] == 30 and tune['metric'] == 'ce'
    assert tune['search_version'] == VERSION
    changes = [{}, {'model.norm': 'layernorm'}, {'train.steps': 10}]
    assert [arm['changes'] for arm in tune['arms']] == changes
    assert [arm['centres']['optim.lr'] for arm in tune['arms']] == [0.003, 0.01, 0.003]
    assert [arm['length'] for arm in tune['arms']] == [1, 1, 0.5]
    places = [(cell['tuned']['arm'], *cell['tuned']['k']) for cell in listed]
    octaves = [OCTAVE * i for i in (-2, -1, 0, 1, 2)]
    assert sorted(places) == [(arm, k) for arm in range(3) for k in octaves]
    assert {cell['tuned']['stage'] for cell in listed} == {'scan'}


def make_study(tune, losses):
    """Returns the study of arms with these losses."""
    grid = Grid({'optim.lr': 0.01})
    return Ablation(
        parse_tune(tune), 'ce', [Arm('', {}, grid, losses=arm_losses) for arm_losses in losses]
    ).study


def run_study(tune, sigma: float, arms: int = 2):
    """Returns the study of arms on one parabola with a deviation of sigma over seeds."""
    rng, losses = np.random.default_rng(0), [{} for _ in range(arms)]
    while True:
        study = make_study(tune, losses)
        if study.next_runs is None:
            return study
        for arm_losses, points in zip(losses, study.next_runs[1], strict=True):
            for point in sorted({*points} - arm_losses.keys()):
                arm_losses[point] = (
                    0.02 * (point.k[0] / OCTAVE) ** 2 + sigma * rng.standard_normal()
                )


class TestBudgetWords:
    def test_insufficient_budget_suggests_sufficient_one(self):
        """The spread of a pair is sqrt(2) 0.01: 18 pairs detect 0.01, and the budget has 10."""
        tune = LR | {'smallest_effect': 0.01, 'budget': 25}
        advice = describe_budget(run_study(tune, 0.01))
        assert advice.startswith('tune.budget=25 leaves ') and 'smallest_effect 0.01' in advice
        budget = int(advice.split('tune.budget=')[2])
        seeds = int(advice.split('tune.seeds=')[1].split(',')[0])
        assert budget > 25 and seeds > 5
        enough = tune | {'budget': budget + 10, 'seeds': seeds + 5}
        assert describe_budget(run_study(enough, 0.01)) is None

    def test_advice_names_seeds_without_budget(self):
        advice = describe_budget(run_study(LR | {'smallest_effect': 0.01}, 0.01))
        assert advice.startswith('tune.seeds=5 leaves 10 fresh seeds') and 'budget' not in advice

    def test_advice_gives_no_excessive_number(self):
        advice = describe_budget(run_study(LR | {'smallest_effect': 1e-5}, 0.01))
        assert 'more than 1000' in advice and advice.count('tune.') == 1

    def test_no_advice_if_unnecessary_or_still_tuning(self):
        assert describe_budget(run_study(LR | {'smallest_effect': 0.1}, 0.001)) is None
        assert describe_budget(run_study(LR | {'smallest_effect': 1e-5}, 0.01, arms=1)) is None
        open_study = make_study(LR, [{}, {}])
        assert describe_budget(open_study) is None
