"""A command that is killed at any of its file events leaves nothing that looks whole and is not.

What it leaves is absent, refused, or whole; and the same command then makes it whole. Contract: a
row for each kind of writer.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import pytest

from configs import default
from eval.charts import save_chart, write_page
from eval.convert import __main__ as convert
from eval.convert import export_hf, export_peft, import_hf, safetensors
from eval.convert.export_hf import OTHER_FILES, TOKENIZER_FILES
from eval.evaluation import kept
from eval.evaluation.suite_flags import SuiteRequest
from eval.load import load
from eval.suites.base import SuiteResult
from lm.data import open_dataset, prepared
from lm.data.tokenizers import load as load_tokenizer
from lm.inference.load import find_checkpoint
from lm.record.run import Run
from lm.record.workdir import open_workdir
from lm.storage.files import discard_line
from lm.storage.filling import MARK, fill_folder
from lm.study.tables.results import write_table
from tests.commands import tiny
from tests.corpora import write_corpus
from tests.eval.convert.test_hf import base, saved, with_tokenizer
from tests.killed import events_of, kill

ABSENT, REFUSED, WHOLE = 'absent', 'refused', 'whole'
BESIDE = {
    'chat_template.jinja': '{{ messages }}',
    'generation_config.json': json.dumps({'eos_token_id': 2, 'temperature': 0.6}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """command(out): writes a folder or file; state(out): what a reader takes it for."""

    command: Callable[[Path], Any]
    state: Callable[[Path], str]


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
    """A folder of transformers, with a tokenizer, a chat template and settings."""
    folder = with_tokenizer(saved(tmp_path_factory.mktemp('hf') / 'llama', 'llama2'))
    assert BESIDE.keys() <= {*TOKENIZER_FILES, *OTHER_FILES}
    for name, text in BESIDE.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope='module')
def run(theirs, tmp_path_factory):
    """The run that it is imported as."""
    out = tmp_path_factory.mktemp('imported') / 'run'
    write_import(theirs, out)
    return out


def write_import(theirs, out):
    import_hf.write_run(theirs, out, import_hf.import_folder(theirs, base(), out))


def like(run, beside):
    """state(out) of a workdir that is to have what `run` has, and these files beside its tokenizer.
    A start of training must not take one that is refused for its own.
    """

    def state(out):
        if not out.exists() or not any(out.iterdir()):
            return ABSENT
        try:
            find_checkpoint(out)
        except ValueError:
            with pytest.raises(ValueError), open_workdir(out, load(run).recipe, True, discard_line):
                pass
            return REFUSED
        assert load(out).step == load(run).step and Run(out).read_recipe() is not None
        names = {path.name for path in (out / 'tokenizer').iterdir()}
        assert beside <= names and load_tokenizer(out / 'tokenizer')
        return WHOLE

    return state


def of_theirs(out):
    """What transformers takes a folder for: without config.json, no model."""
    if not out.exists() or not any(out.iterdir()):
        return ABSENT
    if not (out / 'config.json').exists():
        return REFUSED
    safetensors.read_folder(out)
    assert {'tokenizer.json', 'tokenizer_config.json', *BESIDE} <= {p.name for p in out.iterdir()}
    assert json.loads((out / 'config.json').read_text())['model_type'] == 'llama'
    return WHOLE


def of_adapter(out):
    if not out.exists() or not (out / export_peft.CONFIG).exists():
        return ABSENT
    safetensors.read_header(out / export_peft.WEIGHTS)
    json.loads((out / export_peft.CONFIG).read_text())
    return WHOLE


def of_basis(out):
    """The file of a basis, and each of the runs."""
    if not out.exists() or not any(out.iterdir()):
        return ABSENT
    if (out / MARK).exists():
        for run in out.glob('[12]'):
            if run.exists() and not (run / MARK).exists():
                load(run)
        return REFUSED
    safetensors.read_header(out / 'basis.safetensors')
    assert [load(out / name).step for name in '12'] == [0, 0]
    return WHOLE


def files_of(*names, is_whole):
    """state(out) of files in a folder, each of which is whole by itself."""

    def state(out):
        found = [out / name for name in names if (out / name).exists()]
        assert all(is_whole(path) for path in found), found
        return WHOLE if len(found) == len(names) else ABSENT

    return state


def is_json(path):
    return isinstance(json.loads(path.read_text()), dict)


def write_figures(out):
    chart = alt.Chart(alt.Data(values=[{'x': 1}])).mark_point().encode(x='x:Q')
    for ending in ('.svg', '.png'):
        save_chart(chart, out / f'figure{ending}')
    about = {'title': 't', 'about': 'a', 'verdict': '', 'is_bad': False, 'notes': []}
    write_page(out / 'page.html', {'figure': chart}, **about, rows=[{'a': '1'}], failed=0)


def is_figure(path):
    ends = {'.svg': b'</svg>', '.png': b'IEND\xaeB`\x82', '.html': b'</html>'}
    return path.read_bytes().rstrip().endswith(ends[path.suffix])


ASKED, META = SuiteRequest('perplexity', 'perplexity', {}), {'config': {}}


def write_kept(out):
    items = {'item': ['a', 'b'], 'nats': [1.0, 2.0], 'tokens': [1, 1], 'bytes': [2, 3]}
    kept.write_result(
        kept.result_path(out, 4, ASKED), ASKED, META, SuiteResult({'loss': 1.5}, items, {})
    )


def of_kept(out):
    return (
        ABSENT if kept.read_result(kept.result_path(out, 4, ASKED), ASKED, META) is None else WHOLE
    )


@pytest.fixture(scope='module')
def cases(theirs, run, tmp_path_factory):
    """Each kind of writer; work that writes nothing is done once."""
    checkpoint, text = load(run), tmp_path_factory.mktemp('text')
    exported = functools.cache(lambda: export_hf.export_checkpoint(checkpoint))
    fields = tiny(write_corpus(text), data_tokenizer='bpe:300').data
    config = default.get_config()
    factors = {'a.lora_A.weight': checkpoint.variables['params']['embedding']}
    merging = {'keep': None, 'basis': 1, 'base': str(run)}

    def prepare(out):
        return open_dataset(dataclasses.replace(fields, cache_dir=str(out)), say=discard_line)

    def of_data(out):
        """By what another process finds there: a name without an ending is whole."""
        made = [path for path in out.glob('*') if len(path.name) == 32] if out.exists() else []
        assert [prepared.find_damage(path) for path in made] == [''] * len(made)
        assert not made or prepare(out).digest == made[0].name
        return WHOLE if made else ABSENT

    def sweep(out):
        out.mkdir(exist_ok=True)
        if not (out / 'config.json').exists():
            (out / 'config.json').write_bytes((run / 'config.json').read_bytes())
        return write_table(out)

    return {
        'import-hf': Case(
            lambda out: convert.run(
                ['import-hf', str(theirs)], {'out': str(out), 'config': config, 'reference': None}
            ),
            like(run, {'tokenizer.json', *BESIDE}),
        ),
        'fold, merge, prune': Case(
            lambda out: convert.write_like(checkpoint, out, checkpoint.weights, {}),
            like(run, {'tokenizer.json'}),
        ),
        'merge --basis': Case(
            lambda out: convert.run(['merge', str(run), str(run)], {'out': str(out)} | merging),
            of_basis,
        ),
        'export-hf': Case(
            lambda out: export_hf.write_folder(out, checkpoint, exported(), 'float32', 10_000),
            of_theirs,
        ),
        'export-peft': Case(
            lambda out: export_peft.write_folder(out, export_peft.Adapter({'r': 1}, factors)),
            of_adapter,
        ),
        'prepared data': Case(prepare, of_data),
        'a table': Case(sweep, files_of('cells.parquet', is_whole=is_parquet)),
        'pages and figures': Case(
            write_figures,
            files_of('figure.svg', 'figure.png', 'page.html', is_whole=is_figure),
        ),
        'an evaluation': Case(write_kept, of_kept),
    }


def is_parquet(path):
    return path.read_bytes().endswith(b'PAR1')


NAMES = (
    *('import-hf', 'fold, merge, prune', 'merge --basis', 'export-hf', 'export-peft'),
    *('prepared data', 'a table', 'pages and figures', 'an evaluation'),
)


def check_kills(case, folder, ats):
    """What each of these kills leaves, and that the same command makes it whole; the states."""
    states = []
    for at in ats:
        out = folder / str(at) / 'out'
        out.parent.mkdir()
        event = kill(lambda out=out: case.command(out), out, at)
        states.append(case.state(out))
        assert states[-1] in (ABSENT, REFUSED, WHOLE), event
        if states[-1] != WHOLE or (out / MARK).exists():
            case.command(out)
        assert case.state(out) == WHOLE, event
        assert not (out / MARK).exists()
    return states


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_a_killed_command_leaves_nothing_that_looks_whole(name, cases, is_long, tmp_path):
    """At each of its events at length, otherwise at some. Catches a mark that is not last."""
    case = cases[name]
    n = len(events_of(lambda: case.command(tmp_path / 'whole'), tmp_path / 'whole'))
    assert n > 1 and case.state(tmp_path / 'whole') == WHOLE
    ats = range(1, n + 1) if is_long else sorted({1, 2, n // 3, n // 2, n - 1, n} - {0})
    states = check_kills(case, tmp_path, ats)
    assert states[0] != WHOLE
    print(f'{name}: {n} events, {len(states)} kills:', {s: states.count(s) for s in set(states)})


@pytest.mark.parametrize('name', ['fold, merge, prune', 'export-hf'])
def test_kills_before_the_last_file(name, cases, tmp_path):
    case = cases[name]
    n = len(events_of(lambda: case.command(tmp_path / 'whole'), tmp_path / 'whole'))
    assert check_kills(case, tmp_path, [n // 2, n]) == [
        REFUSED,
        REFUSED if 'fold' in name else WHOLE,
    ]


class TestAFolderThatIsFilled:
    def test_is_marked_until_the_block_has_ended(self, tmp_path):
        out = tmp_path / 'below' / 'out'
        with fill_folder(out):
            assert [path.name for path in out.iterdir()] == [MARK]
        assert list(out.iterdir()) == []

    def test_keeps_its_mark_after_an_error_and_is_emptied_by_the_next(self, tmp_path):
        with pytest.raises(OSError), fill_folder(tmp_path):
            (tmp_path / 'below').mkdir()
            (tmp_path / 'below' / 'file').write_text('text')
            raise OSError
        assert (tmp_path / MARK).exists() and (tmp_path / 'below' / 'file').exists()
        with fill_folder(tmp_path):
            assert [path.name for path in tmp_path.iterdir()] == [MARK]

    def test_is_refused_if_it_holds_what_is_not_ours(self, tmp_path):
        (tmp_path / 'thesis.tex').write_text('text')
        with pytest.raises(ValueError, match='is not empty'), fill_folder(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']
