"""A command killed at any of its file events leaves nothing that looks complete but is not.

The files are absent, refused, or complete, and the same command then completes them. Contract: one
row for each kind of writer.
"""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import pytest

from configs import default
from eval.charts import save_chart, write_page
from eval.convert import __main__ as convert
from eval.convert import export_hf, export_peft, import_hf, safetensors
from eval.evaluation import kept
from eval.evaluation.suite_flags import SuiteRequest
from eval.load import load
from eval.suites.base import SuiteResult
from lm.data import open_dataset, prepared
from lm.data.tokenizer_files import FILES_BESIDE
from lm.data.tokenizers import ByteTokenizer
from lm.data.tokenizers import load as load_tokenizer
from lm.inference.load import find_checkpoint
from lm.record.run import Run
from lm.record.workdir import open_workdir
from lm.storage.files import discard_line
from lm.storage.filling import MARK, fill_folder
from lm.study.tables.results import write_table
from tests.commands import tiny
from tests.corpora import write_corpus
from tests.eval.convert.test_hf import base, save_case, with_tokenizer
from tests.killed import kill, list_events

ABSENT, REFUSED, WHOLE = 'absent', 'refused', 'whole'
BESIDE = {
    'chat_template.jinja': '{{ messages }}',
    'generation_config.json': json.dumps({'eos_token_id': 2, 'temperature': 0.6}),
}


@dataclasses.dataclass(frozen=True)
class Writer:
    """command(target): writes a folder or file; state(target): how a reader sees it."""

    command: Callable[[Path], Any]
    state: Callable[[Path], str]


@pytest.fixture(scope='module')
def model_folder(tmp_path_factory):
    """A folder of transformers, with a tokenizer, a chat template and settings."""
    folder = with_tokenizer(save_case(tmp_path_factory.mktemp('hf') / 'llama', 'llama2'))
    assert BESIDE.keys() <= {*FILES_BESIDE}
    for name, text in BESIDE.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope='module')
def run(model_folder, tmp_path_factory):
    """The imported run."""
    target = tmp_path_factory.mktemp('imported') / 'run'
    write_import(model_folder, target)
    return target


def write_import(model_folder, target):
    import_hf.write_run(model_folder, target, import_hf.import_folder(model_folder, base(), target))


def make_run_state(run, beside):
    """Returns state(target) for a workdir that should equal `run`, with some files beside its
    tokenizer.

    A start of training must not accept a workdir that readers refuse.
    """

    def state(target):
        if not target.exists() or not any(target.iterdir()):
            return ABSENT
        try:
            find_checkpoint(target)
        except ValueError:
            with (
                pytest.raises(ValueError),
                open_workdir(target, load(run).recipe, True, discard_line),
            ):
                pass
            return REFUSED
        assert load(target).step == load(run).step and Run(target).read_recipe() is not None
        names = {path.name for path in (target / 'tokenizer').iterdir()}
        assert beside <= names and load_tokenizer(target / 'tokenizer')
        return WHOLE

    return state


def model_state(target):
    """Returns the state of a folder for transformers: without config.json it is no model."""
    if not target.exists() or not any(target.iterdir()):
        return ABSENT
    if not (target / 'config.json').exists():
        return REFUSED
    safetensors.read_folder(target)
    assert {'tokenizer.json', 'tokenizer_config.json', *BESIDE} <= {
        p.name for p in target.iterdir()
    }
    assert json.loads((target / 'config.json').read_text())['model_type'] == 'llama'
    return WHOLE


def adapter_state(target):
    if not target.exists() or not (target / export_peft.CONFIG).exists():
        return ABSENT
    safetensors.read_header(target / export_peft.WEIGHTS)
    json.loads((target / export_peft.CONFIG).read_text())
    return WHOLE


def basis_state(target):
    """The file of a basis, and each of the runs."""
    if not target.exists() or not any(target.iterdir()):
        return ABSENT
    if (target / MARK).exists():
        for run in target.glob('[12]'):
            if run.exists() and not (run / MARK).exists():
                load(run)
        return REFUSED
    safetensors.read_header(target / 'basis.safetensors')
    assert [load(target / name).step for name in '12'] == [0, 0]
    return WHOLE


def make_files_state(*names, is_whole):
    """Returns state(target) for files in a folder that are complete individually."""

    def state(target):
        existing = [target / name for name in names if (target / name).exists()]
        assert all(is_whole(path) for path in existing), existing
        return WHOLE if len(existing) == len(names) else ABSENT

    return state


def is_json(path):
    return isinstance(json.loads(path.read_text()), dict)


def write_figures(target):
    chart = alt.Chart(alt.Data(values=[{'x': 1}])).mark_point().encode(x='x:Q')
    for ending in ('.svg', '.png'):
        save_chart(chart, target / f'figure{ending}')
    about = {'title': 't', 'about': 'a', 'verdict': '', 'is_bad': False, 'notes': []}
    write_page(target / 'page.html', {'figure': chart}, **about, rows=[{'a': '1'}], failed=0)


def is_figure(path):
    ends = {'.svg': b'</svg>', '.png': b'IEND\xaeB`\x82', '.html': b'</html>'}
    return path.read_bytes().rstrip().endswith(ends[path.suffix])


ASKED, META = SuiteRequest('perplexity', 'perplexity', {}), {'config': {}}


def write_kept(target):
    columns = {'item': ['a', 'b'], 'nats': [1.0, 2.0], 'tokens': [1, 1], 'bytes': [2, 3]}
    kept.write_result(
        kept.result_path(target, 4, ASKED), ASKED, META, SuiteResult({'loss': 1.5}, columns, {})
    )


def kept_state(target):
    return (
        ABSENT
        if kept.read_result(kept.result_path(target, 4, ASKED), ASKED, META) is None
        else WHOLE
    )


@pytest.fixture(scope='module')
def cases(model_folder, run, tmp_path_factory):
    """Every kind of writer. Work that writes nothing is done once."""
    checkpoint, text = load(run), tmp_path_factory.mktemp('text')
    export_model = functools.cache(lambda: export_hf.export_checkpoint(checkpoint))
    fields = tiny(write_corpus(text), data_tokenizer='bpe:300').data
    config = default.get_config()
    factors = {'a.lora_A.weight': checkpoint.variables['params']['embedding']}
    merging = {'keep': None, 'basis': 1, 'base': str(run)}
    quantising = {'checkpoint': str(run), 'text': None, 'method': 'rtn', 'bits': 4, 'block': 0}

    def prepare(target):
        return open_dataset(dataclasses.replace(fields, cache_dir=str(target)), say=discard_line)

    def data_state(target):
        """Returns the state for another process: a name without an ending is complete."""
        digest_folders = (
            [path for path in target.glob('*') if len(path.name) == 32] if target.exists() else []
        )
        assert [prepared.find_damage(path) for path in digest_folders] == [''] * len(digest_folders)
        assert not digest_folders or prepare(target).digest == digest_folders[0].name
        return WHOLE if digest_folders else ABSENT

    def sweep(target):
        target.mkdir(exist_ok=True)
        if not (target / 'config.json').exists():
            (target / 'config.json').write_bytes((run / 'config.json').read_bytes())
        return write_table(target)

    return {
        'import-hf': Writer(
            lambda target: convert.run(
                ['import-hf', str(model_folder)],
                {'out': str(target), 'config': config, 'reference': None},
            ),
            make_run_state(run, {'tokenizer.json', *BESIDE}),
        ),
        'fold, merge, prune': Writer(
            lambda target: convert.write_like(checkpoint, target, checkpoint.weights, {}),
            make_run_state(run, {'tokenizer.json'}),
        ),
        'quantise': Writer(
            lambda target: convert.run(['quantise'], {'out': str(target), 'mix': []} | quantising),
            make_run_state(run, {'tokenizer.json'}),
        ),
        'merge --basis': Writer(
            lambda target: convert.run(
                ['merge', str(run), str(run)], {'out': str(target)} | merging
            ),
            basis_state,
        ),
        'export-hf': Writer(
            lambda target: export_hf.write_folder(
                target, checkpoint, export_model(), 'float32', 10_000
            ),
            model_state,
        ),
        'export-peft': Writer(
            lambda target: export_peft.write_folder(
                target, export_peft.Adapter({'r': 1}, factors), ByteTokenizer()
            ),
            adapter_state,
        ),
        'prepared data': Writer(prepare, data_state),
        'a table': Writer(sweep, make_files_state('cells.parquet', is_whole=is_parquet)),
        'pages and figures': Writer(
            write_figures,
            make_files_state('figure.svg', 'figure.png', 'page.html', is_whole=is_figure),
        ),
        'an evaluation': Writer(write_kept, kept_state),
    }


def is_parquet(path):
    return path.read_bytes().endswith(b'PAR1')


NAMES = (
    *('import-hf', 'fold, merge, prune', 'quantise', 'merge --basis', 'export-hf', 'export-peft'),
    *('prepared data', 'a table', 'pages and figures', 'an evaluation'),
)


def check_kills(case, folder, ats):
    """Kills the command at each event, and checks that the same command completes it. Returns the
    states.
    """
    states = []
    for at in ats:
        target = folder / str(at) / 'out'
        target.parent.mkdir()
        before = {*threading.enumerate()}
        event = kill(lambda target=target: case.command(target), target, at)
        # A kill ends all threads; here those of Orbax live on, and would write into the next try.
        for thread in {*threading.enumerate()} - before:
            threading.Thread.join(thread, timeout=1)  # their own raises
        states.append(case.state(target))
        assert states[-1] in (ABSENT, REFUSED, WHOLE), event
        if states[-1] != WHOLE or (target / MARK).exists():
            case.command(target)
        assert case.state(target) == WHOLE, event
        assert not (target / MARK).exists()
    return states


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_killed_command_leaves_no_false_complete(name, cases, is_long, tmp_path):
    """The long form kills at every event, otherwise at some. Catches a mark that is not removed
    last.
    """
    case = cases[name]
    n = len(list_events(lambda: case.command(tmp_path / 'whole'), tmp_path / 'whole'))
    assert n > 1 and case.state(tmp_path / 'whole') == WHOLE
    ats = range(1, n + 1) if is_long else sorted({1, 2, n // 3, n // 2, n - 1, n} - {0})
    states = check_kills(case, tmp_path, ats)
    assert states[0] != WHOLE
    print(f'{name}: {n} events, {len(states)} kills:', {s: states.count(s) for s in set(states)})


@pytest.mark.parametrize('name', ['fold, merge, prune', 'export-hf'])
def test_kill_midway_is_refused(name, cases, tmp_path):
    case = cases[name]
    n = len(list_events(lambda: case.command(tmp_path / 'whole'), tmp_path / 'whole'))
    assert check_kills(case, tmp_path, [n // 2, n]) == [
        REFUSED,
        REFUSED if 'fold' in name else WHOLE,
    ]


class TestFillFolder:
    def test_mark_stays_until_block_ends(self, tmp_path):
        target = tmp_path / 'below' / 'out'
        with fill_folder(target):
            assert [path.name for path in target.iterdir()] == [MARK]
        assert list(target.iterdir()) == []

    def test_mark_stays_after_error(self, tmp_path):
        with pytest.raises(OSError), fill_folder(tmp_path):
            (tmp_path / 'below').mkdir()
            (tmp_path / 'below' / 'file').write_text('text')
            raise OSError
        assert (tmp_path / MARK).exists() and (tmp_path / 'below' / 'file').exists()
        with fill_folder(tmp_path):
            assert [path.name for path in tmp_path.iterdir()] == [MARK]

    def test_foreign_content_is_refused(self, tmp_path):
        (tmp_path / 'thesis.tex').write_text('text')
        with pytest.raises(ValueError, match='is not empty'), fill_folder(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']
