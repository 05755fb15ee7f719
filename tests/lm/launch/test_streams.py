"""Property: output that cannot be printed is dropped, and a program's status follows its work."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm.launch import streams
from lm.launch.before_jax import docstring
from lm.launch.command import run_main
from lm.launch.exit_status import BAD_INPUT, SIGNALLED
from tests import ROOT

NOBODY_READS = SIGNALLED + signal.SIGPIPE
PREPARE = 'from lm.launch.before_jax import prepare_streams; prepare_streams()\n'


@pytest.fixture
def stream_to(monkeypatch):
    """stream_to(descriptor) returns a text stream as `open_streams` makes it, over a copy of it."""
    monkeypatch.setattr(streams, '_loss_reason', '')
    monkeypatch.setattr(streams, '_ignores_loss', False)
    opened = []

    def over(descriptor: int):
        before = os.fdopen(os.dup(descriptor), 'w')
        opened.append((before, streams._wrap_text(streams.StandardOutput(before.fileno()), before)))
        return opened[-1][1]

    yield over
    monkeypatch.setattr(streams, '_ignores_loss', True)  # what is left in a buffer ends nothing
    for before, stream in opened:
        stream.close()
        before.close()


@pytest.fixture
def unread():
    """Returns the write end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full_disk():
    descriptor = os.open('/dev/full', os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize('kind', ['unread', 'full_disk'])
def test_lost_output_is_reported_once(kind, request, stream_to, capfd):
    stream = stream_to(request.getfixturevalue(kind))
    streams.ignore_output_loss()
    for _ in range(3):
        print('x' * 100_000, file=stream, flush=True)
    why = {'unread': 'Broken pipe', 'full_disk': 'No space left on device'}[kind]
    assert streams.output_loss() == why
    assert re.fullmatch(rf'NOTE: standard output failed \({why}\).*\n', capfd.readouterr().err)
    os.write(stream.fileno(), b'as C++ does, and a child')


@pytest.mark.parametrize(
    ('kind', 'status', 'message'),
    [
        ('unread', NOBODY_READS, ''),
        ('full_disk', BAD_INPUT, 'error: standard output cannot be written: No space left on .*\n'),
    ],
)
def test_printing_program_exits_without_reader(
    kind, status, message, request, stream_to, monkeypatch, capfd
):
    """A short text stays in a buffer until the program ends."""
    monkeypatch.setattr(sys, 'stdout', stream_to(request.getfixturevalue(kind)))
    with pytest.raises(SystemExit) as ended:
        run_main(lambda argv: print('an answer'))(['eval'])
    assert ended.value.code == status
    assert re.fullmatch(message, capfd.readouterr().err)


def test_full_nonblocking_pipe_gets_all_output(stream_to):
    (reader, writer), text = os.pipe(), b'x' * 300_000
    os.set_blocking(writer, False)
    stream = stream_to(writer)
    with ThreadPoolExecutor(1) as pool, open(reader, 'rb') as file:
        read_text = pool.submit(file.read, len(text))
        stream.write(text.decode())
        stream.flush()
        assert read_text.result() == text
    os.close(writer)
    assert not streams.output_loss()


def run(code: str, shell: str = '{}', **env: str) -> subprocess.CompletedProcess:
    """Runs a program in a shell that redirects its streams."""
    command = f'set -o pipefail; {shell.format(f'"{sys.executable}" -c "$CODE"')}'
    environment = {
        'PATH': os.environ['PATH'],
        'PYTHONPATH': str(ROOT),
        'CODE': PREPARE + code,
    } | env
    return subprocess.run(['bash', '-c', command], capture_output=True, env=environment)


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&-', '<&- >&- 2>&-'])
def test_closed_stream_is_null_device(closed, tmp_path):
    code = (
        f'import os, sys; file = open("{tmp_path}/file", "w"); assert file.fileno() > 2\n'
        'print("out"); print("err", file=sys.stderr)\n'
        'assert not os.system("echo child && echo child >&2")\n'
        'assert sys.stdin.read() == ""\n'
    )
    done = run(code, f'{{}} {closed if "<" in closed else f"{closed} </dev/null"}')
    assert done.returncode == 0, done
    assert (tmp_path / 'file').read_text() == ''


@pytest.mark.parametrize(('size', 'status'), [(1, 0), (100_000, NOBODY_READS)])
def test_exit_prints_no_stream_exception(size, status, unread):
    """Catches 'Exception ignored in' at exit, and the status 120 that comes with it."""
    command = [sys.executable, '-c', f'{PREPARE}print("x" * {size})']
    env = {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, env=env, stdout=unread, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (status, b'')


@pytest.mark.parametrize(
    ('env', 'expected'),
    [
        ({'PYTHONIOENCODING': 'ascii'}, r'\u2014'),
        ({'LC_ALL': 'C', 'PYTHONUTF8': '0'}, r'\u2014'),
        ({'PYTHONIOENCODING': 'latin-1'}, r'\u2014'),
        ({}, '—'),
    ],
)
def test_unencodable_output_is_escaped_in_utf8_mode(env, expected, tmp_path):
    code = (
        'print(chr(0x2014))\nfrom pathlib import Path\n'
        f'Path("{tmp_path}/file").write_text(chr(0x2014))\n'
    )
    done = run(code, **env)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f'{expected}\n', b'')
    assert (tmp_path / 'file').read_text(encoding='utf-8') == '—'


def test_docstrings_survive_optimized_python():
    code = (
        'from lm.launch import before_jax as owner\n'
        'assert owner.__doc__ is None and owner.choose_platform.__doc__ is None\n'
        'names = [owner, owner.choose_platform]\n'
        'import json, lm.launch.exit_status as one; names.append(one.JobEnded)\n'
        'print(json.dumps([*map(owner.docstring, names)]))'
    )
    done = run(code, PYTHONOPTIMIZE='2')
    from lm.launch import before_jax
    from lm.launch.exit_status import JobEnded

    owners = before_jax, before_jax.choose_platform, JobEnded
    assert json.loads(done.stdout) == [*map(docstring, owners)], done.stderr
    assert docstring(JobEnded).startswith('The job is over')


def test_every_program_prepares_its_streams():
    """Catches a program that prints a traceback when its reader leaves."""
    programs = [
        p
        for p in ROOT.glob('eval/**/*.py')
        if re.search(r'(run_program|app\.run)\(', p.read_text())
    ]
    assert len(programs) > 10
    prepares = re.compile(r'\n    (before_jax\.)?prepare_(process|streams)\(\)')
    for path in (*programs, ROOT / 'train.py'):
        assert prepares.search(path.read_text()), path


@pytest.mark.full
@pytest.mark.parametrize(
    'program', ['train.py --choices', '-m eval.rules --parameters=124e6 --tokens=2.5e9']
)
def test_programs_are_silent_when_reader_leaves(program, unread):
    done = subprocess.run(
        [sys.executable, *program.split()], cwd=ROOT, stdout=unread, stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (NOBODY_READS, b'')


@pytest.mark.full
def test_listing_is_equal_without_docstrings():
    listings = [
        subprocess.run(
            [sys.executable, 'train.py', '--choices'],
            cwd=ROOT,
            env=os.environ | {'PYTHONOPTIMIZE': level},
            capture_output=True,
            check=True,
        ).stdout
        for level in ('0', '2')
    ]
    assert listings[0] == listings[1] and listings[0]
