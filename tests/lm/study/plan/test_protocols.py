"""Protocols of a sweep: steps by hand, cells that break them, and their effect on the cells."""

from types import SimpleNamespace

import pytest

from lm.config.resolve import flatten
from lm.data import steps_in_epoch
from lm.run.program import build_without_text
from lm.run.tables import parameter_count
from lm.study.plan.cells import expand_sweep
from lm.study.plan.protocols import (
    PROTOCOLS,
    apply_overrides,
    apply_protocol,
    parse_protocol,
    resolve_protocol,
)
from lm.study.plan.terms import D_FF, Measurements, nearest_batch
from lm.study.train import engines, means
from lm.study.train.ledger import open_sweep, read_sweep
from lm.study.train.means import check_device_kinds
from lm.study.train.waves import WavePlan
from modules.options import declared_options
from tests.helpers import tiny_raw
from tpu import sweep_plan
from tpu.chips import Topology

STEPS = 2000
RAW = tiny_raw({'train.steps': STEPS})
BATCHES = {'data.batch_size': (8, 32)}
VOCAB = 258  # of bytes, with two marks


class Text:
    """The rows of a text with a number of tokens."""

    def __init__(self, tokens, seq_len):
        self.rows = (tokens - 1) // seq_len

    def __len__(self):
        return self.rows


def make_measurements(seconds=(), tokens=10**9):
    """Returns measurements: seconds of a step of each program, and the tokens of every text."""
    return Measurements(
        'cpu', lambda recipe: Text(tokens, recipe.data.seq_len), lambda groups: seconds
    )


def apply(sweep, raw=RAW, machine=None):
    return apply_protocol(resolve_protocol(raw, sweep), raw, sweep, machine or make_measurements())


def trained_steps(sweep, raw=RAW, machine=None):
    """Returns the steps of each cell."""
    applied = apply(sweep, raw, machine)
    return [
        cell.recipe.train.steps
        for cell in apply_overrides(raw, expand_sweep(raw, sweep), applied.overrides)
    ]


def refusal(sweep, raw=RAW, machine=None):
    with pytest.raises(ValueError) as error:
        apply(sweep, raw, machine)
    assert '\n' not in str(error.value)
    return str(error.value)


def test_equal_parameters_widens_the_smaller_cells():
    """Property: after it all cells have as many parameters, counted again, and their steps. The
    gated MLP has three matrices, so that its base is wider than the largest cell's.
    """
    sweep = {'model.activation': ('relu', 'swiglu'), 'protocol': 'equal_parameters'}
    applied = apply(sweep)
    cells = apply_overrides(RAW, expand_sweep(RAW, sweep), applied.overrides)
    counts = [parameter_count(build_without_text(c.recipe, 'byte', 'cpu')) for c in cells]
    assert counts == [terms.quantities['parameters'] for terms in applied.terms]
    assert max(counts) / min(counts) < 1.01
    assert applied.overrides[0][D_FF] > RAW['model']['d_ff'] and not applied.overrides[1]
    assert {cell.recipe.train.steps for cell in cells} == {STEPS}


def test_equal_parameters_refuses_what_it_cannot_meet():
    sweep = {'model.activation': ('relu', 'swiglu'), 'protocol': 'equal_parameters:multiple=512'}
    with pytest.raises(ValueError, match='Choose a smaller equal_parameters:multiple'):
        apply(sweep)
    with pytest.raises(ValueError, match=r'determines model.d_ff, but this cell sets'):
        apply({'model.d_ff': (32, 64), 'protocol': 'equal_parameters'})


def test_equal_tokens_by_hand():
    sweep = {'zip': {'data.batch_size': (8, 32, 16), 'data.seq_len': (8, 8, 20)}}
    sweep['protocol'] = 'equal_tokens'
    assert trained_steps(sweep) == [2000, 500, 400]  # of 128,000 tokens
    assert [entry['tokens'] for entry in apply(sweep).record()['of_each']] == [128_000] * 3


@pytest.mark.parametrize('batch', [3, 24, 100, 333])
def test_equal_tokens_is_met_or_suggests_a_batch(batch):
    """Property: met within 0.1%."""
    tokens = 40 * 8 * 8
    raw, sweep = tiny_raw({'train.steps': 40}), {'protocol': 'equal_tokens'}
    message = refusal(sweep | {'data.batch_size': (8, batch)}, raw)
    nearest = int(message.rstrip('.').split()[-1])
    (cell,) = expand_sweep(raw, {'data.batch_size': (nearest,)})
    (adjusted,) = apply_overrides(raw, [cell], [{'train.steps': round(tokens / nearest / 8)}])
    assert abs(adjusted.recipe.train.steps * nearest * 8 / tokens - 1) <= 0.001
    assert nearest_batch(adjusted.recipe, tokens) == nearest
    if nearest != 8:
        assert trained_steps(sweep | {'data.batch_size': (8, nearest)}, raw)[0] == 40


def hand_counted(width, layers=2, hidden=32, length=8, experts=0, chosen=1):
    """Returns 6 (4 D^2 + 2 D F) for each layer and 6 D V for the readout; 12 D for each causal
    pair.
    """
    block = 4 * width**2 + chosen * 2 * width * hidden + width * experts
    return 6 * (layers * block + width * VOCAB) + layers * 12 * width * length / 2


def test_equal_flops_by_hand_at_two_widths():
    """Catches a missing readout, attention, or number of tokens."""
    sweep = {'model.d_model': (16, 32), 'protocol': 'equal_flops'}
    a, b = hand_counted(16), hand_counted(32)
    assert trained_steps(sweep) == [STEPS, round(STEPS * a / b)]
    entries = apply(sweep).record()['of_each']
    assert entries[0]['flops'] == STEPS * a * 8 * 8
    assert entries[1]['flops'] == pytest.approx(entries[0]['flops'], rel=0.01)


def test_equal_flops_with_experts_by_hand():
    """Two of four experts and the router multiply a token; a larger batch costs more."""
    sweep = {
        'list': (
            {'model.mlp': 'dense'},
            {'model.mlp': 'moe', 'mlp.n_experts': 4, 'mlp.experts_per_token': 2},
            {'data.batch_size': 16},
        ),
        'protocol': 'equal_flops',
    }
    ratio = hand_counted(16) / hand_counted(16, experts=4, chosen=2)
    assert trained_steps(sweep) == [STEPS, round(STEPS * ratio), STEPS // 2]


def test_equal_time_by_hand():
    sweep = {'optim.name': ('adamw', 'muon'), 'train.seed': (0, 1), 'protocol': 'equal_time'}
    assert trained_steps(sweep, machine=make_measurements((0.1, 0.16))) == [2000, 2000, 1250, 1250]
    entries = apply(sweep, machine=make_measurements((0.1, 0.16))).record()['of_each']
    assert [(entry['changes'], entry['seconds_a_step']) for entry in entries] == [
        ({'optim.name': 'adamw'}, 0.1),
        ({'optim.name': 'muon'}, 0.16),
    ]
    assert [entry['seconds'] for entry in entries] == pytest.approx([200, 200])


def test_equal_time_hours_by_hand():
    """Reference: steps = tokens/s * 3600 * hours / (batch * seq_len), also for the baseline."""
    per_step, sec = 8 * 8, (0.5, 0.125)
    sweep = {'optim.name': ('adamw', 'muon'), 'protocol': 'equal_time:hours=6'}
    expected = [round(per_step / step_sec * 3600 * 6 / per_step) for step_sec in sec]
    assert trained_steps(sweep, machine=make_measurements(sec)) == expected == [43_200, 172_800]


@pytest.fixture
def text(tmp_path):
    (tmp_path / 'a.txt').write_text('words')
    return f'text:{tmp_path}/a.txt'


def test_one_epoch_uses_every_row_once(text):
    raw = tiny_raw({'data.source': text})
    sweep = {'zip': {'data.batch_size': (8, 8, 32), 'data.seq_len': (8, 16, 8)}}
    sweep['protocol'] = 'one_epoch'
    assert trained_steps(sweep, raw, make_measurements(tokens=4001)) == [62, 31, 15]
    assert steps_in_epoch(Text(4001, 8), 8) == 62 == 4000 // 8 // 8
    assert 'shorter than one batch of 8 rows' in refusal(sweep, raw, make_measurements(tokens=60))


def test_regime_adaptation_scales_lr_with_sqrt_batch():
    sweep = BATCHES | {'optim.lr': (0.001, 0.002), 'protocol': 'regime_adaptation'}
    cells = apply_overrides(RAW, expand_sweep(RAW, sweep), apply(sweep).overrides)
    assert [cell.recipe.train.steps for cell in cells] == [STEPS] * 4
    assert [flatten(cell.recipe)['optim.lr'] for cell in cells] == [0.001, 0.002, 0.002, 0.004]
    assert [cell.recipe.data.epochs for cell in cells] == [1, 1, 4, 4]
    assert [cell.changes['optim.lr'] for cell in cells] == [0.001, 0.002] * 2  # as the sweep has it
    over_batch = sweep | {'model.norm': ('batchnorm',)}
    (note,) = [note for note in apply(over_batch).notes if 'batchnorm' in note]
    assert 'use ghost_batchnorm' in note


def test_arms_and_lengths_follow_the_protocol():
    """A length of the baseline is a share of the steps that the protocol sets."""
    tune = {'optim.lr': None, 'lengths': (0.5,)}
    sweep = BATCHES | {'protocol': 'regime_adaptation'}
    plan = WavePlan(RAW, sweep, tune, apply(sweep).overrides)
    assert [arm.grid.centres['optim.lr'] for arm in plan.arms.arms[:2]] == [0.003, 0.006]
    sweep = {'optim.name': ('adamw', 'muon'), 'protocol': 'equal_time:hours=0.1'}
    plan = WavePlan(RAW, sweep, tune, apply(sweep, machine=make_measurements((0.1, 0.2))).overrides)
    first = plan.arms.first_cells
    assert [cell.recipe.train.steps for cell in first] == [3600, 1800, 1800]
    assert [cell.changes.get('train.steps') for cell in first] == [None, None, 1800]
    assert len({cell.name for cell in first}) == 3


def test_sweep_json_records_the_protocol(tmp_path):
    sweep = BATCHES | {'train.seed': (0, 1), 'protocol': 'equal_tokens'}
    agreed_on = apply(sweep)
    plan = WavePlan(RAW, sweep, None, agreed_on.overrides)
    open_sweep(
        tmp_path,
        plan.first_groups[0][0].recipe,
        plan.first_groups,
        False,
        protocol=agreed_on.record(),
    )
    held = read_sweep(tmp_path)
    assert held['protocol'] == {
        'name': 'equal_tokens',
        'options': {},
        'of_each': [
            {'changes': {'data.batch_size': batch}, 'sets': {'train.steps': steps}}
            | {'steps': steps, 'tokens': 128_000}
            for batch, steps in ((8, 2000), (32, 500))
        ],
    }
    assert 'train.steps' not in held['axes']
    assert {cell['differs'].get('train.steps') for cell in held['cells']} == {None, 500}


class Opened(Exception):
    """Raised instead of training."""


@pytest.mark.parametrize('tune', [None, {'optim.lr': None}], ids=['plain', 'tuned'])
def test_engine_trains_protocol_steps(tune, monkeypatch, tmp_path):
    """Catches a protocol that is parsed and not applied between the config and the wave."""

    def stop(ledger, work, wave, *_, **options):
        raise Opened(sorted({cell.recipe.train.steps for cell in wave.cells}))

    monkeypatch.setattr(engines, '_train_waves', stop)
    monkeypatch.setattr(
        engines, 'local_measurements', lambda work, engine, host: make_measurements()
    )
    sweep = BATCHES | {'protocol': 'equal_tokens'}
    with pytest.raises(Opened) as error:
        engines.train_sweep(RAW, sweep, tmp_path, False, 'local', str, tune=tune)
    assert error.value.args == ([500, 2000],)
    held = read_sweep(tmp_path)
    assert [entry['steps'] for entry in held['protocol']['of_each']] == [2000, 500]
    assert ('tune' in held) is (tune is not None)
    broken = {'optim.b1': (0.8, 0.9), 'protocol': 'regime_adaptation'}
    with pytest.raises(ValueError, match=r'cells with different data\.batch_size'):
        engines.train_sweep(RAW, broken, tmp_path / 'b', False, 'local', str)
    assert not (tmp_path / 'b').exists()


def test_sweep_plan_has_protocol_steps(monkeypatch):
    """A plan leaves a protocol that needs times to the training machine, and reports it."""
    planned, lines = [], []

    def plan(group, planned_cell, position):
        planned.extend(group)
        return SimpleNamespace(name='a group', a_device=1, runs=len(group))

    monkeypatch.setattr(sweep_plan, '_plan_group', plan)
    monkeypatch.setattr(sweep_plan, 'SweepPlan', lambda *parts: parts)
    topology = Topology('a machine', None, [SimpleNamespace(platform='cpu')])
    for name in ('equal_tokens', 'equal_time'):
        sweep_plan.plan_sweep(RAW, BATCHES | {'protocol': name}, topology, lines.append)
    assert [cell.recipe.train.steps for cell in planned] == [2000, 500, 2000, 2000]
    assert [line for line in lines if 'sets train.steps when the sweep trains' in line] == lines[
        2:3
    ]


def test_cells_are_unchanged_without_protocol():
    plain = [(cell.name, cell.recipe) for cell in expand_sweep(RAW, BATCHES)]
    assert (
        parse_protocol(BATCHES) is None
        and resolve_protocol(RAW, BATCHES) is None
        and parse_protocol(None) is None
    )
    named = BATCHES | {'protocol': 'equal_tokens'}
    assert [(cell.name, cell.recipe) for cell in expand_sweep(RAW, named)] == plain


BROKEN = [
    ({'protocol': 'equal_flop'}, "got 'equal_flop'. Did you mean 'equal_flops'"),
    ({'protocol': 'equal_time:hour=6'}, "no such option, only hours. Did you mean 'hours'"),
    ({'protocol': 'equal_time:hours=0'}, 'must be between 1e-06 and'),
    ({'protocol': ('equal_time',)}, 'must be one name, such as equal_tokens'),
    (
        {'protocol': 'equal_tokens', 'train.steps': (9,)},
        'determines train.steps, but this cell sets',
    ),
    ({'protocol': 'equal_flops', 'train.steps': (9,)}, 'Leave it out of config.sweep'),
    ({'protocol': 'equal_tokens', 'data.batch_size': (8, 1500)}, 'that works is 1456'),
    ({'protocol': 'one_epoch'}, 'synthetic:markov has no end'),
    ({'protocol': 'one_epoch', 'data.epochs': (2,)}, 'determines data.epochs'),
    ({'protocol': 'regime_adaptation'}, 'different data.batch_size, but all have 8'),
    ({'protocl': 'equal_flops'}, "Did you mean 'protocol'"),
]


@pytest.mark.parametrize(('broken', 'words'), BROKEN, ids=lambda value: str(value)[:60])
def test_protocol_refuses_incompatible_cells(broken, words):
    """Configs alone suffice: nothing is counted, opened or timed."""
    assert words in refusal(
        {'optim.b1': (0.8, 0.9)} | broken, machine=Measurements('cpu', None, None)
    )


def test_protocol_flags_are_refused_for_single_runs(text):
    few = tiny_raw({'train.steps': 12})
    flops = {'model.d_model': (16, 32), 'protocol': 'equal_flops'}
    assert '50 steps per cell are always near enough' in refusal(flops, few)
    again = tiny_raw({'data.source': text, 'data.epochs': 2})
    assert 'data.epochs=2; set it to 1' in refusal(
        {'optim.lr': (1, 2), 'protocol': 'one_epoch'}, again
    )
    mixed = tiny_raw({'data.mixture': f"{{'a': (0.5, '{text}'), 'b': (0.5, 'synthetic:markov')}}"})
    assert 'synthetic:markov' in refusal({'optim.lr': (1, 2), 'protocol': 'one_epoch'}, mixed)
    slow = {'optim.name': ('adamw', 'muon'), 'protocol': 'equal_time'}
    short = make_measurements((1.0, 0.1), tokens=8 * 8 * 5000 + 1)
    assert 'train.steps=20000 needs 4 epochs, but data.epochs=1' in refusal(slow, machine=short)


def test_times_from_another_device_are_refused(monkeypatch, tmp_path):
    work = means.Work([], tmp_path, [], print)
    first = expand_sweep(RAW, {'optim.lr': (0.1,)})
    cost_by_program = {means.program_digest(first[0]): means.ProgramCost(0.25)}
    monkeypatch.setattr(means, 'measure_throughput', lambda groups, work: cost_by_program)
    assert means.local_measurements(work, 'local', 0).measure_seconds([first]) == [0.25]
    (tmp_path / means.FILE).write_text('{"device": "8 x TPU v9", "programs": {}}')
    with pytest.raises(
        ValueError, match=r'has step times of 8 x TPU v9, but this is .* another --workdir'
    ):
        means.local_measurements(work, 'local', 0).measure_seconds([first])
    with pytest.raises(ValueError, match='devices of one kind, but there are H100, H200'):
        check_device_kinds(['H200', 'H100'], 'local')
    with pytest.raises(ValueError, match='--engine=ray trains in others'):
        check_device_kinds(['cpu'], 'ray')


def test_every_protocol_is_documented():
    """Contract: each has an equation or a share of the baseline, and the name of its function."""
    for name, row in PROTOCOLS.items():
        assert row.compute_terms.__name__ == name and row.compute_terms.__doc__
        assert all(declared.option.description for declared in declared_options(row).values())
