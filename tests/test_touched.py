"""Property: the tests that a change touches, in a small invented project and in this one."""

import ast
import dataclasses
import functools
import gc
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import default
from lm.config.fields import CHOICES
from lm.config.resolve import flatten, resolve
from modules.kernels import kernels_for
from tests import ROOT, touched
from tests.collect import Collection
from tests.summaries import Store

INVENTED = {
    '.gitignore': '.pytest_cache/',
    'LICENSE': '',
    'README.md': 'uv run train.py --config.model.norm=ghost',
    'pyproject.toml': '',
    'configs/default.py': "def get_config():\n    return {'model.norm': 'plain'}\n",
    'configs/study.py': "def get_config():\n    return {'model.norm': ('batch', 'ghost')}\n",
    'eval/__init__.py': '',
    'eval/__main__.py': "import eval.table\nif __name__ == '__main__':\n    pass\n",
    'eval/page.js': '',
    'eval/page.py': 'HERE = Path(__file__).parent\n',
    'eval/table.py': '',
    'lm/model.py': "from lm.sections import Model\nHINT = 'python train.py does it'\n",
    'lm/sections.py': (
        'from modules.norms import NORMS\nfrom modules.places import PLACES\n'
        'class Model:\n'
        '    norm: Annotated[str, Choice(NORMS)]\n    place: Annotated[str, Choice(PLACES)]\n'
    ),
    'lm/wave.py': '"""Of tests/test_plain.py and train.py."""\nfrom lm.model import Model\n',
    'modules/norms/__init__.py': (
        'from modules.norms.base import Norm\n'
        'from modules.norms.batch import Batch, Ghost\n'
        'from modules.norms.lone import Lone\n'
        'from modules.norms.plain import Plain\nfrom modules.norms.used import Used\n'
        "NORMS = {'plain': Plain, 'batch': Batch, 'ghost': Ghost, 'lone': Lone, 'used': Used}\n"
        'def made(): return Used()\n'
    ),
    'modules/norms/base.py': 'class Norm: ...\n',
    'modules/norms/batch.py': 'from modules.statistics import mean\n',
    'modules/norms/lone.py': 'from modules.statistics import mean\n',
    'modules/norms/used.py': '',
    'modules/places.py': "PLACES = {'pre': Place(), 'wide': Place(needs={'norm': 'lone'})}\n",
    'modules/norms/plain.py': 'from modules.norms.base import Norm\n',
    'modules/statistics.py': 'def mean(): ...\n',
    'train.py': "from lm.wave import Wave\nif __name__ == '__main__':\n    pass\n",
    'tests/__init__.py': 'ROOT = ...\n',
    'tests/conftest.py': (
        'import pytest\n@pytest.fixture\ndef trained():\n    from train import train\n'
        '@pytest.fixture\ndef chain(trained): ...\n'
    ),
    'tests/fixtures/old/run.json': '{"norm": "lone"}',
    'tests/helpers.py': (
        "from lm.model import Model\nBATCH = {'model.norm': 'batch:eps=1'}\n"
        "SEE = 'tests/test_plain.py'\n"
    ),
    'tests/test_class.py': 'from modules.norms import Batch\n',
    'tests/test_copied.py': "shutil.copy(ROOT / 'train.py', folder)\n",
    'tests/test_eval.py': "command = [sys.executable, '-m', 'eval']\n",
    'tests/test_fixture.py': 'def test_done(chain): ...\n',
    'tests/test_helped.py': (
        'from tests import helpers\n'
        'def test_with_it(): Model(helpers.BATCH)\n'
        'def test_other(): Model()\n'
    ),
    'tests/test_launch.py': "words = ['--', 'train.py']\n(folder / 'train.py').touch()\n",
    'tests/test_loop.py': (
        'from modules.norms import NORMS\nfrom lm.model import Model\n'
        "def test_all():\n    assert all(NORMS)\ndef test_one():\n    NORMS['plain']\n"
    ),
    'tests/test_old.py': "OLD = ROOT / 'fixtures' / 'old' / name\n",
    'tests/test_page.py': 'from eval.page import HERE\n',
    'tests/test_plain.py': (
        '"""As python train.py does."""\nfrom lm.model import Model\ndef test_model(): Model()\n'
    ),
    'tests/test_program.py': "command = [sys.executable, 'train.py']\n",
    'tests/test_readme.py': "runpy.run_path(ROOT / 'README.md')\n",
    'tests/test_rooms.py': "ROOMS = ('configs', 'eval')\n",
    'tests/test_rows.py': (
        'from modules.norms import NORMS\nfrom lm.model import Model\n'
        "@pytest.mark.parametrize('name', NORMS)\ndef test_norm(name): NORMS[name]\n"
    ),
    'tests/test_study.py': "config = 'configs/study.py'\n",
}
RUNS = {'copied', 'fixture', 'program', 'readme'}
MODELS = {*RUNS, 'helped', 'loop', 'plain', 'rows'}
EVERY = {path[11:-3] for path in INVENTED if path.startswith('tests/test_')}


@pytest.fixture(scope='module')
def invented_project(tmp_path_factory):
    root = tmp_path_factory.mktemp('invented')
    for path, text in INVENTED.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture(scope='module')
def selector(invented_project):
    return touched.Selector(invented_project, INVENTED)


def short(paths):
    return {path.removeprefix('tests/test_').removesuffix('.py') for path in paths}


@pytest.mark.parametrize(
    ('file', 'whole'),
    [
        ('lm/wave.py', RUNS),  # a launcher's test passes the word train.py on
        ('train.py', RUNS),
        ('lm/model.py', MODELS),
        ('lm/sections.py', MODELS),
        ('eval/table.py', {'eval', 'rooms'}),
        ('eval/page.js', {'page', 'rooms'}),
        ('tests/fixtures/old/run.json', {'old'}),
        ('README.md', {'readme'}),
        ('configs/study.py', {'rooms', 'study'}),
        ('tests/helpers.py', {'helped'}),
        ('tests/test_plain.py', {'plain'}),
        ('LICENSE', set()),
        ('tests/conftest.py', EVERY),
        ('pyproject.toml', EVERY),
        # Behind a table: a row that a run has unasked, and what such a row reads, touch all models.
        ('modules/norms/plain.py', {*MODELS, 'class'}),
        ('modules/norms/base.py', {*MODELS, 'class'}),
        ('modules/norms/__init__.py', {*MODELS, 'class'}),
        ('modules/norms/used.py', {*MODELS, 'class'}),  # its package uses it, not its row alone
        ('modules/places.py', MODELS),
    ],
)
def test_file_touches_whole_test_files(selector, file, whole):
    touched_tests = selector.touched_by(file)
    assert (short(touched_tests.files), touched_tests.rows) == (whole, frozenset())


@pytest.mark.parametrize(
    ('file', 'rows', 'whole', 'named'),
    [
        ('modules/norms/lone.py', {'lone', 'wide'}, {'old'}, {'loop', 'rows'}),
        (
            'modules/norms/batch.py',
            {'batch', 'ghost'},
            {'class', 'readme', 'rooms', 'study'},
            {'helped', 'loop', 'rows'},
        ),
        (
            'modules/statistics.py',
            {'batch', 'ghost', 'lone', 'wide'},
            {'class', 'old', 'readme', 'rooms', 'study'},
            {'helped', 'loop', 'rows'},
        ),
    ],
)
def test_table_rows_touch_their_tests(selector, file, rows, whole, named):
    """Whole files name the class, or read a config, a page or data that name the row."""
    touched_tests = selector.touched_by(file)
    assert (touched_tests.rows, short(touched_tests.files), short(touched_tests.named)) == (
        rows,
        whole,
        named,
    )


@pytest.mark.parametrize(
    ('file', 'tests'),
    [
        ('eval/page.py', ['page']),
        ('modules/norms/batch.py', ['class']),
        ('modules/statistics.py', ['class']),  # which uses what uses it
        ('modules/norms/plain.py', ['loop', 'rows']),  # which use the table that has it
        ('lm/sections.py', ['plain', 'loop', 'rows']),
        ('eval/__main__.py', ['eval']),  # which runs it; one that reads all rooms reads more
    ],
)
def test_rank_tests_lists_tests_for_a_file(selector, file, tests):
    assert [short([test]).pop() for test in selector.nearest.rank_tests(file)] == tests


@pytest.mark.parametrize(
    ('test', 'parameters', 'expected'),
    [
        ('rows.py::test_norm[batch]', ['batch'], True),
        ('rows.py::test_norm[plain]', ['plain'], False),
        ('rows.py::test_norm[changes0]', ['model.norm', 'batch:eps=1'], True),
        ('helped.py::test_with_it', [], True),
        ('helped.py::test_other', [], False),
        ('loop.py::test_all', [], True),
        ('loop.py::test_one', [], False),
        ('plain.py::test_a_batch_of_tokens', [], True),  # by its name, though it means another
        ('plain.py::test_batches', [], False),
    ],
)
def test_row_touches_single_tests(selector, test, parameters, expected):
    tables = selector.touched_by('modules/norms/batch.py').tables
    is_touched = selector.definitions.is_touched(
        f'tests/test_{test}', parameters, {'batch', 'ghost'}, tables
    )
    assert is_touched == expected


TABLE_FILE = 'modules/norms/__init__.py'
WITH_A_ROW = (
    INVENTED[TABLE_FILE]
    .replace(
        'from modules.norms.lone', 'from modules.norms.last import Last\nfrom modules.norms.lone'
    )
    .replace("'used': Used", "'used': Used, 'last': Last")
)


@pytest.mark.parametrize(
    ('after', 'expected'),
    [
        (WITH_A_ROW, {'NORMS': {'last'}}),
        (f'"""Norms."""\n{WITH_A_ROW}', {'NORMS': {'last'}}),
        (WITH_A_ROW.replace("'batch': Batch", "'batch': Ghost"), {}),
        (WITH_A_ROW.replace("'plain': Plain, ", ''), {}),
        (WITH_A_ROW.replace('return Used()', 'return Last()'), {}),
        (WITH_A_ROW.replace('import Norm\n', 'import Norm as Base\n'), {}),
        (INVENTED[TABLE_FILE], {}),
    ],
)
def test_added_rows_are_told_from_other_changes(after, expected):
    assert touched.list_added_rows(INVENTED[TABLE_FILE], after) == expected


def test_added_row_touches_its_tests_alone(tmp_path):
    """Catches a table that is read as a change of every row."""
    contents = INVENTED | {
        TABLE_FILE: WITH_A_ROW,
        'modules/norms/last.py': 'class Last:\n    width: int = 1\n',
    }
    for path, text in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    selector = touched.Selector(tmp_path, contents)
    by_rows = selector.touched_by_added_rows(TABLE_FILE, INVENTED[TABLE_FILE])
    assert by_rows is not None and not by_rows.files
    assert short(by_rows.named) == {'loop', 'rows'} and by_rows.rows == {'last'}
    assert by_rows.fields == {'norm', 'width'}
    about = functools.partial(
        selector.definitions.is_touched,
        rows=by_rows.rows,
        tables=by_rows.tables,
        fields=by_rows.fields,
    )
    assert about('tests/test_loop.py::test_all', [])
    assert about('tests/test_loop.py::test_all[norm.width]', ['norm.width'])
    assert not about('tests/test_loop.py::test_all[optim.lr]', ['optim.lr'])
    assert not about('tests/test_rows.py::test_norm[plain]', ['plain'])
    before = INVENTED[TABLE_FILE].replace("'plain': Plain, ", '')
    assert selector.touched_by_added_rows(TABLE_FILE, before) is None  # a row of every run


def test_deleted_file_touches_its_importers(tmp_path):
    contents = {'configs/default.py': '', 'tests/test_left.py': 'from lm.gone import name\n'}
    for path, text in contents.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    selector = touched.Selector(tmp_path, [*contents, 'lm/gone.py', 'tests/test_gone.py'])
    assert selector.touched_by('lm/gone.py').files == {'tests/test_left.py'}
    assert not selector.touched_by('tests/test_gone.py').files  # pytest would not find it


def test_unparsable_file_is_named(tmp_path):
    (tmp_path / 'lm.py').write_text('def (')
    with pytest.raises(SystemExit, match=r'^lm.py:1 is no Python: '):
        touched.Selector(tmp_path, ['lm.py'])


def never_parsed():
    raise AssertionError('a stored summary is parsed again')


def test_summaries_are_stored_until_a_file_changes(tmp_path):
    """Catches a digest that leaves out the text, and a store that forgets its summaries."""
    file, text = tmp_path / 'folder' / 'summaries', INVENTED['tests/helpers.py']
    first = Store(file)
    summary = first.summarize(text, lambda: ast.parse(text))
    assert summary.definitions.keys() == {'BATCH', 'SEE'} and 'batch' in summary.body.words
    first.save()
    assert Store(file).summarize(text, never_parsed) == summary
    edited = text.replace("'batch", "'ghost")
    words = Store(file).summarize(edited, lambda: ast.parse(edited)).body.words
    assert 'ghost' in words and 'batch' not in words


def damage(file):
    file.write_bytes(file.read_bytes()[:-9])


def change_version(file):
    file.write_bytes(pickle.dumps(('another version', pickle.loads(file.read_bytes())[1])))


@pytest.mark.parametrize('change', [damage, change_version, Path.unlink])
def test_unusable_store_is_empty(tmp_path, change):
    file = tmp_path / 'summaries'
    store = Store(file)
    store.summarize('a = 1', lambda: ast.parse('a = 1'))
    store.save()
    change(file)
    assert Store(file).summarize('a = 1', lambda: ast.parse('b = 1')).definitions.keys() == {'b'}


COLLECTED = {
    'tests/__init__.py': '',
    'tests/conftest.py': 'print(1)\n',
    'tests/test_cases.py': (
        'import pytest\n@pytest.mark.full\ndef test_full(): ...\n'
        '@pytest.mark.product\ndef test_product(): ...\n'
        "@pytest.mark.parametrize('change', [{'model.norm': 'batch'}, print])\n"
        'def test_change(change): ...\n'
    ),
    'tests/test_other.py': 'def test_other(): ...\n',
    'tests/test_wrong.py': 'import no_such_module\n',
}


@pytest.fixture
def collection(tmp_path):
    (tmp_path / 'tests').mkdir()
    for path, text in COLLECTED.items():
        (tmp_path / path).write_text(text)
    with Collection(tmp_path, imports=()) as collection:
        yield collection
    assert all(process.returncode is not None for process in collection.processes)


def test_collected_tests_list_parameter_strings(collection):
    tests = {
        test.nodeid.split('::')[1]: test for test in collection.collect(['tests/test_cases.py'])
    }
    assert tests.keys() == {'test_full', 'test_change[change0]', 'test_change[print]'}
    assert {name for name, test in tests.items() if test.is_full} == {'test_full'}
    assert set(tests['test_change[change0]'].texts) >= {'change', 'model.norm', 'batch'}
    assert set(tests['test_change[print]'].texts) == {'change', 'print'}


def test_uncollectable_file_is_shown(collection):
    with pytest.raises(SystemExit, match=r'(?s)no_such_module.*pytest cannot collect the tests'):
        collection.collect({'tests/test_wrong.py', 'tests/test_other.py'})


def test_nothing_to_collect(collection):
    assert collection.collect(()) == []


def commit_all(root):
    git = ['git', '-c', 'user.name=A', '-c', 'user.email=a@b', '-C', str(root)]
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '-m', 'Begins']):
        subprocess.run([*git, *words], check=True)


def test_changes_include_untracked_files(tmp_path):
    for name in ('kept', 'edited', 'removed', 'before'):
        (tmp_path / name).write_text(f'{name}\n' * 9)
    (tmp_path / '.gitignore').write_text('ignored\n')
    commit_all(tmp_path)
    (tmp_path / 'edited').write_text('')
    (tmp_path / 'removed').unlink()
    subprocess.run(['git', '-C', str(tmp_path), 'mv', 'before', 'after'], check=True)
    for name in ('new', 'ignored'):
        (tmp_path / name).write_text('')
    expected = ['after', 'before', 'edited', 'new', 'removed']
    assert touched.list_changed_files(tmp_path, 'HEAD') == expected
    with pytest.raises(SystemExit, match=r'^nothing is no commit of this project; '):
        touched.list_changed_files(tmp_path, 'nothing')


@pytest.fixture
def commands(invented_project, monkeypatch):
    """Returns the commands of pytest that `main` starts; `statuses` replace their exit statuses."""
    begun, statuses, real = [], [], subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:
            return real(command, **options)
        ids = Path(command[3][1:]).read_text().splitlines()
        begun.append((ids, command[command.index('-m', 4) + 1], command[6:]))
        return SimpleNamespace(returncode=statuses.pop(0))

    if not (invented_project / '.git').exists():
        commit_all(invented_project)
    monkeypatch.setattr(touched, 'ROOT', invented_project)
    monkeypatch.setattr(touched.subprocess, 'run', run)
    yield SimpleNamespace(begun=begun, statuses=statuses)
    gc.enable()


def test_tiers_run_in_order(commands, capsys):
    commands.statuses += [5, 0]  # no test of the default tier
    assert touched.main(['--files', 'eval/page.js', '--run', '--pytest=-x']) == 0
    (first, second), ids = commands.begun, ['tests/test_page.py', 'tests/test_rooms.py']
    assert first == (ids, 'not full and not product', ['-x'])
    assert second == (ids, 'full and not product', ['-x'])
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ['eval/page.js: read by 2 test files', *ids]


def test_failing_tier_stops(commands):
    commands.statuses += [1]
    assert touched.main(['--files', 'eval/page.js', '--run']) == 1
    commands.statuses += [0]
    assert touched.main(['--files', 'eval/page.js', '--run', '--tier=full']) == 0
    assert [tier for _, tier, _ in commands.begun] == list(touched.TIERS.values())


def test_no_test_is_touched(commands, capsys):
    assert touched.main(['--run']) == 0
    assert capsys.readouterr().out.endswith('no test is touched\n') and not commands.begun
    assert touched.main(['--files', 'LICENSE', '--run']) == 0
    assert 'LICENSE: no file reads or names it' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r'must be files of the project.* got lm/no.py$'):
        touched.main(['--files', 'lm/no.py'])


# This project.


@pytest.fixture(scope='module')
def project():
    gc.disable()
    yield touched.read_project()
    gc.enable()


def test_every_product_file_has_tests(project):
    nearest = {file: project.nearest.rank_tests(file) for file in project.nearest.product}
    assert [file for file, tests in nearest.items() if not tests] == []
    assert nearest['lm/run/wave.py'] == ['tests/lm/run/test_wave.py']
    assert nearest['modules/norms/batchnorm.py'][0] == 'tests/modules/test_norms.py'  # by its table
    assert 'tests/tpu/test_hlo.py' in nearest['tpu/integers.py']  # by a file that uses it


@pytest.mark.full  # looks for what each file touches
def test_file_touches_its_first_test(project):
    """The others may be about a table, and about other rows."""
    missed = {}
    for file in sorted(project.nearest.product):
        touched_tests, first = project.touched_by(file), project.nearest.rank_tests(file)[0]
        if first not in touched_tests.files | touched_tests.named:
            missed[file] = first
    assert not missed, (
        f'{missed}: each of these files needs a test of its own, in a file of tests/ that imports '
        'it or names its rows; the nearest test, which is listed, tests another part'
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ('file', 'max_share'),
    [
        ('tpu/hlo.py', 0.1),
        ('lm/study/tables/comparison.py', 0.35),  # train.py writes the report of a sweep
        ('lm/run/wave.py', 0.3),
        ('lm/study/train/groups.py', 0.3),
        ('modules/norms/batchnorm.py', 0.3),
        ('modules/optim/rotated.py', 0.2),
        ('modules/losses/label_probability.py', 0.2),
    ],
)
def test_change_touches_few_files(project, file, max_share):
    """Catches an import at the top of a shared helper that most tests do not need."""
    touched_tests = project.touched_by(file)
    assert 1 < len(touched_tests.files | touched_tests.named) < max_share * len(project.tests)


def test_tables_match_runtime(project):
    """The rows read from sources equal those in Python: names, and files."""
    ids = {id(choice.table) for choice in CHOICES.values()}
    by_id = {}
    for table in project.tables.all:
        table_object = getattr(importlib.import_module(module_name(table.file)), table.name)
        by_id[id(table_object)] = table
        assert table_object.keys() == table.rows.keys()
        for name, row in table_object.items():
            files = {module_path(held.__module__) for held in held_by(row)}
            of_all = {table.file, 'modules/facts.py'}  # which has the rule of a row without one
            assert files & set(project.sources.paths) <= table.rows[name] | of_all, name
    assert by_id.keys() == ids


def module_name(path):
    return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def module_path(module):
    path = module.replace('.', '/')
    return f'{path}/__init__.py' if (ROOT / path).is_dir() else f'{path}.py'


def held_by(row):
    """Returns the functions and classes of a row: itself, or the fields of a record."""
    if isinstance(row, functools.partial):
        return held_by(row.func)
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return [function for value in vars(row).values() for function in held_by(value)]
    return [row] if callable(row) and hasattr(row, '__qualname__') else []


def test_default_rows_are_known(project):
    values = flatten(resolve(default.get_config()))
    chosen = {name for path in CHOICES for name in str(values[path]).split('+')} - {'auto'}
    kernels = {name for _, name in kernels_for('cpu').names}
    assert {'rmsnorm', 'adamw', 'dense', 'narrow_first'} <= chosen | kernels
    assert chosen | kernels <= project.tables.defaults
    for row in ('batchnorm', 'soap', 'focal', 'splash', 'moe'):
        assert row not in project.tables.defaults
