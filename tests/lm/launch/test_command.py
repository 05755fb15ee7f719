"""Contract: a flag and a file can set any field there is, and what is wrong with one is a line."""

import errno
import re
import sys
import types

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from ml_collections import ConfigDict

import train
from lm.config.fields import FIELDS
from lm.config.resolve import resolve
from lm.config.suggestions import flag_type_error
from lm.launch.command import (
    add_fields,
    default_workdir,
    find_overrides,
    find_set_fields,
    parse_flags,
    run_trainer,
)
from lm.launch.exit_status import BAD_INPUT
from lm.launch.path_flags import CSV, PathListParser, PathParser
from lm.record.workdir import write_config
from tests import ROOT
from tests.helpers import tiny_config

DEFAULT = f'--config={ROOT}/configs/default.py'
VALUES = {int: 7, float: 0.25, bool: True, str: 'word'}


def kind_of(path: str) -> type:
    (kind,) = set(FIELDS[path].types) - {types.NoneType}
    return kind


@pytest.fixture
def parsed(monkeypatch):
    """parsed(flag, ...): the config that train.py has from these flags."""

    def of(*given: str) -> ConfigDict:
        argv = ['train.py', *given]
        monkeypatch.setattr('sys.argv', argv)
        parse_flags(argv)
        return train.CONFIG.value

    with flagsaver.flagsaver():
        yield of


@pytest.fixture
def refused(parsed, capsys):
    """refused(flag, ...): the one line that train.py answers them with."""

    def of(*given: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            resolve(parsed(*given))
        assert stopped.value.code == BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix('error: ')

    return of


@pytest.fixture
def file(tmp_path):
    """file(line, ...): the flag of a file that changes the default config by these lines."""

    def of(*lines: str) -> str:
        body = ['def get_config():', 'config = default.get_config()', *lines, 'return config']
        path = tmp_path / 'mine.py'
        path.write_text('from configs import default\n\n\n' + '\n    '.join(body) + '\n')
        return f'--config={path}'

    return of


def test_a_flag_sets_every_field(parsed):
    """With the field's own type, also where the file leaves it as published."""
    config = parsed(DEFAULT, *(f'--config.{p}={VALUES[kind_of(p)]}' for p in FIELDS))
    for path in FIELDS:
        section, name = path.split('.')
        value = config[section][name]
        assert (type(value), value) == (kind_of(path), VALUES[kind_of(path)]), path


def test_a_file_sets_every_field(parsed, file):
    config = parsed(file(*(f'config.{p} = {VALUES[kind_of(p)]!r}' for p in FIELDS)))
    for path in FIELDS:
        section, name = path.split('.')
        value = config[section][name]
        assert (type(value), value) == (kind_of(path), VALUES[kind_of(path)]), path


def test_what_neither_sets_is_none_or_as_in_the_file(parsed):
    config = parsed(DEFAULT)
    assert config.norm.groups is config.optim.others_lr is config.sweep is None
    assert config.optim.warmup_steps == 100


def test_what_is_given_is_what_a_flag_sets_or_the_file_otherwise_than_the_default(parsed, file):
    """And what is overridden is what has another value then."""
    mine = file('config.model.d_model = 8', 'config.model.n_layers = 3', "config.sweep = {'a': 1}")
    config = parsed(mine, '--config.optim.lr=0.25', '--config.model.d_ff=1024').to_dict()
    assert find_overrides(config) == {'model.d_model': 8, 'optim.lr': 0.25}
    assert find_set_fields(config) == {'model.d_model', 'optim.lr', 'model.d_ff'}


def test_a_flag_has_the_type_of_the_field_and_not_of_the_value_in_the_file(parsed, file):
    """Which may be a whole number, or none."""
    mine = file('config.optim.b2 = 1', 'config.scaling.embedding_std = None')
    config = parsed(mine, '--config.optim.b2=0.5', '--config.scaling.embedding_std=0.25')
    assert (config.optim.b2, config.scaling.embedding_std) == (0.5, 0.25)
    assert type(parsed(mine).optim.b2) is float


def test_a_switch_may_stand_alone(parsed):
    config = parsed(DEFAULT, '--config.norm.scale', '--noconfig.model.embedding_scale')
    assert config.norm.scale is True and config.model.embedding_scale is False


def test_a_reference_of_the_file_is_kept(parsed, file):
    mine = file("config.model.d_ff = 4 * config.model.get_ref('d_model')")
    assert parsed(mine, '--config.model.d_model=32').model.d_ff == 128


def test_a_config_that_begins_from_nothing_has_all_fields_too():
    """A field with a default has it; one without is still missed."""
    config = ConfigDict({'model': {'d_model': 8}})
    add_fields(config)
    assert config.model.bias is False and config.norm.groups is None
    with pytest.raises(ValueError, match=r'config lacks model\.n_layers'):
        resolve(config)


@pytest.mark.parametrize(
    ('path', 'text'), [('norm.groups', '1.5'), ('optim.b2', '(0.9,0.99)'), ('norm.groups', 'None')]
)
def test_a_flag_of_another_type_is_refused(path, text, refused):
    wanted = flag_type_error(path, text, FIELDS[path].types)
    assert refused(DEFAULT, f'--config.{path}={text}') == wanted


def test_a_flag_that_names_no_field_is_refused_with_the_nearest(refused):
    said = "the config has no field norm.group. Did you mean 'norm.groups'?"
    assert refused(DEFAULT, '--config.norm.group=4') == said


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('config.optim = {}; config.optimm = {}', "no field optimm. Did you mean 'optim'?"),
        ('config.optimm.lr = 1.0', "reads optimm, which is not set. Did you mean 'optim'?"),
        ('config.optim.lr = config.optim.others_lr', "it is None by .get('others_lr') alone."),
        (
            'config.optim.learning_rate = 1.0',
            "no field optim.learning_rate. Did you mean 'optim.lr",
        ),
        ('config.norm.group = 4', "no field norm.group. Did you mean 'norm.groups'?"),
        (
            'config.model.update(d_modell=4)',
            "no field model.d_modell. Did you mean 'model.d_model'?",
        ),
        (
            'config.model.enable_dropout = True',
            'no field model.enable_dropout. Dropout is on where',
        ),
    ],
)
def test_what_a_file_cannot_name_is_refused_with_its_line(line, said, refused, file):
    answer = refused(file('config.train.steps = 3', line))
    assert said in answer and '/mine.py:7: ' in answer


def test_a_value_of_another_type_is_refused_as_the_config_is_resolved(parsed, file):
    with pytest.raises(ValueError, match=r"norm\.groups must be int or None; got 'a' of type str"):
        resolve(parsed(file("config.norm.groups = 'a'")))


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('def config(): pass', 'has no get_config()'),
        ('def get_config(): pass', 'returns nothing'),
    ],
)
def test_a_file_without_a_config_is_refused_with_what_to_write(
    text, said, refused, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, 'config_config', raising=False)  # the file of another test
    (tmp_path / 'mine.py').write_text(text)
    for more in ((), ('--config.optim.lr=1',)):
        answer = refused(f'--config={tmp_path}/mine.py', *more)
        assert said in answer and 'has def get_config(): ... return config' in answer


def test_another_mistake_in_a_file_keeps_its_traceback(parsed, file):
    with pytest.raises(AttributeError, match='no_such'):
        parsed(file('flag = "".no_such'))


@pytest.mark.parametrize('more', [(), ("--config.sweep={'optim.lr': (0.1, 0.2)}",)])
def test_a_program_says_what_differs_and_what_a_checkpoint_gives(
    more, parsed, tmp_path, monkeypatch
):
    """A run and a sweep are of the config that it says."""
    (tmp_path / 'RUN' / 'checkpoints' / '4').mkdir(parents=True)
    write_config(tmp_path / 'RUN', tiny_config({'model.d_ff': 48}))
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(train, 'train', lambda *given, **how: started.append(given))
    monkeypatch.setattr(
        train, 'train_sweep', lambda base, *given, **how: started.append((resolve(base), *given))
    )
    parsed(DEFAULT, '--config.train.init_from=RUN', '--config.model.n_heads=2', *more)
    train.main()
    ((recipe, *_, (given, followed)),) = started
    assert given == 'not as in configs/default.py: model.n_heads=2, train.init_from=RUN'
    assert followed.startswith('from RUN: model.d_model=16, ') and 'n_heads' not in followed
    assert 'model.d_ff=48' in followed and recipe.model.d_ff == 48


def test_a_run_says_it_after_where_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, 'open_text', lambda *_: pytest.fail('said'))
    with pytest.raises(pytest.fail.Exception):
        train.train(tiny_config(), tmp_path / 'run', notes=['word', 'more'])
    assert capsys.readouterr().out.splitlines()[1:] == ['word', 'more']


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    return tmp_path


def test_a_tilde_in_a_path_is_the_home_folder(parsed, at_home):
    """Bash leaves it behind '='."""
    (at_home / 'mine.py').write_text((ROOT / 'configs' / 'default.py').read_text())
    config = parsed('--config=~/mine.py', '--workdir', '~/x')
    assert train.WORKDIR.value == f'{at_home}/x'
    assert config.optim.lr and default_workdir(resolve(config)).name.startswith('mine-')
    parsed('--config=~/mine.py', '--workdir=gs://bucket/~/x')
    assert train.WORKDIR.value == 'gs://bucket/~/x'


def test_the_home_of_nobody_is_refused(refused):
    assert "there is no user 'nobody_here'" in refused(DEFAULT, '--workdir=~nobody_here/x')
    assert '--config=~nobody_here/a.py is no file' in refused('--config=~nobody_here/a.py')


def test_paths_with_commas_or_given_again_are_each_expanded(at_home):
    values = flags.FlagValues()
    lists, several = PathListParser(), PathParser()
    flags.DEFINE(lists, 'list', 'runs', '', flag_values=values, serializer=CSV)
    flags.DEFINE_multi(several, None, 'again', [], '', flag_values=values)
    values(['program', '--list=~/a,b,~/c', '--again=~/a', '--again=b'])
    assert values.list == [f'{at_home}/a', 'b', f'{at_home}/c']
    assert values.again == [f'{at_home}/a', 'b']


def test_every_flag_that_names_a_file_reads_it_as_a_path():
    """Catches a path flag that is defined as any text."""
    names = 'workdir|checkpoint|out|page|pages|figure|figures|table|reference|claims'
    text = re.compile(rf"DEFINE_(?:multi_)?(?:string|list)\(\s*'({names})'")
    programs = [*ROOT.glob('eval/**/*.py'), ROOT / 'train.py', ROOT / 'tpu' / 'plan.py']
    sources = {path: path.read_text() for path in programs}
    assert not [(path, found[1]) for path in sources if (found := text.search(sources[path]))]
    assert sum(source.count('define_path(') for source in sources.values()) > 20


@pytest.mark.parametrize(
    ('error', 'said'),
    [
        (
            jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nAt'),
            'error: the memory of the device does not hold this run (RESOURCE_EXHAUSTED: Out of '
            'memory allocating 9 bytes.). Try, in this order: a larger train.microbatches',
        ),
        (
            OSError(errno.ENOSPC, 'No space left on device', '/a/b/file'),
            'error: the disk that holds /a/b is full (',
        ),
        (OSError(errno.EIO, 'Input/output error', '/a'), 'error: [Errno 5] Input/output error'),
    ],
)
def test_an_error_of_a_run_is_one_line_that_says_what_to_do(error, said, capsys):
    def main():
        raise error

    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        run_trainer(main)(['train.py'])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT and line.startswith(said)


def test_another_error_of_xla_keeps_its_traceback():
    def main():
        raise jax.errors.JaxRuntimeError('INTERNAL: a bug')

    with pytest.raises(jax.errors.JaxRuntimeError):
        run_trainer(main)(['train.py'])
