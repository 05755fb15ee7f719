"""Steps of a program before it imports JAX."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from absl import flags

import train
from lm.launch import before_jax
from tests import ROOT
from tests.programs import COMPILERS


def test_programs_prepare_before_importing_jax():
    """Catches a package that imports JAX when `python -m PACKAGE` imports it first: the program
    would read the flags too early, and import everything twice.
    """
    programs = [path for path in ROOT.glob('eval/**/*.py') if 'prepare_process' in path.read_text()]
    assert len(programs) > 4
    packages = {'.'.join(path.relative_to(ROOT).parts[:-1]) for path in programs}
    names = ', '.join(sorted(packages))
    code = f'import sys, {names}, lm.launch.before_jax; print("jax" in sys.modules)'
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == 'False\n'


def test_help_lists_flags_without_importing_jax():
    code = (
        'import runpy, sys\nsys.argv = ["train.py", "--help"]\ntry:\n'
        '    runpy.run_path("train.py", run_name="__main__")\nfinally:\n'
        '    print("jax" in sys.modules)'
    )
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert imported == 'False' and len(lines) <= 24 and max(map(len, lines)) <= 100
    key_flags = [*flags.FLAGS.get_key_flags_for_module(train), flags.FLAGS['process_id']]
    assert {'config', 'workdir', 'engine'} <= {flag.name for flag in key_flags}
    assert not [flag.name for flag in key_flags if f'--{flag.name}' not in done.stdout]


@pytest.mark.parametrize(
    ('is_there', 'chosen', 'expected'),
    [(False, None, 'cpu'), (False, 'tpu', None), (True, None, None)],
)
def test_choose_platform_with_jax_imported(monkeypatch, is_there, chosen, expected):
    """A notebook has imported it. Catches an ignored choice of the user, or an ignored device."""
    updates, environment = [], {}
    config = SimpleNamespace(jax_platforms=chosen, update=lambda *pair: updates.append(pair))
    monkeypatch.setattr(os, 'environ', environment)
    monkeypatch.setattr(before_jax, 'has_accelerator', lambda: is_there)
    monkeypatch.setitem(sys.modules, 'jax', SimpleNamespace(config=config))
    before_jax.choose_platform()
    assert updates == ([('jax_platforms', expected)] if expected else [])
    assert ('JAX_PLATFORMS' in environment) != is_there


@pytest.mark.parametrize(
    ('environment', 'threads'),
    [
        ({}, None),
        ({'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}, None),
        ({'XLA_FLAGS': '--xla_dump_to=x --xla_force_host_platform_device_count=8'}, '128'),
        ({'JAX_NUM_CPU_DEVICES': '4'}, '64'),
        ({'JAX_NUM_CPU_DEVICES': '4', 'NPROC': '3'}, '3'),
    ],
)
def test_virtual_devices_have_threads_for_collectives(monkeypatch, environment, threads):
    """Each device has 16 threads; NPROC of the user stays."""
    monkeypatch.setattr(os, 'environ', environment)
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    before_jax.add_threads_for_collectives()
    assert environment.get('NPROC') == threads


@pytest.mark.parametrize(
    ('installed', 'chosen', 'message'),
    [
        ((), '', 'an NVIDIA GPU, .*uv sync --extra cuda'),
        (('libtpu',), '', 'an NVIDIA GPU, .*uv sync --extra cuda'),
        (('jax_cuda12_plugin',), '', '$'),
        ((), 'cpu', '$'),
    ],
)
def test_unusable_gpu_is_reported_with_extra(monkeypatch, installed, chosen, message):
    device_files = {'/dev/nvidia[0-9]*': ['/dev/nvidia0']}
    monkeypatch.setattr(before_jax.glob, 'glob', lambda files: device_files.get(files, []))
    monkeypatch.setattr(before_jax.importlib.util, 'find_spec', lambda n: n in installed or None)
    monkeypatch.setenv('JAX_PLATFORMS', chosen)
    assert re.match(f'(this machine has )?{message}', before_jax.missing_plugin_advice())


@pytest.mark.parametrize(
    ('files', 'installed', 'chosen', 'expected'),
    [
        ('/dev/nvidia[0-9]*', 'jax_cuda13_plugin', '', 'bfloat16'),
        ('/dev/vfio/[0-9]*', 'libtpu', '', 'bfloat16'),
        ('/dev/nvidia[0-9]*', 'jax_cuda13_plugin', 'cpu', 'float32'),
        ('/dev/nvidia[0-9]*', 'libtpu', '', 'float32'),
        ('/dev/dxg', '', '', 'float32'),
        ('', 'libtpu', '', 'float32'),
        ('', '', 'tpu,cpu', 'bfloat16'),
    ],
)
def test_default_dtype_suits_device(monkeypatch, files, installed, chosen, expected):
    monkeypatch.setattr(
        before_jax.glob, 'glob', lambda pattern: [pattern] if pattern == files else []
    )
    monkeypatch.setattr(before_jax.platform, 'system', lambda: 'Linux')
    monkeypatch.setattr(before_jax.importlib.util, 'find_spec', lambda n: n == installed or None)
    monkeypatch.setenv('JAX_PLATFORMS', chosen)
    assert before_jax.default_dtype() == expected


@pytest.mark.full
@pytest.mark.skipif(before_jax.has_accelerator(), reason='has a device that is looked for')
@pytest.mark.parametrize('names', ['eval.load, jax', 'jax, eval.load'])
def test_notebook_gets_no_device_warnings(names):
    """Catches libtpu's warnings when it looks for a TPU."""
    pytest.importorskip(COMPILERS['tpu'])
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
    command = [sys.executable, '-c', f'import {names}; print(jax.devices()[0].platform)']
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ('cpu\n', '')
