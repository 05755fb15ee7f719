"""From config.tune to arms and their cells, and from what folders hold to the next cells."""

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
    """An ablation of two norms, for what follows from its config alone."""
    return ArmPlan(tiny_raw(), NORMS, LR)


def loss_of(cell) -> float:
    """A parabola in log2(lr) that each seed moves up or down; inf two octaves above the best."""
    recipe = cell.recipe
    z = math.log2(recipe.optim.lr / BEST[recipe.model.norm])
    jitter = np.random.default_rng((recipe.train.seed, cell.arm_position['arm'])).standard_normal()
    return math.inf if z > 2.2 else 3 + 0.01 * z**2 + 0.001 * float(jitter)


def end(cell, workdir, loss=None, **more) -> None:
    """Writes what a run leaves that has ended with this loss; more: of its summary."""
    loss = loss_of(cell) if loss is None else loss
    record = {'status': 'done', 'validation_ce': loss}
    if math.isinf(loss):
        record = {'status': 'diverged', 'validation_ce': 3.0}  # of an earlier step
    (workdir / cell.name).mkdir(parents=True)
    write_json(workdir / cell.name / SUMMARY, seal_record(record | more))


def runs_of(ablation, workdir) -> list[tuple]:
    """(arm, place, seed, stage) of every run so far, those that come next included."""
    staged = enumerate(ablation.load_ablation(workdir).study.stages)
    return [(i, *point, stage) for i, own in staged for point, stage in own.items()]


def train(ablation, workdir, shuffled=lambda one: one, most_waves=99) -> list[list]:
    """Ends all runs of each wave, and returns the runs behind each."""
    found = []
    for _ in range(most_waves):
        runs = runs_of(ablation, workdir)
        new = [c for c in ablation.make_cells(runs) if not (workdir / c.name).exists()]
        if not new:
            return found
        found.append(runs)
        for cell in shuffled(new):
            end(cell, workdir)
    return found


class TestArms:
    def test_each_cell_of_the_sweep_is_one_and_the_first_the_baseline(self, two):
        assert [arm.name for arm in two.arms] == ['model.norm=rmsnorm', 'model.norm=layernorm']
        assert [cell.changes['optim.lr'] for cell in two.first_cells] == [0.003, 0.003]
        assert all(arm.is_judged for arm in two.arms)

    def test_a_config_without_a_sweep_is_one(self):
        (arm,) = ArmPlan(tiny_raw(), None, LR).arms
        assert arm.name == 'the base' and arm.changes == {}

    def test_an_own_value_is_the_centre_and_no_change(self):
        """Catches an arm whose every run has the value that it was to be searched around."""
        own = ({'optim.name': 'adamw'}, {'optim.name': 'lion', 'optim.lr': 3e-4})
        found = ArmPlan(tiny_raw(), own, LR)
        assert [arm.changes for arm in found.arms] == [{'optim.name': n} for n in ('adamw', 'lion')]
        assert [arm.grid.centres['optim.lr'] for arm in found.arms] == [0.003, 3e-4]
        one = found.make_cell(1, Point((OCTAVE,), 0), 'scan')
        assert one.recipe.optim.lr == pytest.approx(6e-4)

    @pytest.mark.parametrize(
        ('given', 'centre'), [(None, 0.003), (0.01, 0.01), ((1e-3, 4e-3), 2e-3)]
    )
    def test_a_given_value_is_the_centre_of_all(self, given, centre):
        found = ArmPlan(tiny_raw(), NORMS, {'optim.lr': given})
        assert [arm.grid.centres['optim.lr'] for arm in found.arms] == pytest.approx([centre] * 2)

    def test_lengths_of_the_baseline_are_arms_that_get_no_verdict(self):
        """With the same share of a warm-up."""
        raw = tiny_raw({'train.steps': 40, 'optim.warmup_steps': 10})
        starts = ArmPlan(raw, NORMS, LR | {'lengths': (0.5, 1, 1.5)}).starts
        assert [one.arm.is_judged for one in starts] == [True, True, False, False]
        own = [(one.recipe.train.steps, one.recipe.optim.warmup_steps) for one in starts]
        assert own == [(40, 10), (40, 10), (20, 5), (60, 15)]
        assert {one.recipe.model.norm for one in starts[2:]} == {'rmsnorm'}
        assert starts[2].arm.name == 'baseline at 0.5 of its steps'

    def test_weight_decay_is_searched_along_with_the_rate_where_the_rule_multiplies_them(self):
        tuned = LR | {'optim.weight_decay': None}
        rules = {'optim.decay_rule': ('decoupled', 'independent')}
        product, apart = ArmPlan(tiny_raw({'optim.weight_decay': 0.1}), rules, tuned).arms
        moved = [
            {path: v / arm.grid.centres[path] for path, v in arm.grid.values((OCTAVE, 0)).items()}
            for arm in (product, apart)
        ]
        assert moved[0] == {'optim.lr': 2, 'optim.weight_decay': 0.5}
        assert moved[1] == {'optim.lr': 2, 'optim.weight_decay': 1}

    def test_how_many_runs_is_said(self, two):
        assert two.description == '2 arms of 15 runs at least, 25 as a rule'
        limited = ArmPlan(tiny_raw(), None, LR | {'budget': 20})
        assert limited.description == '1 arm of 15 runs at least, 20 as a rule'


@pytest.mark.parametrize(
    ('sweep', 'tune', 'said'),
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
def test_arms_that_cannot_be_compared_are_refused(sweep, tune, said):
    with pytest.raises(ValueError, match=said):
        ArmPlan(tiny_raw(), sweep, tune)


@pytest.mark.parametrize(
    ('tune', 'said'),
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
        ({'optim.b2': (0.9, 1.5)}, r'optim\.b2 must be between 0 and .*; got 1\.5'),
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
        ("{'optim.lr': 10**-3}", 'and not 10.*Such as'),
        (('optim.lr', 'optim.b2'), r"""must map .*{'optim\.lr': None, 'optim\.b2': None}"""),
        (True, 'got True. Such as'),
    ],
)
def test_a_tune_that_says_nothing_is_answered_with_what_to_write(tune, said):
    with pytest.raises(ValueError, match=said) as error:
        parse_tune(tune)
    assert '\n' not in str(error.value)


def test_an_option_that_is_none_is_as_left_out():
    assert parse_tune(LR | dict.fromkeys(('seeds', 'budget', 'test', 'lengths'))) == parse_tune(LR)


class TestCells:
    def test_a_run_has_the_name_that_it_has_alone(self, two):
        """So that a rate which a grid has trained is not trained again."""
        found = two.make_cell(1, Point((0,), 0), 'scan')
        alone = {'model.norm': 'layernorm', 'optim.lr': 0.003}
        assert found.name == digest(resolve(tiny_raw(alone)))
        (swept,) = expand_sweep(tiny_raw(), {'list': (alone,)})
        assert (found.name, found.recipe) == (swept.name, swept.recipe)

    def test_seeds_are_added_to_those_of_the_base(self):
        raw = tiny_raw({'train.seed': 7, 'data.seed': 3})
        found = ArmPlan(raw, None, LR).make_cell(0, Point((0,), FIRST_FRESH_SEED), 'look 1')
        assert (found.recipe.train.seed, found.recipe.data.seed) == (
            7 + FIRST_FRESH_SEED,
            3 + FIRST_FRESH_SEED,
        )

    def test_all_runs_of_all_arms_of_a_program_are_one_group(self, two, tmp_path):
        """The rates and seeds of a norm. Catches a value that is compiled in."""
        grouped = group_by_program(two.make_cells(runs_of(two, tmp_path)))
        assert [len(group) for group in grouped] == [5, 5]
        assert {cell.arm_position['stage'] for group in grouped for cell in group} == {'scan'}

    def test_a_cell_has_its_place(self, two):
        found = two.make_cell(1, Point((-4,), 2), 'refine')
        assert found.arm_position == {'arm': 1, 'k': [-4], 'seed': 2, 'stage': 'refine'}
        again = two.make_cell(1, Point((-4,), 2), 'repeat')
        assert again.arm_position['stage'] == 'repeat' and again.name == found.name


class TestLosses:
    def test_they_are_those_of_folders_that_have_ended(self, two, tmp_path):
        low, high = (Point((k,), 0) for k in (0, OCTAVE))
        end(two.make_cell(0, low, ''), tmp_path, 2.5)
        end(two.make_cell(0, high, ''), tmp_path, math.inf)
        (tmp_path / two.make_cell(1, low, '').name).mkdir()
        own, other = two.load_ablation(tmp_path).study.losses
        assert own[low] == 2.5 and own[high] == math.inf
        for losses, point in ((other, low), (other, high), (own, Point((0,), 1))):
            assert point not in losses
            with pytest.raises(KeyError):
                losses[point]

    def test_those_that_stopped_or_failed_have_not_ended(self, two, tmp_path):
        for cell, status in zip(two.first_cells, ('stopped', 'failed'), strict=True):
            end(cell, tmp_path, 2.0, status=status)
        assert not any(
            Point((0,), 0) in losses for losses in two.load_ablation(tmp_path).study.losses
        )

    def test_they_are_in_bits_a_byte_where_tokens_differ(self, tmp_path):
        tokenizers = {'data.tokenizer': ('byte', 'bpe:300')}
        found = ArmPlan(tiny_raw({'data.source': 'python'}), tokenizers, LR)
        assert found.metric == 'bits_per_byte'
        end(found.first_cells[0], tmp_path, 2.0, bits_per_byte=1.5)
        assert found.load_ablation(tmp_path).study.losses[0][Point((0,), 0)] == 1.5


def test_waves_follow_from_the_folder_whatever_the_order_of_ends(two, tmp_path):
    """And whatever the process knows of earlier ones: each wave is asked of a new one, too."""
    found = train(two, tmp_path / 'a')
    fresh = ArmPlan(tiny_raw(), NORMS, LR)
    rng = random.Random(0)
    assert train(fresh, tmp_path / 'b', lambda one: rng.sample(one, len(one))) == found
    stages = {stage for _, _, _, stage in found[-1]}
    assert {'scan', 'refine', 'look 1'} <= stages
    last = runs_of(ArmPlan(tiny_raw(), NORMS, LR), tmp_path / 'b')
    assert last == found[-1] and len(last) == len({(arm, k, seed) for arm, k, seed, _ in last})
    study = two.load_ablation(tmp_path / 'a').study
    for arm, (norm, best) in zip(study.picks, BEST.items(), strict=True):
        octaves = math.log2(two.arms[0].grid.values(arm.k)['optim.lr'] / best)
        assert abs(octaves) < 0.3, norm
    of_tuning = [
        [1 for arm, _, seed, _ in last if arm == i and seed < FIRST_FRESH_SEED] for i in (0, 1)
    ]
    assert len(of_tuning[0]) == len(of_tuning[1]) == study.tuning_runs[0]


def test_a_wave_opens_when_the_last_has_wholly_ended(two, tmp_path):
    first = runs_of(two, tmp_path)
    *others, last = two.make_cells(first)
    for cell in others:
        end(cell, tmp_path)
    assert runs_of(two, tmp_path) == first
    end(last, tmp_path)
    assert len(runs_of(two, tmp_path)) > len(first)


def test_the_record_of_a_sweep_has_the_arms_and_the_place_of_each_cell(tmp_path):
    raw, sweep = tiny_raw(), ({}, {'model.norm': 'layernorm', 'optim.lr': 0.01})
    found = ArmPlan(raw, sweep, LR | {'budget': 30, 'lengths': (0.5,)})
    grouped = group_by_program(found.make_cells(runs_of(found, tmp_path)))
    open_sweep(tmp_path, resolve(raw), grouped, False, tune=found.record())
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


def known(tune, losses):
    """The study of arms with these losses."""
    grid = Grid({'optim.lr': 0.01})
    return Ablation(parse_tune(tune), 'ce', [Arm('', {}, grid, losses=own) for own in losses]).study


def ended(tune, sigma: float, arms: int = 2):
    """The study of arms on one parabola, of which the deviation over seeds is sigma."""
    rng, losses = np.random.default_rng(0), [{} for _ in range(arms)]
    while True:
        study = known(tune, losses)
        if study.next_runs is None:
            return study
        for own, points in zip(losses, study.next_runs[1], strict=True):
            for point in sorted({*points} - own.keys()):
                own[point] = 0.02 * (point.k[0] / OCTAVE) ** 2 + sigma * rng.standard_normal()


class TestBudgetWords:
    def test_one_that_cannot_reach_the_effect_is_answered_with_one_that_can(self):
        """The spread of a pair is sqrt(2) 0.01: 18 pairs find 0.01, and 10 are there."""
        tune = LR | {'smallest_effect': 0.01, 'budget': 25}
        said = describe_budget(ended(tune, 0.01))
        assert said.startswith('tune.budget=25 leaves ') and 'smallest_effect 0.01' in said
        budget = int(said.split('tune.budget=')[2])
        seeds = int(said.split('tune.seeds=')[1].split(',')[0])
        assert budget > 25 and seeds > 5
        enough = tune | {'budget': budget + 10, 'seeds': seeds + 5}
        assert describe_budget(ended(enough, 0.01)) is None

    def test_without_a_budget_it_is_the_seeds(self):
        said = describe_budget(ended(LR | {'smallest_effect': 0.01}, 0.01))
        assert said.startswith('tune.seeds=5 leaves 10 fresh seeds') and 'budget' not in said

    def test_no_number_is_given_where_none_is_trained(self):
        said = describe_budget(ended(LR | {'smallest_effect': 1e-5}, 0.01))
        assert 'more than 1000' in said and said.count('tune.') == 1

    def test_nothing_is_said_where_seeds_suffice_nobody_is_judged_or_it_still_tunes(self):
        assert describe_budget(ended(LR | {'smallest_effect': 0.1}, 0.001)) is None
        assert describe_budget(ended(LR | {'smallest_effect': 1e-5}, 0.01, arms=1)) is None
        open_study = known(LR, [{}, {}])
        assert describe_budget(open_study) is None
