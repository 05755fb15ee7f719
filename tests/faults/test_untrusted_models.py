"""A model from a stranger: import-hf reads it or refuses it with one line, and never blocks.

`tests.hostile_models` has the ways to spoil a model.
"""

import contextlib
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest

from configs import default
from eval.convert.import_hf import import_folder, write_run
from lm.data import tokenizers
from tests import hostile_models
from tests.faults.test_untrusted import MOST_SEC, ReaderTimeout

MOST_MEMORY = 2 << 30  # bytes beside those that the process has: one kind has a file of 8 GB
MOST_CHARACTERS = 3000  # of an error
KINDS = hostile_models.kinds()
PARTS = 16
# One of each sort, none of which compiles a program.
FEW = [name for name, kind in KINDS.items() if not kind.imports][::15]


def base():
    raw = default.get_config().to_dict()
    raw['model'] |= {'scan_layers': True}  # compiles one layer
    return raw


@pytest.fixture(scope='module')
def sound_models(tmp_path_factory):
    """Returns a folder of a family that imports. It is written on first use."""
    folder = tmp_path_factory.mktemp('sound')

    def write(case):
        if not (folder / case).exists():
            hostile_models.write_model(folder / case, case)
        return folder / case

    return write


@contextlib.contextmanager
def limit_resources():
    """Limits the memory and the time of the block. Raises ReaderTimeout after MOST_SEC."""

    def alarm(*_):
        raise ReaderTimeout

    status = Path('/proc/self/status')
    held = re.search(r'VmData:\s+(\d+) kB', status.read_text() if status.exists() else '')
    limits_before, previous_handler = (
        resource.getrlimit(resource.RLIMIT_DATA),
        signal.signal(signal.SIGALRM, alarm),
    )
    if held:  # elsewhere memory has no limit here
        resource.setrlimit(
            resource.RLIMIT_DATA, (1024 * int(held[1]) + MOST_MEMORY, limits_before[1])
        )
    signal.alarm(MOST_SEC)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
        resource.setrlimit(resource.RLIMIT_DATA, limits_before)


def outcome(name: str, kind: hostile_models.Kind, folder: Path) -> str:
    """Returns '' for a clear refusal, or for an allowed import; else a description of the
    failure.
    """
    workdir = folder.with_name('out')
    try:
        with limit_resources():
            imported = import_folder(folder, base(), workdir)
            if 'config.json: ' not in name and not name.startswith(hostile_models.FAMILIES):
                write_run(folder, workdir, imported)
                tokenizers.load(workdir / 'tokenizer')
    except (ValueError, OSError) as error:
        message = str(error)
        if lacking := [word for word in kind.words if word not in message]:
            return f'it says nothing of {lacking}: {message[:300]}'
        if '\n' in message or not message.isprintable() or len(message) > MOST_CHARACTERS:
            return f'a refusal of many lines, or of other characters: {message[:300]!r}'
        return ''
    except ReaderTimeout:
        return 'it waits'
    except BaseException as error:  # a library that panics raises no Exception
        return f'{type(error).__name__}: {str(error)[:300]}'
    return '' if kind.imports else 'it is imported'


def try_kinds(names, sound_models, tmp_path):
    wrong = []
    for name in names:
        kind, folder = KINDS[name], tmp_path / 'given'
        shutil.copytree(sound_models(kind.case), folder)
        kind.spoil(folder)
        if failure := outcome(name, kind, folder):
            wrong.append(f'{name}: {failure}')
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
    assert not wrong, '\n'.join([f'{len(wrong)} of {len(names)}:', *wrong])


def test_some_spoiled_folders_are_refused(sound_models, tmp_path):
    """Catches a field whose type is not checked, a size that is allocated before it is compared,
    and a pipe that is opened as a file.
    """
    try_kinds(FEW, sound_models, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('part', range(PARTS))
def test_spoiled_folders_are_refused_or_imported(sound_models, tmp_path, part):
    try_kinds([*KINDS][part::PARTS], sound_models, tmp_path)


@pytest.mark.default_rows('llama3')
@pytest.mark.parametrize('case', hostile_models.FAMILIES)
def test_sound_folders_are_imported(sound_models, tmp_path, case):
    """Otherwise each spoiled folder could be refused for another reason."""
    import_folder(sound_models(case), base(), tmp_path / 'out')
