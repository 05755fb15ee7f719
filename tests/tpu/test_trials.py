"""Property: what is tried where a step does not fit, and how trials are ranked. Nothing is compiled
but in the last tests: memory is a function of the config here.
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
LAID = {'mesh.data': -1, 'data.batch_size': 32}


def eight():
    """Devices of this process, taken for chips of v5e."""
    return Topology('v5e:2x4', CHIPS['v5e'], jax.devices()[:8], (2, 4))


class Compiled:
    """A step that takes what `needs` says of its config."""

    def __init__(self, made, needs):
        self.recipe, self.needs = made.recipe, needs


@pytest.fixture
def compiler(monkeypatch):
    """compiler(needs): steps need so many GiB, of 16, and take 1 s for each of `seconds`."""
    asked = []

    def use(needs):
        def compile_step(made, topology, *rest):
            asked.append(made.recipe)
            if needs(made.recipe) > 16:
                raise DoesNotFit(int(needs(made.recipe) * GIB), 16 * GIB)
            return made

        monkeypatch.setattr(trials, 'compile_step', compile_step)
        monkeypatch.setattr(trials, 'estimate_step', lambda step, *rest: Found(step.recipe, needs))
        return asked

    return use


class Found:
    """What a trial reads of an estimate."""

    mfu = mfu_bound = 0.5
    memory_there = 16 * GIB

    def __init__(self, config, needs):
        self.memory_needed = int(needs(config) * GIB)
        again = 4 if config.model.remat == 'full' else 3
        self.step_seconds = again + 0.1 * config.mesh.fsdp
        self.step_seconds_exposed = self.step_seconds + 1
        self.bound_seconds = self.step_seconds - 1


def test_ways_are_changes_that_the_devices_allow():
    """Catches more parts than devices, and what the config has already."""
    found = helpful_changes(tiny_config(LAID | {'model.remat': 'none', 'mesh.fsdp': 2}), eight())
    assert {'model.remat': 'full'} in found
    assert {'mesh.data': -1, 'mesh.fsdp': 4} in found
    assert {'train.microbatches': 2} in found
    assert all(changes.get('mesh.fsdp', 4) in (4, 8) for changes in found)
    assert {'model.remat': 'full', 'mesh.data': -1, 'mesh.fsdp': 8} in found
    assert len(found) == len({str(one) for one in found})
    full = helpful_changes(tiny_config(LAID | {'model.remat': 'full', 'mesh.fsdp': 8}), eight())
    assert not any('model.remat' in one or 'mesh.fsdp' in one for one in full)


def test_each_way_is_compiled_until_enough_fit(compiler):
    """Remat alone is not enough here, and with more fsdp it is."""

    def needs(config):
        return (40 if config.model.remat == 'none' else 30) / config.mesh.fsdp

    asked = compiler(needs)
    said = []
    rows = list(try_changes(tiny_config(LAID | {'model.remat': 'none'}), eight(), said.append))
    assert len(asked) == len(rows)
    assert [row.estimate is not None for row in rows][:2] == [False, False]
    assert sum(row.estimate is not None for row in rows) == 2
    assert 'still 14.00 GiB too many' in rows[0].format_line()
    assert not said


@pytest.mark.full
def test_it_is_said_that_nothing_fits(compiler):
    compiler(lambda config: 1000)
    said = []
    rows = list(try_changes(tiny_config(LAID), eight(), said.append))
    assert rows and not any(row.estimate for row in rows)
    assert 'Nothing that was tried fits v5e:2x4' in said[0]


@pytest.mark.full
def test_a_search_ranks_what_fits_by_its_step_and_has_what_was_given(compiler):
    asked = compiler(lambda config: 20 if config.mesh.data == -1 and config == given else 10)
    config = given = tiny_config(LAID | {'model.remat': 'none'})
    said = []
    rows = trials.search(config, eight(), said.append, tries=3)
    assert [line.split(':')[0] for line in said[1:]] == [f'{k} of at most 4' for k in (1, 2, 3, 4)]
    assert 'best' not in said[1] and said[-1].endswith(f'; best so far: {rows[0].label}')
    assert asked[0] == config  # as it is given
    seconds = [row.estimate.step_seconds for row in rows if row.estimate]
    assert seconds == sorted(seconds) and len(seconds) >= 2
    assert rows[0].estimate and not rows[-1].estimate  # the given one does not fit
    assert len({row.label for row in rows}) == len(rows)


def test_candidates_have_attention_at_its_rate():
    """On TPU7x a third of its operations at the forward pass's, two thirds at the backward's."""
    learner = tiny_learner(tiny_config())
    head_dim = learner.recipe.head_dim
    ahead, back = (attention_share('TPU7x', head_dim, one) for one in ('forward', 'backward'))
    whole, own = flops_per_token(learner), attention_flops(learner.recipe)
    found = trials._flops_at_peak(learner, 'TPU7x')
    assert found == pytest.approx(whole - own + own / 3 / ahead + 2 * own / 3 / back)
    assert trials._flops_at_peak(learner, 'cpu') == pytest.approx(whole)


def test_a_sweep_takes_the_devices_that_its_programs_leave():
    """Of 8 devices 5 go to the first program, and 3 to the second, of 2 runs each.

    Catches a device counted twice, and waves one after the other.
    """
    hour = SimpleNamespace(steps=10, step_seconds=360.0)
    groups = [GroupPlan('a', 5, 1, hour), GroupPlan('b', 8, 2, hour)]
    plan = SweepPlan(eight(), groups, None)
    assert (plan.runs, plan.at_once) == (13, 5 + 3 * 2)
    assert (plan.device_hours, plan.hours) == (5 + 4, 2.0)


@pytest.mark.full
def test_arms_take_the_waves_that_tuning_takes():
    """Each arm has 15 to 25 runs, 5 at a time."""
    hour = SimpleNamespace(steps=10, step_seconds=360.0, record=dict)
    groups = [GroupPlan('a', 10, 5, hour), GroupPlan('b', 5, 5, hour)]
    plan = TunedPlan(eight(), groups, None, '3 arms of 15 runs at least', (3, 5))
    assert plan.record()['waves'] == (3, 5) and plan.device_hours == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('tpu.sweep_plan.format_summary', lambda estimate: 'memory')
        *_, last = plan.format_lines()
    said = '3 arms of 15 runs at least: 3 to 5 such waves, 3.00 to 5.00 hours, 9.00 to 15.00'
    assert last.startswith(said)


@pytest.mark.full
def test_candidates_cut_evenly_and_are_those_that_may_fit(monkeypatch):
    """Catches a mesh that leaves devices idle, and memory that is not looked at."""
    config = tiny_config(LAID)
    found = [one.changes for one in trials.generate_candidates(config, eight())]
    assert {'mesh.fsdp', 'mesh.tensor', 'mesh.context', 'model.remat'} <= set(found[0])
    assert {one['model.remat'] for one in found} == {*REMAT_POLICIES}
    assert len({str(one) for one in found}) == len(found)
    monkeypatch.setattr(trials, 'device_memory', lambda topology: 1)
    assert not list(trials.generate_candidates(config, eight()))


@pytest.mark.full
def test_what_the_compiler_says_of_memory_is_read():
    text = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory '
        'required for HLO temporaries (18.50G) exceeds available HBM (15.75G). HLO module: jit_step'
    )
    assert _parse_memory_error(text) == (int(18.5 * GIB), int(15.75 * GIB))
    assert _parse_memory_error(text.replace('18.50G', '900.00M'))[0] == 900 * 2**20
    with pytest.raises(ValueError, match='by how much is not said'):
        _parse_memory_error('RESOURCE_EXHAUSTED: out')
    error = DoesNotFit(18 * GIB, 16 * GIB)
    assert str(error) == 'needs 18.00 GiB a device, and there are 16.00: 2.00 GiB too many'


def test_a_program_that_the_compiler_lets_pass_is_held_against_memory(monkeypatch):
    """Those of GPUs and CPUs do not look at how much there is."""

    class Report:
        argument_size_in_bytes = 12 * GIB
        output_size_in_bytes = 12 * GIB
        alias_size_in_bytes = 11 * GIB
        temp_size_in_bytes = 70 * GIB

    class Executable:
        def memory_analysis(self):
            return Report()

    monkeypatch.setattr(Program, '__init__', lambda self, made, how: None)
    monkeypatch.setattr(Program, 'compile_step', lambda self, runs: Executable())
    gpu = Topology('h100:1', CHIPS['h100'], [], (1,))
    with pytest.raises(DoesNotFit, match=r'needs 83\.00 GiB'):
        compiled_step.compile_step(None, gpu)


@pytest.mark.parametrize('links, bound', [(1.0, 2.0), (3.0, 3.0)])
def test_a_bound_has_products_at_the_peak_and_all_links(links, bound):
    """Catches one that is the step's own."""
    given = dict.fromkeys((field.name for field in dataclasses.fields(StepEstimate)), 1.0)
    given |= {'rates': Rates(10.0, 1.0, ''), 'model_flops': 12.0, 'link_seconds': links}
    found = StepEstimate(**given | {'operation_seconds': 4.0, 'bound_operation_seconds': 2.0})
    assert found.bound_seconds == bound < found.step_seconds
    assert found.mfu_bound == pytest.approx(12 / 10 / bound)


@pytest.mark.parametrize(
    'length, window, every, parts, share',
    [
        (1024, None, 0, 1, 3 / 4),  # of 2 x 2 blocks of 512
        (4096, None, 0, 1, 10 / 16),  # of 1,024
        (4096, None, 0, 4, 36 / 64),  # pieces of 512
        (4096, None, 0, 8, 136 / 256),  # pieces of 256
        (4096, 513, 0, 1, 15 / 64),  # blocks no larger than the window: its own, and the one before
        (4096, 513, 2, 1, (15 / 64 + 10 / 16) / 2),
        (96, None, 0, 1, 97 / (2 * 96)),  # no block divides it
    ],
)
def test_blocks_that_splash_attention_computes(length, window, every, parts, share):
    changes = {'model.n_layers': 2, 'data.seq_len': length, 'attention.window': window}
    changes |= {'attention.full_every': every} if every else {}
    assert computed_pair_share(tiny_config(changes), parts) == pytest.approx(share)
