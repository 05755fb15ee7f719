"""Reference: initial scale, learning rate and weight decay of each role."""

import dataclasses
import json
from pathlib import Path

import pytest

from modules.params import NORM, ROLES, ParamSpec
from modules.scaling import (
    INITS,
    PARAMETRIZATIONS,
    Growth,
    Scaling,
    compute_growth,
    compute_scaling,
    one_channel_shape,
)

FIXTURES = Path(__file__).parent.parent / 'fixtures' / 'scaling'

CASES = {  # spec, shape
    'embedding': (ParamSpec('embedding', ('vocab', 'embed')), (50, 16)),
    'readout': (ParamSpec('readout', ('embed', 'vocab'), ('embed',)), (16, 50)),
    'vector': (ParamSpec('vector', ('layer', 'embed'), part=NORM), (3, 16)),
    'bias': (ParamSpec('vector', ('layer', 'embed')), (3, 16)),  # of the last matrix
    'up': (ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)), (3, 16, 64)),
    'query': (
        ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',)),
        (3, 16, 2, 8),
    ),
    'out': (
        ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
        (3, 2, 9, 16),
    ),
}


def standard(spec, shape):
    return compute_scaling(
        PARAMETRIZATIONS['standard'],
        INITS['fan_in'],
        spec,
        (shape, shape),
        (3, 3),
        Growth(),
        'adam',
    )


def test_init_gain_and_decayed_vectors():
    """init_gain multiplies the deviation of a matrix; a vector decays only where it says so."""
    spec, shape = CASES['up']
    halved = standard(dataclasses.replace(spec, init_gain=0.5), shape)
    assert (halved.init_std, halved.lr_factor, halved.decay_factor) == (1 / 8, 1, 1)
    spec, shape = CASES['vector']
    decayed = standard(dataclasses.replace(spec, decayed=True), shape)
    assert (decayed.init_std, decayed.lr_factor, decayed.decay_factor) == (None, 1, 1)


def test_standard_init_is_one_over_sqrt_fan_in():
    """1/sqrt(fan_in); stacking changes nothing. Catches a fan-in read off the shape."""
    expected = {
        'embedding': (1 / 4, 1, 1),
        'readout': (1 / 4, 1, 1),
        'vector': (None, 1, 0),
        'bias': (None, 1, 0),
        'up': (1 / 4, 1, 1),
        'query': (1 / 4, 1, 1),
        'out': (18**-0.5, 1, 1),
    }
    for name, case in CASES.items():
        scaling = standard(*case)
        assert (scaling.init_std, scaling.lr_factor, scaling.decay_factor) == pytest.approx(
            expected[name]
        ), name


def test_growth_covers_sums_and_outputs():
    """Four times the width: the terms of a sum, and its outputs; layers are separate."""
    spec, _ = CASES['out']
    assert compute_growth(spec, (6, 8, 9, 64), (3, 2, 9, 16), depth=2.0) == Growth(4, 4, 2)
    spec, _ = CASES['up']
    assert compute_growth(spec, (3, 16, 192), (3, 16, 64)) == Growth(1, 3, 1)
    spec, shape = CASES['embedding']
    assert compute_growth(spec, (50, 32), shape) == Growth(1, 2, 1)


def test_cases_cover_all_roles():
    assert {spec.role for spec, _ in CASES.values()} == set(ROLES)


# Powers of width, and of depth, by kind of parameter; missing powers are 0. `up` and `query` stand
# for hidden matrices, `out` for matrices that write to the stream.
HIDDEN, LAST, TABLE, READOUT = 'up', 'out', 'embedding', 'readout'
GAIN, BIAS = 'vector', 'bias'
MUP = {
    HIDDEN: {'init': -0.5, 'lr': -1, 'decay': 1},
    LAST: {'init': -0.5, 'lr': -1, 'decay': 1},
    READOUT: {'forward': -1},
}
MUP_SIMPLE = {name: {'init': -0.5, 'lr': -1} for name in (HIDDEN, LAST, READOUT)} | {
    TABLE: {'init': -0.5}
}
UNIT = {of: {'forward': -0.5, 'lr': -0.5, 'decay': 0.5} for of in (HIDDEN, LAST)} | {
    READOUT: {'forward': -1},
    TABLE: {'lr': -0.5, 'decay': 0.5},
}
NTK = {of: {'forward': -0.5, 'lr': -0.5, 'decay': 0.5} for of in (HIDDEN, LAST, READOUT)}
WIDTH_POWERS = {
    ('standard', 'adam'): {of: {'init': -0.5} for of in (HIDDEN, LAST, READOUT, TABLE)},
    ('mup', 'adam'): MUP,
    ('mup', 'sgd'): {
        HIDDEN: {'init': -0.5},
        LAST: {'init': -0.5},
        READOUT: {'forward': -1, 'lr': 1, 'decay': -1},
        TABLE: {'lr': 1, 'decay': -1},
        GAIN: {'lr': 1, 'decay': -1},
    },
    ('spectral', 'adam'): MUP | {READOUT: {'init': -1, 'lr': -1, 'decay': 1}},
    ('mup_simple', 'adam'): MUP_SIMPLE,
    ('mup_intermediate', 'adam'): MUP_SIMPLE | {READOUT: {'init': -1, 'lr': -1}},
    ('mup_full', 'adam'): MUP_SIMPLE | {READOUT: {'init': -1, 'lr': -1}},
    ('ntk', 'sgd'): {of: {'forward': -0.5} for of in (HIDDEN, LAST, READOUT)},
    ('ntk', 'adam'): NTK,
    ('mean_field', 'adam'): NTK | {READOUT: {'forward': -1}},
    ('mean_field', 'sgd'): {
        HIDDEN: {'forward': -0.5, 'lr': 1, 'decay': -1},
        LAST: {'forward': -0.5, 'lr': 1, 'decay': -1},
        READOUT: {'forward': -1, 'lr': 1, 'decay': -1},
        TABLE: {'lr': 1, 'decay': -1},
        GAIN: {'lr': 1, 'decay': -1},
    },
    ('complete_p', 'adam'): {name: MUP.get(name, {}) | {'eps': -1} for name in CASES},
    ('depth_mup', 'adam'): {name: MUP.get(name, {}) | {'eps': -1} for name in CASES},
    **{
        ('hyper_p', family): {of: {'init': -0.5} for of in (HIDDEN, LAST)}
        for family in ('relative', 'adam')
    },
    ('unit', 'adam'): UNIT,
}
DEPTH_POWERS = {
    'complete_p': {of: {'eps': -1} for of in CASES}
    | {of: {'forward': -1, 'eps': -1} for of in (LAST, BIAS)},
    'depth_mup': {name: {'eps': -0.5} for name in CASES}
    | {of: {'lr': -0.5, 'eps': -0.5} for of in (HIDDEN, 'query', GAIN)}
    | {of: {'forward': -0.5, 'lr': -0.5, 'eps': -0.5} for of in (LAST, BIAS)},
    'hyper_p': {of: {'lr': -0.5} for of in CASES}
    | {of: {'forward': -0.5, 'lr': -0.5} for of in (LAST, BIAS)},
    'unit': {of: {'lr': -0.5, 'decay': 0.5} for of in (HIDDEN, 'query', GAIN)}
    | {of: {'forward': -0.5, 'lr': -0.5, 'decay': 0.5} for of in (LAST, BIAS)},
}
GROWING = {'embed', 'mlp', 'heads'}


def wider(spec, shape, times):
    return tuple(n * times if a in GROWING else n for n, a in zip(shape, spec.axes, strict=True))


def scaling_at(name, family, case, width, depth):
    spec, base = case
    shape, blocks, base_blocks = wider(spec, base, width), 3 * depth, 3
    if PARAMETRIZATIONS[name].is_absolute:
        base, base_blocks = one_channel_shape(spec, base), 1
    return compute_scaling(
        PARAMETRIZATIONS[name],
        INITS['fan_in'],
        spec,
        (shape, base),
        (blocks, base_blocks),
        compute_growth(spec, shape, base, blocks / base_blocks, width),
        family,
    )


@pytest.mark.parametrize(('name', 'family'), WIDTH_POWERS)
def test_factors_follow_width_and_depth(name, family):
    """Twice the width, and twice the depth, change the factors that the table names, and no
    others; at the base sizes all is as in `standard`, but for `unit`, which draws unit weights.
    Catches a rule of a wrong power, or for a wrong kind of parameter.
    """
    fields = {
        'forward': 'forward_factor',
        'init': 'init_std',
        'lr': 'lr_factor',
        'decay': 'decay_factor',
        'eps': 'eps_factor',
    }
    for case_name, case in CASES.items():
        at_base = scaling_at(name, family, case, 1, 1)
        if PARAMETRIZATIONS[name].is_absolute:
            assert at_base.init_std in (1, None), case_name
        else:
            assert at_base == standard(*case), case_name
        like = {'query': HIDDEN, BIAS: GAIN}.get(case_name, case_name)
        changed = {
            (2, 1): WIDTH_POWERS[name, family].get(like, {}),
            (1, 2): DEPTH_POWERS.get(name, {}).get(case_name, {}),
        }
        for (width, depth), powers in changed.items():
            scaling = scaling_at(name, family, case, width, depth)
            for power, field in fields.items():
                before, after = getattr(at_base, field), getattr(scaling, field)
                if before:  # None where nothing is drawn, 0 where nothing decays
                    expected = before * 2.0 ** powers.get(power, 0)
                    assert after == pytest.approx(expected), (case_name, width, depth, field)


def test_every_parametrisation_is_in_the_table():
    """Except for spectral optimizers: all their factors of hidden matrices but the deviation are 1
    in each row.
    """
    rows = {(n, f) for n, row in PARAMETRIZATIONS.items() for f in row.families if f != 'spectral'}
    assert rows - {('standard', 'sgd'), ('spectral', 'sgd')} == set(WIDTH_POWERS)
    for name, row in PARAMETRIZATIONS.items():
        if 'spectral' in row.families:
            scaling = scaling_at(name, 'spectral', CASES['up'], 4, 1)
            assert scaling == Scaling(standard(*CASES['up']).init_std / 2), name


def test_mup_follows_authors_package():
    """Learning rates, decays and the readout's multiplier at four times the width; fixture by
    tests/fixtures/scaling/make_mup.py.
    """
    package = json.loads((FIXTURES / 'make_mup.json').read_text())
    ours = {'embedding': TABLE, 'gain': GAIN, 'bias': GAIN, 'readout': READOUT}
    for family in ('adam', 'sgd'):
        for name, expected in package[family].items():
            spec, shape = CASES[ours.get(name, HIDDEN)]
            spec = dataclasses.replace(spec, decayed=True)
            scaling = scaling_at('mup', family, (spec, shape), 4, 1)
            assert (scaling.lr_factor, scaling.decay_factor) == (
                expected['lr'],
                expected['decay'],
            ), name
    readout = scaling_at('mup', 'adam', CASES[READOUT], 4, 1)
    assert readout.forward_factor == package['readout_forward']
    base = standard(*CASES[READOUT]).init_std
    assert readout.init_std / base == pytest.approx(package['readout_std_of_base'])


@pytest.mark.parametrize('alpha', [1.0, 0.5])
def test_complete_p_follows_authors_code(alpha):
    """Rates, decays, epsilons and multipliers at four times the width and twice the depth; fixture
    by tests/fixtures/scaling/make_complete_p.py.
    """
    code = json.loads((FIXTURES / 'make_complete_p.json').read_text())[str(alpha)]
    vector = ParamSpec('vector', ('embed',), part=NORM)  # of the norm behind the last block
    ours = {'embedding': TABLE, 'gain': GAIN, 'up': HIDDEN, 'down': LAST, 'bias': BIAS}
    name = {1.0: 'complete_p', 0.5: 'depth_mup'}[alpha]
    for kind, expected in code['kinds'].items():
        case = (vector, (16,)) if kind == 'last_gain' else CASES[ours[kind]]
        scaling = scaling_at(name, 'adam', case, 4, 2)
        decay = expected['decay'] or 0.0
        factors = (scaling.lr_factor, scaling.decay_factor, scaling.eps_factor)
        assert factors == pytest.approx((expected['lr'], decay, expected['eps'])), kind
    up, down, readout = (scaling_at(name, 'adam', CASES[c], 4, 2) for c in (HIDDEN, LAST, READOUT))
    assert up.init_std / standard(*CASES[HIDDEN]).init_std == pytest.approx(
        code['std_of_base'], rel=0.01
    )
    assert (up.forward_factor, down.forward_factor) == pytest.approx((1.0, code['branch']))
    assert readout.forward_factor == code['readout']


def test_unit_follows_authors_package():
    """Deviations, rates and multipliers of three blocks of width 128, and the outputs of blocks;
    fixture by tests/fixtures/scaling/make_unit.py.
    """
    package = json.loads((FIXTURES / 'make_unit.json').read_text())
    branch = package['branches'][0]
    assert package['branches'] == pytest.approx([branch] * 6)
    shapes = {
        'embedding': (CASES[TABLE][0], (64, 128)),
        'up': (CASES[HIDDEN][0], (3, 128, 512)),
        'down': (ParamSpec('hidden', ('layer', 'mlp', 'embed'), ('mlp',)), (3, 512, 128)),
        'readout': (CASES[READOUT][0], (128, 64)),
    }
    assert shapes.keys() == package['kinds'].keys()
    for kind, expected in package['kinds'].items():
        scaling = scaling_at('unit', 'adam', shapes[kind], 1, 1)
        times = branch if kind == 'down' else 1.0
        assert scaling.init_std == pytest.approx(expected['std'], rel=0.01)
        assert scaling.lr_factor == pytest.approx(expected['lr']), kind
        assert scaling.forward_factor == pytest.approx(expected.get('forward', 1.0) * times), kind
