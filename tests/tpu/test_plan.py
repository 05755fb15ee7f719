"""The command: its output for the local devices, for TPUs by their compiler, and for bad input."""

import functools
import json
import os
import subprocess
import sys

import pytest

from lm.config.resolve import resolve
from lm.training.flops import flops_per_token
from lm.training.state import build_learner
from tests import ROOT
from tests.helpers import tiny_raw
from tests.programs import COMPILERS
from tests.xla import EIGHT_DEVICES
from tpu.compiled_step import nominal_vocabulary

DEFAULT = '--config=configs/default.py'
TINY = {
    'model.d_model': 128,
    'model.d_ff': 256,
    'model.n_heads': 2,
    'model.n_kv_heads': 2,
    'model.n_layers': 3,
    'model.scan_layers': True,
    'data.tokenizer': 'byte',
    'data.seq_len': 128,
    'data.batch_size': 32,
}


def run_plan(*flags, changes=TINY, **environment):
    """Returns (exit status, stdout, stderr)."""
    config = () if any(flag.startswith('--config=') for flag in flags) else (DEFAULT,)
    command = [sys.executable, '-m', 'tpu.plan', *config]
    command += [f'--config.{path}={value}' for path, value in changes.items()]
    process = subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env=os.environ | {'XLA_FLAGS': ''} | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return process.returncode, process.stdout, process.stderr


def write_plan(folder, *flags, **options):
    """Returns (stdout, stderr, the JSON) of a plan that fits."""
    path = folder / 'plan.json'
    status, printed, stderr = run_plan(*flags, f'--out={path}', **options)
    assert status == 0, stderr
    return printed, stderr, json.loads(path.read_text())


@functools.cache
def plan_tpus(folder):
    """Returns `write_plan` for four chips."""
    pytest.importorskip(COMPILERS['tpu'])
    flags = ('--topology=v5e:2x2', '--config.mesh.fsdp=2', '--price=1.2')
    flags += (f'--figure={folder / "plan.html"}',)
    return write_plan(folder, *flags, '--config.model.dtype=bfloat16')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('plan')


@pytest.mark.full
def test_tpu_plan_has_memory_collectives_and_time(folder):
    """The parts add up: memory by kind, rounds of the loop over layers, the bound, the price."""
    printed, _, plan = plan_tpus(folder)
    assert plan['fits'] and plan['chips'] == 4 and plan['mesh'] == 'data=2 fsdp=2'
    assert plan['kernels']['attention'] == 'splash' and plan['dtype'] == 'bfloat16'
    assert sum(plan['memory'].values()) == plan['memory_needed'] < plan['memory_there']
    parameters = plan['memory']['parameters']
    assert (
        parameters * 1.9 < 4 * plan['parameters'] < 2 * parameters
    )  # small parameters are replicated
    by_kind = {collective['kind']: collective for collective in plan['collectives']}
    assert by_kind['all-gather']['number'] >= 2 * 3 * 6  # six matrices, of three layers, twice
    assert plan['step_seconds'] == plan['operation_seconds'] + plan['waiting_seconds']
    assert plan['waiting_seconds'] == sum(
        collective['waiting'] for collective in plan['collectives']
    )
    hidden, exposed = plan['step_seconds_hidden'], plan['step_seconds_exposed']
    assert hidden < plan['step_seconds'] < exposed  # a v5e hides some of its gathers
    assert plan['operation_seconds'] >= max(plan['compute_seconds'], plan['memory_seconds'])
    assert 0 < plan['mfu_exposed'] < plan['mfu'] < plan['mfu_hidden'] <= plan['mfu_bound'] < 1
    bound = max(plan['bound_operation_seconds'], plan['link_seconds'])
    assert plan['bound_seconds'] == bound <= hidden
    assert plan['bound_operation_seconds'] < plan['operation_seconds']  # heads of 64
    assert plan['compute_seconds'] > plan['flops'] / plan['rates']['flops']
    peak_seconds = plan['model_flops'] / plan['devices'] / plan['rates']['flops']
    assert plan['mfu_bound'] == pytest.approx(peak_seconds / bound)
    assert plan['ratio']['chip'] == 'v5e'
    predicted = plan['ratio']['value'] * plan['step_seconds']
    assert plan['predicted_seconds'] == pytest.approx(predicted)
    hours = plan['steps'] * plan['step_seconds'] * 4 / 3600
    assert plan['cost'] == pytest.approx(1.2 * hours)
    phrases = (
        'memory per device: ',
        'all-gather: ',
        'ms waiting',
        'kernels: attention=splash ',
        '; bfloat16 matmuls',
        'lower bound: ',
        'if masked token pairs count',
        'communication not hidden: ',
        'predicted: ',
    )
    for words in (*phrases, 'chip-hours, cost ', 'not included: '):
        assert words in printed
    assert 'kernels: attention=splash ' in (folder / 'plan.html').read_text()


@pytest.mark.full
def test_plan_counts_model_products(folder):
    """6 N and attention's with all pairs of tokens, not half of them, and RoPE's."""
    *_, plan = plan_tpus(folder)
    config = resolve(tiny_raw(TINY))
    learner = build_learner(config, *nominal_vocabulary(config), 'cpu')
    exact = flops_per_token(learner) * 32 * 128 / 4
    model, width = config.model, config.head_dim
    heads = model.n_heads + model.n_kv_heads  # each rotated by H x H, and so is its gradient
    rope_flops = 2 * 2 * width**2 * heads * model.n_layers * 32 * 128 / 4
    assert exact < plan['flops'] - rope_flops < 1.2 * exact
    assert plan['model_flops'] == pytest.approx(4 * exact)
    in_full = 4 * exact + 32 * 128 * 12 * 3 * 128 * 128 / 2  # the other half of the pairs
    assert plan['model_flops_in_full'] == pytest.approx(in_full)
    share = plan['model_flops_in_full'] / plan['model_flops']
    assert plan['mfu_in_full'] == pytest.approx(share * plan['mfu'])


@pytest.mark.full
def test_compiling_for_tpus_is_quiet(folder):
    """Prints only the compile time: libtpu complains at length if it finds no TPU."""
    _, noise, _ = plan_tpus(folder)
    assert not [line for line in noise.splitlines() if not line.startswith('compiling for v5e:')]


@pytest.mark.full
def test_gpu_step_launches_few_kernels(tmp_path):
    """124M parameters in documents, 8 rows of 8,192: 2,559 launches; 660,406 with blocked
    attention, whose tiles take about thirteen each.

    `auto` selects this kernel on a GPU. A plan needs no cuDNN, and knows all of its calls.
    """
    pytest.importorskip(COMPILERS['gpu'])
    flags = ('--config=configs/llama_124m.py', '--topology=h200:1', '--config.data.batch_size=8')
    printed, _, plan = write_plan(tmp_path, *flags, changes={})
    assert 1000 < plan['launches'] < 3000
    assert f'launches: {plan["launches"]:,} kernels' in printed
    assert not plan['unknown']
    assert 1 < plan['flops'] / plan['model_flops'] < 1.1  # attention's forward runs once


@pytest.mark.full
def test_local_devices_exchange_without_known_links(tmp_path):
    """Catches a plan that asks the local devices for the speed of their links, or calls them
    chips.
    """
    flags = ('--topology=here', '--config.mesh.fsdp=2', '--config.mesh.tensor=2')
    printed, _, plan = write_plan(tmp_path, *flags, XLA_FLAGS=EIGHT_DEVICES)
    assert {'all-gather', 'all-reduce'} <= {row['kind'] for row in plan['collectives']}
    assert plan['link_seconds'] == plan['waiting_seconds'] == 0.0
    assert printed.startswith('here: 8 devices, mesh data=2 fsdp=2 tensor=2; ')
    assert 'device-hours' in printed and 'NOTE: the links between these devices' in printed


@pytest.mark.full
def test_sweep_plan_groups_by_program(tmp_path):
    """Two programs of two runs each, on one local device."""
    sweep = "{'model.norm': ('rmsnorm', 'layernorm'), 'train.seed': (0, 1)}"
    flags = ('--topology=here', f'--config.sweep={sweep}', '--config.model.n_layers=1')
    printed, progress, plan = write_plan(tmp_path, *flags)
    assert 'program 2 of 2, model.norm=layernorm: 2 of 2 runs fit a device' in progress
    assert [(group['name'], group['runs']) for group in plan['groups']] == [
        ('model.norm=rmsnorm', 2),
        ('model.norm=layernorm', 2),
    ]
    assert all(group['a_device'] == 2 for group in plan['groups'])
    estimates = [group['estimate'] for group in plan['groups']]
    assert all(
        estimate['runs'] == 2 and estimate['tokens'] == 2 * 32 * 128 for estimate in estimates
    )
    hours = sum(estimate['steps'] * estimate['step_seconds'] / 3600 for estimate in estimates)
    assert plan['chip_hours'] == pytest.approx(hours) == pytest.approx(plan['hours'])
    assert plan['runs'] == 4 and plan['at_once'] == 2
    assert '4 runs in 2 programs' in printed
    assert printed.count('kernels: ') == 1  # both programs have the same


@pytest.mark.full
def test_tuned_plan_counts_waves(tmp_path):
    small = TINY | {'model.d_model': 32, 'model.d_ff': 32, 'data.seq_len': 32}
    tune = "--config.tune={'optim.lr': None, 'budget': 20}"
    flags = ('--topology=here', '--config.model.n_layers=1', tune)
    printed, _, plan = write_plan(tmp_path, *flags, changes=small)
    assert plan['runs'] == 5 and plan['waves'] == [3, 4]
    words = '1 arm, at least 15 runs per arm (usually 20): 3 to 4 waves'
    assert words in printed and 'one wave, 5 runs per arm: 5 runs in 1 program on here' in printed


@pytest.mark.full
def test_search_prints_full_table_and_figure(tmp_path):
    figure = tmp_path / 'plan.svg'
    flags = ('--topology=here', '--search', '--tries=1', '--config.model.n_layers=1')
    printed, _, plan = write_plan(tmp_path, *flags, f'--figure={figure}', COLUMNS='80')
    heading, *rows, kernels = printed.splitlines()
    assert heading.split()[-2:] == ['limited', 'by'] and '…' not in printed
    assert {row.split()[1] for row in rows} == {'microbatches=1', 'microbatches=2'}
    assert len(plan['tried']) == 2
    assert kernels.startswith('kernels: attention=') and kernels.endswith('; float32 matmuls')
    assert 'microbatches=2' in figure.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    'flags, message',
    [
        (('--topology=v5p-x',), 'Did you mean v5p:4x4x4?'),
        (('--topology=here', '--config.mesh.fsdp=64'), 'mesh.fsdp must be between 1 and'),
        (('--topology=here', '--out=no_folder/plan.json'), 'but there is no folder no_folder'),
        (('--topology=here', '--out=tests'), '--out must be a file in a folder that exists'),
        (('--topology=here', '--out=gs://b/plan.json'), 'must be a path on this machine'),
        (('--topology=here', '--figure=plan.pdf'), '--figure must end in .html, .png, .svg'),
        (('--topology=here', '--figure=gs://b/plan.png'), 'must be a path on this machine'),
        (('--topology=here', '--price=nan'), '--price must be a finite number; got nan'),
        (
            ('--topology=here', '--search', "--config.sweep={'train.seed': (0, 1)}"),
            '--search plans a single run, but the config has config.sweep',
        ),
    ],
    ids=str,
)
def test_bad_input_prints_one_line(flags, message):
    status, _, error = run_plan(*flags)
    assert status == 1
    assert message in error and len(error.strip().splitlines()) == 1
