"""Property: which changes are tried if a step does not fit, and how trials are ranked.

Only the last tests compile: elsewhere memory is a function of the config.
"""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from lm.run.program import Program
from lm.training.flops import attention_flops, flops_per_token
from modules.numerics import REMAT_POLICIES
from tests.helpers import tiny_config, tiny_learner
from tpu import compiled_step, trials
from tpu.chips import CHIPS, Topology
from tpu.compiled_step import (
    DoesNotFit,
    Rates,
    StepEstimate,
    _parse_memory_error,
    computed_pair_share,
)
from tpu.rates import attention_share
from tpu.sweep_plan import GroupPlan, SweepPlan, TunedPlan
from tpu.trials import helpful_changes, try_changes

GIB = 2**30
SHARDED = {'mesh.data': -1, 'data.batch_size': 32}


def eight_chips():
    """Devices of this process, in place of chips of v5e."""
    return Topology('v5e:2x4', CHIPS['v5e'], jax.devices()[:8], (2, 4))


class CompiledStub:
    """A step that needs the memory that `needs` computes from its config."""

    def __init__(self, blueprint, needs):
        self.recipe, self.needs = blueprint.recipe, needs


@pytest.fixture
def compiler(monkeypatch):
    """compiler(needs): steps need needs(recipe) GiB of 16, and the compiled recipes are
    returned.
    """
    compiled, programs = [], []

    def use(needs):
        def compile_step(blueprint, topology, program):
            programs.append(program)
            compiled.append(blueprint.recipe)
            if needs(blueprint.recipe) > 16:
                raise DoesNotFit(int(needs(blueprint.recipe) * GIB), 16 * GIB)
            return blueprint

        monkeypatch.setattr(trials, 'compile_step', compile_step)
        monkeypatch.setattr(
            trials, 'estimate_step', lambda step, *args: EstimateStub(step.recipe, needs)
        )
        return compiled

    use.programs = programs
    return use


class EstimateStub:
    """The fields of an estimate that a trial reads."""

    mfu = mfu_bound = 0.5
    memory_there = 16 * GIB

    def __init__(self, config, needs):
        self.memory_needed = int(needs(config) * GIB)
        n_passes = 4 if config.model.remat == 'full' else 3
        self.step_seconds = n_passes + 0.1 * config.mesh.fsdp
        self.step_seconds_exposed = self.step_seconds + 1
        self.bound_seconds = self.step_seconds - 1


def test_helpful_changes_fit_the_devices():
    """Catches more parts than devices, and changes that the config already has."""
    changes_list = helpful_changes(
        tiny_config(SHARDED | {'model.remat': 'none', 'mesh.fsdp': 2}), eight_chips()
    )
    assert {'model.remat': 'full'} in changes_list
    assert {'mesh.data': -1, 'mesh.fsdp': 4} in changes_list
    assert {'train.microbatches': 2} in changes_list
    assert all(changes.get('mesh.fsdp', 4) in (4, 8) for changes in changes_list)
    assert {'model.remat': 'full', 'mesh.data': -1, 'mesh.fsdp': 8} in changes_list
    assert len(changes_list) == len({str(changes) for changes in changes_list})
    full = helpful_changes(
        tiny_config(SHARDED | {'model.remat': 'full', 'mesh.fsdp': 8}), eight_chips()
    )
    assert not any('model.remat' in changes or 'mesh.fsdp' in changes for changes in full)


def test_changes_are_tried_until_enough_fit(compiler):
    """Remat alone is not enough here; with more fsdp it is."""

    def needs(config):
        return (40 if config.model.remat == 'none' else 30) / config.mesh.fsdp

    compiled = compiler(needs)
    messages = []
    rows = list(
        try_changes(tiny_config(SHARDED | {'model.remat': 'none'}), eight_chips(), messages.append)
    )
    assert len(compiled) == len(rows)
    assert [row.estimate is not None for row in rows][:2] == [False, False]
    assert sum(row.estimate is not None for row in rows) == 2
    assert rows[0].format_line().endswith(': 30.00 GiB per device, 14.00 GiB too much')
    assert not messages
    n = len(helpful_changes(tiny_config(SHARDED | {'model.remat': 'none'}), eight_chips()))
    assert compiler.programs[0] == f'change 1 of at most {n}, remat=full'
    assert compiler.programs[-1].startswith(f'change {len(rows)} of at most {n}, ')


@pytest.mark.full
def test_no_fitting_change_is_reported(compiler):
    compiler(lambda config: 1000)
    messages = []
    rows = list(try_changes(tiny_config(SHARDED), eight_chips(), messages.append))
    assert rows and not any(row.estimate for row in rows)
    assert messages == ['No change fits v5e:2x4. Use more chips or a smaller model.']


@pytest.mark.full
def test_search_ranks_by_step_and_includes_config(compiler):
    compiled = compiler(lambda config: 20 if config.mesh.data == -1 and config == initial else 10)
    config = initial = tiny_config(SHARDED | {'model.remat': 'none'})
    messages = []
    rows = trials.search(config, eight_chips(), messages.append, tries=3)
    assert [line.split(':')[0] for line in messages[1:]] == [
        f'{k} of at most 4' for k in (1, 2, 3, 4)
    ]
    best = [line for line in messages[1:] if line.endswith(' (best so far)')]
    assert 'best' not in messages[1] and f': {rows[0].label}: fits, 10.00 GiB, ' in best[-1]
    assert compiler.programs[1].startswith('2 of at most 4, ')
    assert compiled[0] == config  # the config itself comes first
    seconds = [row.estimate.step_seconds for row in rows if row.estimate]
    assert seconds == sorted(seconds) and len(seconds) >= 2
    assert rows[0].estimate and not rows[-1].estimate  # the config itself does not fit
    assert len({row.label for row in rows}) == len(rows)


def test_candidates_use_attention_shares():
    """On TPU7x a third of its operations has the forward share, two thirds the backward share."""
    learner = tiny_learner(tiny_config())
    head_dim = learner.recipe.head_dim
    forward_share, backward_share = (
        attention_share('TPU7x', head_dim, phase) for phase in ('forward', 'backward')
    )
    total, attention = flops_per_token(learner), attention_flops(learner.recipe)
    flops = trials._flops_at_peak(learner, 'TPU7x')
    assert flops == pytest.approx(
        total - attention + attention / 3 / forward_share + 2 * attention / 3 / backward_share
    )
    assert trials._flops_at_peak(learner, 'cpu') == pytest.approx(total)


def test_sweep_fills_remaining_devices():
    """5 of 8 devices go to the first program, and 3 to the second, with 2 runs each.

    Catches a device counted twice, and waves in sequence.
    """
    hour = SimpleNamespace(steps=10, step_seconds=360.0)
    groups = [GroupPlan('a', 5, 1, hour), GroupPlan('b', 8, 2, hour)]
    plan = SweepPlan(eight_chips(), groups, None)
    assert (plan.runs, plan.at_once) == (13, 5 + 3 * 2)
    assert (plan.device_hours, plan.hours) == (5 + 4, 2.0)


@pytest.mark.full
def test_tuned_plan_multiplies_waves():
    """Each arm has 15 to 25 runs, 5 at a time."""
    kernels = {'record': dict, 'format_kernels': lambda: 'kernels: attention=splash'}
    hour = SimpleNamespace(steps=10, step_seconds=360.0, **kernels)
    groups = [GroupPlan('a', 10, 5, hour), GroupPlan('b', 5, 5, hour)]
    plan = TunedPlan(eight_chips(), groups, None, '3 arms of 15 runs at least', (3, 5))
    assert plan.record()['waves'] == (3, 5) and plan.device_hours == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('tpu.sweep_plan.format_summary', lambda estimate: 'memory')
        *_, kernels, wave, last = plan.format_lines()
    assert kernels == 'kernels: attention=splash'
    assert wave.startswith('one wave, 5 runs per arm: 15 runs in 2 programs on v5e:2x4: 15 at a ')
    start = '3 arms of 15 runs at least: 3 to 5 waves, 3.00 to 5.00 hours, 9.00 to 15.00'
    assert last.startswith(start)


@pytest.mark.full
def test_candidates_divide_evenly_and_may_fit(monkeypatch):
    """Catches a mesh that leaves devices idle, and memory that is not checked."""
    config = tiny_config(SHARDED)
    changes_list = [
        candidate.changes for candidate in trials.generate_candidates(config, eight_chips())
    ]
    assert {'mesh.fsdp', 'mesh.tensor', 'mesh.context', 'model.remat'} <= set(changes_list[0])
    assert {candidate['model.remat'] for candidate in changes_list} == {*REMAT_POLICIES}
    assert len({str(candidate) for candidate in changes_list}) == len(changes_list)
    monkeypatch.setattr(trials, 'device_memory', lambda topology: 1)
    assert not list(trials.generate_candidates(config, eight_chips()))


@pytest.mark.full
def test_memory_errors_are_parsed():
    text = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory '
        'required for HLO temporaries (18.50G) exceeds available HBM (15.75G). HLO module: jit_step'
    )
    assert _parse_memory_error(text) == (int(18.5 * GIB), int(15.75 * GIB))
    assert _parse_memory_error(text.replace('18.50G', '900.00M'))[0] == 900 * 2**20
    with pytest.raises(
        ValueError, match='more memory than a device has; the compiler: RESOURCE_EXHAUSTED: out'
    ):
        _parse_memory_error('RESOURCE_EXHAUSTED: out')
    error = DoesNotFit(18 * GIB, 16 * GIB)
    assert str(error) == ('needs 18.00 GiB per device, 2.00 GiB more than the 16.00 GiB available')


def test_compiled_program_is_checked_for_memory(monkeypatch):
    """The compilers for GPUs and CPUs do not check the memory."""

    class Report:
        argument_size_in_bytes = 12 * GIB
        output_size_in_bytes = 12 * GIB
        alias_size_in_bytes = 11 * GIB
        temp_size_in_bytes = 70 * GIB

    class Executable:
        def memory_analysis(self):
            return Report()

    monkeypatch.setattr(Program, '__init__', lambda self, blueprint, run_axis: None)
    monkeypatch.setattr(Program, 'compile_step', lambda self, runs: Executable())
    gpu = Topology('h100:1', CHIPS['h100'], [], (1,))
    with pytest.raises(DoesNotFit, match=r'needs 83\.00 GiB'):
        compiled_step.compile_step(None, gpu)


@pytest.mark.parametrize('links, bound', [(1.0, 2.0), (3.0, 3.0)])
def test_bound_takes_peak_products_and_all_links(links, bound):
    """Catches a bound that equals the step itself."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(StepEstimate)), 1.0)
    fields |= {'rates': Rates(10.0, 1.0, ''), 'model_flops': 12.0, 'link_seconds': links}
    estimate = StepEstimate(**fields | {'operation_seconds': 4.0, 'bound_operation_seconds': 2.0})
    assert estimate.bound_seconds == bound < estimate.step_seconds
    assert estimate.mfu_bound == pytest.approx(12 / 10 / bound)


@pytest.mark.parametrize(
    'length, window, full_every, parts, share',
    [
        (1024, None, 0, 1, 3 / 4),  # of 2 x 2 blocks of 512
        (4096, None, 0, 1, 10 / 16),  # of 1,024
        (4096, None, 0, 4, 36 / 64),  # pieces of 512
        (4096, None, 0, 8, 136 / 256),  # pieces of 256
        (4096, 513, 0, 1, 15 / 64),  # blocks of at most the window: the own and the previous
        (4096, 513, 2, 1, (15 / 64 + 10 / 16) / 2),
        (96, None, 0, 1, 97 / (2 * 96)),  # no block divides it
    ],
)
def test_splash_attention_block_shares(length, window, full_every, parts, share):
    changes = {'model.n_layers': 2, 'data.seq_len': length, 'attention.window': window}
    changes |= {'attention.full_every': full_every} if full_every else {}
    assert computed_pair_share(tiny_config(changes), parts) == pytest.approx(share)
