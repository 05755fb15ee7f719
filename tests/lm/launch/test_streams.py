"""Property: what cannot be printed is dropped, and a program ends as it should: by its work."""

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
    """stream_to(descriptor): a text stream as `open_streams` makes it, over a copy of it."""
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
    """The end of a pipe whose reader has left."""
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
def test_a_program_that_outlives_its_output_says_once_why_it_is_gone(
    kind, request, stream_to, capfd
):
    stream = stream_to(request.getfixturevalue(kind))
    streams.ignore_output_loss()
    for _ in range(3):
        print('x' * 100_000, file=stream, flush=True)
    why = {'unread': 'Broken pipe', 'full_disk': 'No space left on device'}[kind]
    assert streams.output_loss() == why
    assert re.fullmatch(rf'NOTE: standard output is gone \({why}\).*\n', capfd.readouterr().err)
    os.write(stream.fileno(), b'as C++ does, and a child')


@pytest.mark.parametrize(
    ('kind', 'status', 'said'),
    [
        ('unread', NOBODY_READS, ''),
        ('full_disk', BAD_INPUT, 'error: standard output cannot be written: No space left on .*\n'),
    ],
)
def test_a_program_that_prints_an_answer_ends_where_nobody_gets_it(
    kind, status, said, request, stream_to, monkeypatch, capfd
):
    """Also where the text is short, and stays in a buffer until the program is through."""
    monkeypatch.setattr(sys, 'stdout', stream_to(request.getfixturevalue(kind)))
    with pytest.raises(SystemExit) as ended:
        run_main(lambda argv: print('an answer'))(['eval'])
    assert ended.value.code == status
    assert re.fullmatch(said, capfd.readouterr().err)


def test_all_is_written_to_a_pipe_that_is_full_and_does_not_block(stream_to):
    (reader, writer), text = os.pipe(), b'x' * 300_000
    os.set_blocking(writer, False)
    stream = stream_to(writer)
    with ThreadPoolExecutor(1) as pool, open(reader, 'rb') as file:
        found = pool.submit(file.read, len(text))
        stream.write(text.decode())
        stream.flush()
        assert found.result() == text
    os.close(writer)
    assert not streams.output_loss()


def run(code: str, how: str = '{}', **env: str) -> subprocess.CompletedProcess:
    """Runs a program by a shell, which redirects its streams."""
    command = f'set -o pipefail; {how.format(f'"{sys.executable}" -c "$CODE"')}'
    given = {'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT), 'CODE': PREPARE + code} | env
    return subprocess.run(['bash', '-c', command], capture_output=True, env=given)


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&-', '<&- >&- 2>&-'])
def test_a_closed_stream_is_the_null_device_for_libraries_and_children_too(closed, tmp_path):
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
def test_the_end_of_a_process_prints_no_exception_of_its_streams(size, status, unread):
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
def test_what_an_encoding_lacks_is_escaped_and_files_are_utf_8(env, expected, tmp_path):
    code = (
        'print(chr(0x2014))\nfrom pathlib import Path\n'
        f'Path("{tmp_path}/file").write_text(chr(0x2014))\n'
    )
    done = run(code, **env)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f'{expected}\n', b'')
    assert (tmp_path / 'file').read_text(encoding='utf-8') == '—'


def test_docstrings_are_there_for_python_that_strips_them():
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
    """Catches a program that prints a traceback where its reader leaves."""
    programs = [p for p in ROOT.glob('eval/**/*.py') if 'app.run(' in p.read_text()]
    assert len(programs) > 10
    prepares = re.compile(r'\n    (before_jax\.)?prepare_(process|streams)\(\)')
    for path in (*programs, ROOT / 'train.py'):
        assert prepares.search(path.read_text()), path


@pytest.mark.full
@pytest.mark.parametrize(
    'program', ['train.py --choices', '-m eval.rules --parameters=124e6 --tokens=2.5e9']
)
def test_programs_whose_reader_leaves_say_nothing(program, unread):
    done = subprocess.run(
        [sys.executable, *program.split()], cwd=ROOT, stdout=unread, stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (NOBODY_READS, b'')


@pytest.mark.full
def test_the_listing_is_the_same_without_docstrings():
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
