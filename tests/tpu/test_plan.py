"""The command: what it says of the devices at hand, of TPUs by their compiler, and of bad input."""

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


def planned(*flags, changes=TINY, **environment):
    """(exit status, stdout, stderr)."""
    config = () if any(flag.startswith('--config=') for flag in flags) else (DEFAULT,)
    command = [sys.executable, '-m', 'tpu.plan', *config]
    command += [f'--config.{path}={value}' for path, value in changes.items()]
    done = subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env=os.environ | {'XLA_FLAGS': ''} | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout, done.stderr


def written(folder, *flags, **how):
    """(stdout, stderr, what it writes) of a plan that fits."""
    out = folder / 'plan.json'
    status, printed, noise = planned(*flags, f'--out={out}', **how)
    assert status == 0, noise
    return printed, noise, json.loads(out.read_text())


@functools.cache
def of_tpus(folder):
    """`written` of four chips."""
    pytest.importorskip(COMPILERS['tpu'])
    flags = ('--topology=v5e:2x2', '--config.mesh.fsdp=2', '--price=1.2')
    return written(folder, *flags, '--config.model.dtype=bfloat16')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('plan')


@pytest.mark.full
def test_a_plan_of_tpus_has_memory_collectives_and_time(folder):
    """Its parts add up: memory by kind, rounds of the loop over layers, the bound, the price."""
    printed, _, found = of_tpus(folder)
    assert found['fits'] and found['chips'] == 4 and found['mesh'] == 'data=2 fsdp=2'
    assert sum(found['memory'].values()) == found['memory_needed'] < found['memory_there']
    parameters = found['memory']['parameters']
    assert parameters * 1.9 < 4 * found['parameters'] < 2 * parameters  # small ones are whole
    sent = {one['kind']: one for one in found['collectives']}
    assert sent['all-gather']['number'] >= 2 * 3 * 6  # six matrices, of three layers, twice
    assert found['step_seconds'] == found['operation_seconds'] + found['waiting_seconds']
    assert found['waiting_seconds'] == sum(one['waiting'] for one in found['collectives'])
    hidden, exposed = found['step_seconds_hidden'], found['step_seconds_exposed']
    assert hidden < found['step_seconds'] < exposed  # a v5e hides some of its gathers
    assert found['operation_seconds'] >= max(found['compute_seconds'], found['memory_seconds'])
    assert 0 < found['mfu_exposed'] < found['mfu'] < found['mfu_hidden'] <= found['mfu_bound'] < 1
    bound = max(found['bound_operation_seconds'], found['link_seconds'])
    assert found['bound_seconds'] == bound <= hidden
    assert found['bound_operation_seconds'] < found['operation_seconds']  # heads of 64
    assert found['compute_seconds'] > found['flops'] / found['rates']['flops']
    least = found['model_flops'] / found['devices'] / found['rates']['flops']
    assert found['mfu_bound'] == pytest.approx(least / bound)
    assert found['ratio']['chip'] == 'v5e'
    predicted = found['ratio']['value'] * found['step_seconds']
    assert found['predicted_seconds'] == pytest.approx(predicted)
    hours = found['steps'] * found['step_seconds'] * 4 / 3600
    assert found['cost'] == pytest.approx(1.2 * hours)
    said = ('GiB a device', 'all-gather: ', 'ms of waiting', 'at most', 'with all pairs of tokens')
    for words in (*said, 'if nothing hid them', 'predicted: ', 'chip-hours', 'left out: '):
        assert words in printed


@pytest.mark.full
def test_products_of_a_plan_are_those_of_the_model(folder):
    """6 N and attention's, of all pairs of tokens here and not of half of them, and RoPE's."""
    *_, found = of_tpus(folder)
    config = resolve(tiny_raw(TINY))
    learner = build_learner(config, *nominal_vocabulary(config), 'cpu')
    exact = flops_per_token(learner) * 32 * 128 / 4
    model, width = config.model, config.head_dim
    heads = model.n_heads + model.n_kv_heads  # each turned by H x H, and so is its gradient
    turned = 2 * 2 * width**2 * heads * model.n_layers * 32 * 128 / 4
    assert exact < found['flops'] - turned < 1.2 * exact
    assert found['model_flops'] == pytest.approx(4 * exact)
    in_full = 4 * exact + 32 * 128 * 12 * 3 * 128 * 128 / 2  # the other half of the pairs
    assert found['model_flops_in_full'] == pytest.approx(in_full)
    share = found['model_flops_in_full'] / found['model_flops']
    assert found['mfu_in_full'] == pytest.approx(share * found['mfu'])


@pytest.mark.full
def test_compiling_for_tpus_is_quiet(folder):
    """Nothing but how long it takes: libtpu complains at length where it finds no TPU."""
    _, noise, _ = of_tpus(folder)
    assert not [said for said in noise.splitlines() if not said.startswith('compiling for v5e:')]


@pytest.mark.full
def test_a_step_for_a_gpu_starts_few_kernels(tmp_path):
    """124M parameters in documents, 8 rows of 8,192: 2,559; 660,406 with blocked attention, whose
    tiles are some thirteen each. The kernel is what `auto` is there. A plan needs no cuDNN, and
    knows all of its calls.
    """
    pytest.importorskip(COMPILERS['gpu'])
    flags = ('--config=configs/llama_124m.py', '--topology=h200:1', '--config.data.batch_size=8')
    printed, _, found = written(tmp_path, *flags, changes={})
    assert 1000 < found['launches'] < 3000
    assert f'launches: {found["launches"]:,} kernels' in printed
    assert not found['unknown']
    assert 1 < found['flops'] / found['model_flops'] < 1.1  # attention's forward runs once


@pytest.mark.full
def test_a_sweep_is_planned_by_programs_and_runs_a_device(tmp_path):
    """Two programs of two runs each, on the one device at hand."""
    sweep = "{'model.norm': ('rmsnorm', 'layernorm'), 'train.seed': (0, 1)}"
    flags = ('--topology=here', f'--config.sweep={sweep}', '--config.model.n_layers=1')
    printed, _, found = written(tmp_path, *flags)
    assert [(group['name'], group['runs']) for group in found['groups']] == [
        ('model.norm=rmsnorm', 2),
        ('model.norm=layernorm', 2),
    ]
    assert all(group['a_device'] == 2 for group in found['groups'])
    own = [group['estimate'] for group in found['groups']]
    assert all(one['runs'] == 2 and one['tokens'] == 2 * 32 * 128 for one in own)
    hours = sum(one['steps'] * one['step_seconds'] / 3600 for one in own)
    assert found['chip_hours'] == pytest.approx(hours) == pytest.approx(found['hours'])
    assert found['runs'] == 4 and found['at_once'] == 2
    assert '4 runs in 2 programs' in printed


@pytest.mark.full
def test_a_tuned_sweep_is_planned_by_waves(tmp_path):
    small = TINY | {'model.d_model': 32, 'model.d_ff': 32, 'data.seq_len': 32}
    tune = "--config.tune={'optim.lr': None, 'budget': 20}"
    flags = ('--topology=here', '--config.model.n_layers=1', tune)
    printed, _, found = written(tmp_path, *flags, changes=small)
    assert found['runs'] == 5 and found['waves'] == [3, 4]
    words = '1 arm of 15 runs at least, 20 as a rule: 3 to 4 such waves'
    assert words in printed and 'a wave, 5 runs of each arm: 5 runs in 1 programs' in printed


@pytest.mark.full
def test_a_search_is_a_table_that_nothing_is_cut_of_and_a_picture(tmp_path):
    figure = tmp_path / 'plan.svg'
    flags = ('--topology=here', '--search', '--tries=1', '--config.model.n_layers=1')
    printed, _, found = written(tmp_path, *flags, f'--figure={figure}', COLUMNS='80')
    heading, *rows = printed.splitlines()
    assert heading.split()[-2:] == ['bound', 'by'] and '…' not in printed
    assert {row.split()[1] for row in rows} == {'microbatches=1', 'microbatches=2'}
    assert len(found['tried']) == 2
    assert 'microbatches=2' in figure.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    'flags, said',
    [
        (('--topology=v5p-x',), 'Did you mean v5p:4x4x4?'),
        (('--topology=here', '--config.mesh.fsdp=64'), 'mesh.fsdp must be between 1 and'),
        (('--topology=here', '--figure=plan.pdf'), '--figure ends in .html, .png, .svg; got'),
    ],
    ids=str,
)
def test_bad_input_is_one_line(flags, said):
    status, _, error = planned(*flags)
    assert status == 1
    assert said in error and len(error.strip().splitlines()) == 1
