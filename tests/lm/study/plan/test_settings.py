"""Property tests of config.tune: refusals and their messages, grids, bounds, scans."""

import math

import pytest

from lm.study.plan.search import SCAN, STEPS, UNBOUNDED, replay_waves
from lm.study.plan.settings import Grid, Tune, make_grid, parse_tune

LR, DECAY = 'optim.lr', 'optim.weight_decay'

REFUSED = [
    (5, 'tune must map fields .*; got 5. For example: --config.tune=.*None'),
    ('optim.lr', 'must be a Python literal.*Did you mean --config.tune'),
    ({}, 'tune must name a field to tune'),
    ({'seeds': 5}, 'tune must name a field to tune'),
    ({LR: None, 'sedes': 3}, "'sedes' is no config field and no option .*mean 'seeds'"),
    ({'lr': None}, "'lr' is no config field .*mean 'optim.lr'"),
    ({LR: 0}, 'optim.lr must be None, a centre above 0, or .low, high. .*got 0'),
    ({LR: -1.0}, 'above 0.*got -1.0'),
    ({LR: True}, 'above 0.*got True'),
    ({LR: 'fast'}, "above 0.*got 'fast'"),
    ({LR: math.nan}, 'above 0.*got nan'),
    ({LR: math.inf}, 'above 0.*got inf'),
    ({LR: (0.1, 0.01)}, 'low < high; got .0.1, 0.01.'),
    ({LR: (0.1, 0.1)}, 'low < high'),
    ({LR: (0, 0.1)}, '0 < low'),
    ({LR: (0.1, 0.2, 0.4)}, 'low < high'),
    ({'model.norm': None}, 'model.norm is text.*axis of config.sweep'),
    ({'model.n_layers': None}, 'model.n_layers is a whole number'),
    ({'optim.warmup_steps': None}, 'optim.warmup_steps is a whole number'),
    ({'norm.eps': None}, 'each value of norm.eps needs its own program'),
    ({'train.seed': None}, 'train.seed is a seed and cannot be tuned'),
    (
        {LR: None, 'optim.b1': None, 'optim.b2': None, 'optim.eps': None},
        'at most 3 fields.*got 4: optim.lr, optim.b1, optim.b2, optim.eps',
    ),
    ({LR: None, 'seeds': 2}, 'tune.seeds .*a whole number of at least 3; got 2'),
    ({LR: None, 'seeds': 5.0}, 'tune.seeds .*got 5.0'),
    ({LR: None, 'seeds': True}, 'tune.seeds .*got True'),
    ({LR: None, 'budget': 14}, 'tune.budget must be at least 15 runs per arm .*got 14'),
    ({LR: None, 'budget': 0}, 'tune.budget must be at least 15 runs .*got 0'),
    ({LR: None, DECAY: None, 'budget': 23, 'seeds': 7}, 'must be at least 24 runs .*got 23'),
    ({LR: None, 'smallest_effect': 0}, 'tune.smallest_effect, .*a number above 0; got 0'),
    ({LR: None, 'test': 'hol'}, "tune.test must be one of dunnett, holm; got 'hol'.*mean 'holm'"),
    ({LR: None, 'lengths': 0.5}, 'tune.lengths must be shares'),
    ({LR: None, 'lengths': (0.5, 0)}, 'tune.lengths must be shares'),
]


@pytest.mark.parametrize(('raw', 'words'), REFUSED, ids=[repr(raw) for raw, _ in REFUSED])
def test_invalid_settings_are_refused_in_one_line(raw, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_tune(raw)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('raw', 'words'),
    [
        ({LR: 10**400}, 'tune: optim.lr must be None, a centre above 0'),
        ({LR: (1e-3, 10**400)}, 'tune: optim.lr must be None, a centre above 0'),
        ({LR: (1e-310, 1.0)}, 'the range of optim.lr must be at most 40 octaves wide, .* Narrow'),
        ({LR: (1e-12, 1.2)}, 'the range of optim.lr must be at most 40 octaves wide'),
        ({LR: None, 'smallest_effect': 10**400}, 'tune.smallest_effect, .*a number above 0'),
        ({LR: None, 'lengths': (0.5, 10**400)}, 'tune.lengths must be shares'),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_extreme_numbers_are_refused(raw, words):
    """Catches an OverflowError, without a field, of a number that no double holds."""
    with pytest.raises(ValueError, match=words):
        parse_tune(raw)
    assert len(parse_tune({LR: (2.0**-40, 1.0)}).scans[0]) == 41


def test_parse_tune_reads_options_and_fields():
    tune = parse_tune({LR: [1e-3, 1e-1], DECAY: 1, 'seeds': 7, 'lengths': [1.4, 0.5, 1, 0.5]})
    assert tune == Tune({LR: (1e-3, 1e-1), DECAY: 1.0}, seeds=7, lengths=(0.5, 1.4))
    assert parse_tune({LR: None, 'budget': None}) == Tune({LR: None})
    assert parse_tune({LR: None, 'budget': 15}).search.max_runs == 10


def refines(tune):
    """Returns whether a search reaches refinement, on losses with no need of extensions."""
    losses = {}

    def loss(k):
        return sum((i - 3) ** 2 for i in k) + 0.9 * k[0] * k[-1] * (len(k) - 1)

    while (
        replay := replay_waves([losses], tune.search, [(UNBOUNDED,) * len(tune.fields)])
    ).open_wave:
        losses.update({p: loss(p.k) for p in replay.open_wave.points[0]})
    return replay.is_refined


@pytest.mark.parametrize('fields', [{LR: None}, {LR: None, DECAY: None}])
def test_min_budget_suffices_to_refine(fields):
    budget = Tune(fields, seeds=4).min_budget
    assert refines(parse_tune(fields | {'seeds': 4, 'budget': budget}))


def test_budget_below_minimum_does_not_refine():
    budget = Tune({LR: None}).min_budget
    assert not refines(Tune({LR: None}, budget=budget - 1))


def test_scans_are_octaves_around_the_centre_or_over_the_range():
    assert Tune({LR: None}).scans == Tune({LR: 0.1}).scans == (SCAN,) == ((-16, -8, 0, 8, 16),)
    assert Tune({LR: (1.0, 16.0)}).scans == (SCAN,)
    assert Tune({LR: (1.0, 17.0)}).scans == ((-24, -16, -8, 0, 8, 16, 24),)
    assert Tune({LR: (1.0, 1.1)}).scans == ((-8, 0, 8),)
    lines = tuple((-step, 0, step) for step in STEPS[:2])
    assert Tune({LR: None, DECAY: None}).scans == lines
    assert Tune({LR: (1.0, 16.0), DECAY: None}).scans == (SCAN, lines[1])


def test_values_lie_on_eighth_octaves():
    grid = Grid({LR: 0.01})
    assert grid.values((0,)) == {LR: 0.01} and grid.values((-16,)) == {LR: 0.0025}
    assert grid.values((1,))[LR] == pytest.approx(0.01 * 2 ** (1 / 8))


def test_coupled_decay_keeps_product_with_lr():
    grid = Grid({LR: 0.01, DECAY: 0.1}, coupled=True)
    for k in ((8, 0), (-5, 0), (24, 0)):
        values = grid.values(k)
        assert values[LR] * values[DECAY] == pytest.approx(0.001)
    assert grid.values((8, 8)) == pytest.approx({LR: 0.02, DECAY: 0.1})
    free = Grid({LR: 0.01, DECAY: 0.1})
    assert free.values((8, 0)) == pytest.approx({LR: 0.02, DECAY: 0.1})


def test_coupling_needs_both_fields_and_proportional_decay():
    config = {LR: 0.01, DECAY: 0.1}
    tune = parse_tune({LR: None, DECAY: None})
    assert make_grid(tune, config, True).coupled and not make_grid(tune, config, False).coupled
    assert not make_grid(parse_tune({LR: None}), config, True).coupled


def test_centres_are_fields_options_or_geometric_means():
    config = {LR: 0.02, DECAY: 0.1}
    assert make_grid(parse_tune({LR: None}), config, False).centres == {LR: 0.02}
    assert make_grid(parse_tune({LR: 0.3}), config, False).centres == {LR: 0.3}
    assert make_grid(parse_tune({LR: (0.01, 0.09)}), config, False).centres == {
        LR: pytest.approx(0.03)
    }


@pytest.mark.parametrize('value', [0.0, None, -0.1])
def test_centre_must_be_positive(value):
    with pytest.raises(
        ValueError, match=r'search of optim.weight_decay needs a centre above 0, .*Set one'
    ):
        make_grid(parse_tune({DECAY: None}), {DECAY: value}, False)


def test_bounds_follow_field_bounds():
    """The outermost allowed values are within a field's bounds, the next are not."""
    grid = Grid({'model.dropout': 0.15, 'optim.sven_kappa': 5.0, 'optim.clip_norm': 1.0})
    (low, high), (low_k, high_k), (_, far) = grid.bounds
    assert low == -math.inf
    assert 0.15 * 2 ** (high / 8) <= 0.99 < 0.15 * 2 ** ((high + 1) / 8)
    assert 5 * 2 ** (high_k / 8) <= 100 < 5 * 2 ** ((high_k + 1) / 8)
    assert 5 * 2 ** ((low_k - 1) / 8) < 0.01 <= 5 * 2 ** (low_k / 8)
    assert far == math.inf
    coupled = Grid({LR: 0.01, DECAY: 0.1}, coupled=True).bounds
    assert coupled == (UNBOUNDED, UNBOUNDED)
