"""`tests.bench.accelerator`: rows that crash, hang or are interrupted are recorded once; a step
needs few packages; the rehearsal.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest

from modules.kernels.attention import Scores
from tests import ROOT
from tests.bench import accelerator, accelerator_rows
from tests.bench.accelerator import MORE, Command, Journal, table

# A child of two groups; in the first, a row does the test's action.
CHILD = """
import json, os, sys, time
group = sys.argv[1].partition('=')[2]
tell = lambda entry: print(json.dumps(entry), flush=True)
if group == 'machine':
    tell({'device': 'card', 'platform': 'gpu', 'driver': '1', 'versions': {}, 'python': '3',
          'begun': '', 'groups': ['one', 'two']})
    sys.exit()
ended = json.load(sys.stdin)
for row in ('a', 'b', 'c'):
    if f'{group}: {row}' not in ended:
        tell({'row': row, 'ended': False})
        if (group, row) == ('one', 'b'):
            print('last words', file=sys.stderr, flush=True)
            ACT
        tell({'row': row, 'ended': True, 'ms': 1.5})
"""
HANGS = 'time.sleep(60)'
ENOUGH = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'ml-collections')
PLUGINS = ('libtpu', 'jax-cuda13-plugin', 'jax-cuda13-pjrt')


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Returns call(act, hook(command, entry)) -> (exit status, {(group, row): ended entry}).

    hook: is called with each new entry of the journal.
    """

    def run(act, hook=None):
        script = tmp_path / 'child.py'
        script.write_text(CHILD.replace('ACT', act))
        monkeypatch.setattr(accelerator, 'CHILD', [sys.executable, str(script)])
        command = Command(tmp_path, 5, False, None)
        if hook is not None:
            add = command.journal.add
            command.journal.add = lambda entry: (add(entry), hook(command, entry))
        status = command.run()
        ended = [entry for entry in Journal(tmp_path).entries if entry.get('ended')]
        rows = {(entry['group'], entry['row']): entry for entry in ended}
        assert len(rows) == len(ended), 'a row is there twice'
        return status, rows

    return run


def end_time(command, entry):
    """Ends the time once the row has begun."""
    if entry.get('row') == 'b':
        command.deadline = 0


ALL = {(group, row) for group in ('one', 'two') for row in 'abc'}


def test_rows_are_measured_once(call):
    for _ in range(2):
        status, rows = call('pass')
        assert status == 0 and rows.keys() == ALL
        assert all(entry['ms'] == 1.5 for entry in rows.values())


def test_crashed_row_has_reason(call, tmp_path):
    status, rows = call('os.kill(os.getpid(), 9)')
    assert status == 0 and rows.keys() == ALL
    failed = [key for key, entry in rows.items() if 'failed' in entry]
    assert failed == [('one', 'b')]
    reason = 'its process ended with status -9: last words'
    assert rows['one', 'b']['failed'] == reason
    assert f'- {reason}: b' in list(table(Journal(tmp_path).entries))


def test_hanging_row_is_abandoned(call, monkeypatch):
    def limit(command, entry):
        last = entry.get('row') == 'b' and not entry['ended']
        monkeypatch.setattr(accelerator, 'ROW_SECONDS', 0.1 if last else 60)

    status, rows = call(HANGS, limit)
    assert status == 0 and rows.keys() == ALL
    assert rows['one', 'b']['failed'] == 'it took longer than 0 s'


def test_call_ends_in_time_and_next_resumes(call):
    """A third call gives up the row that two calls could not finish."""
    for _ in range(2):
        status, rows = call(HANGS, end_time)
        assert status == MORE and rows.keys() == {('one', 'a')}
    status, rows = call(HANGS)
    assert status == 0 and rows.keys() == ALL
    assert rows['one', 'b']['failed'] == 'it began in two calls, and ended in none'


def test_interrupted_row_is_measured_by_next_call(call):
    call(HANGS, end_time)
    assert call('pass')[1]['one', 'b']['ms'] == 1.5


def test_rows_from_two_devices_do_not_mix(call, tmp_path, capsys):
    Journal(tmp_path).add({'device': 'another'})
    assert call('pass') == (1, {})
    assert 'are of another, and this is card: give another --out' in capsys.readouterr().err


@pytest.mark.default_rows('10')
@pytest.mark.parametrize('window', [9, 10])
def test_kernel_off_by_one_token_does_not_agree(window, monkeypatch):
    attend_right = accelerator_rows.attend

    def attend(name, q, k, v, scores, *arrays):
        assert scores.window == 9
        return attend_right(name, q, k, v, Scores(window=window), *arrays)

    monkeypatch.setattr(accelerator_rows, 'attend', attend)
    options = {'asked': {'window': 9}, 'documents': True}
    row = accelerator_rows.attention('reference', 65, (2, 1, 8), 'float32', **options)
    assert row['agrees'] == (window == 9)


def test_cpu_is_added_to_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
    environments = [Command(tmp_path, 1, tiny, None).environment('steps') for tiny in (False, True)]
    assert [environment['JAX_PLATFORMS'] for environment in environments] == ['cuda,cpu', 'cpu']


def restrict_packages(folder):
    """Returns the environment of a process that can import only ENOUGH and their dependencies."""
    allowed, pending = set(), {*ENOUGH, *PLUGINS}
    while pending:
        name = pending.pop()
        allowed.add(name)
        try:
            needs = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        names = (re.match(r'[\w.-]+', need)[0] for need in needs if 'extra ==' not in need)
        pending |= {re.sub(r'[-_.]+', '-', name).lower() for name in names} - allowed
    refused = {
        top
        for top, packages in metadata.packages_distributions().items()
        if not allowed & {re.sub(r'[-_.]+', '-', name).lower() for name in packages}
        and not (ROOT / top).is_dir()
    }
    (folder / 'sitecustomize.py').write_text(
        f'import sys\nREFUSED = {refused}\n\n\nclass Finder:\n'
        '    def find_spec(name, path, target=None):\n'
        '        if name.partition(".")[0] in REFUSED:\n'
        '            raise ModuleNotFoundError(f"refused: {name}")\n\n\n'
        'sys.meta_path.insert(0, Finder)\n'
    )
    assert {'tensorflow_datasets', 'grain', 'tokenizers', 'tensorboardX', 'pandas'} <= refused
    return os.environ | {'PYTHONPATH': f'{folder}:{ROOT}', 'JAX_PLATFORMS': 'cpu'}


@pytest.mark.full
def test_step_needs_few_packages(tmp_path):
    """No group has two rows of the same name, which a call would confuse."""
    program = (
        'from tests.bench import accelerator_rows as rows\n'
        "recipe = rows.build_recipe('default', True)\n"
        "rows.build_blueprint(recipe, rows.open_topology('here'), print)\n"
        'for tiny in (False, True):\n'
        '    for group in rows.GROUPS:\n'
        '        names = [row.name for row in rows.list_rows(group, tiny)]\n'
        '        assert names and len({*names}) == len(names), names\n'
    )
    command = [sys.executable, '-c', program]
    subprocess.run(command, env=restrict_packages(tmp_path), cwd=ROOT, check=True)


@pytest.mark.full
def test_rehearsal_resumes_after_stop(tmp_path):
    """The rehearsal is stopped when its second row appears."""
    folder, groups = (
        tmp_path / 'out',
        ('norms, softmax and loss against float64', 'share of a copy'),
    )
    command = [*accelerator.CHILD, f'--out={folder}', '--tiny', '--groups=norms,share']
    process_options = {'env': restrict_packages(tmp_path), 'cwd': ROOT, 'text': True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **process_options) as first:
        first.stdout.readline()
        first.stdout.readline()
        first.terminate()
    before = Journal(folder).ended_rows()
    assert 2 <= len(before) < 36
    subprocess.run(command, check=True, **process_options)
    entries = [entry for entry in Journal(folder).entries if entry.get('ended')]
    assert len(entries) == len(Journal(folder).ended_rows()) == 36
    assert not [entry for entry in entries if 'failed' in entry]
    assert all(entry['agrees'] for entry in entries if entry['group'] == groups[0])
    process = subprocess.run(
        [*command, '--table'], check=True, stdout=subprocess.PIPE, **process_options
    )
    lines = process.stdout.splitlines()
    assert '### Norms, softmax and loss against float64' in lines
    assert '| row | error | bound | agrees |' in lines
    assert sum(line.startswith('| rms_norm both, pallas: 5 x 131') for line in lines) == 2
    assert json.loads((folder / 'rows.jsonl').read_text().splitlines()[0])['platform'] == 'cpu'
