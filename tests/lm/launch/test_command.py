"""Contract: a flag and a file can set every field, and errors in them are one line."""

import errno
import re
import subprocess
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
    check_numbers,
    default_workdir,
    find_overrides,
    find_set_fields,
    parse_flags,
    run_trainer,
)
from lm.launch.exit_status import BAD_INPUT
from lm.launch.path_flags import CSV, LocalPathParser, PathListParser, PathParser
from lm.launch.program_help import format_help
from lm.record.workdir import write_config
from tests import ROOT
from tests.helpers import tiny_config

DEFAULT = f'--config={ROOT}/configs/default.py'
VALUES = {int: 7, float: 0.25, bool: True, str: 'word'}


def value_kind(path: str) -> type:
    (kind,) = set(FIELDS[path].types) - {types.NoneType}
    return kind


@pytest.fixture
def parse_config(monkeypatch):
    """Returns a function from flags to the config that train.py parses."""

    def parse(*arguments: str) -> ConfigDict:
        argv = ['train.py', *arguments]
        monkeypatch.setattr('sys.argv', argv)
        parse_flags(argv)
        return train.CONFIG.value

    with flagsaver.flagsaver():
        yield parse


@pytest.fixture
def refusal(parse_config, capsys):
    """Returns a function from flags to the one line with which train.py refuses them."""

    def find_refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            resolve(parse_config(*arguments))
        assert stopped.value.code == BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix('error: ')

    return find_refusal


@pytest.fixture
def file(tmp_path):
    """Returns a function from lines that change the default config to the flag of their file."""

    def write_config_file(*lines: str) -> str:
        body = ['def get_config():', 'config = default.get_config()', *lines, 'return config']
        path = tmp_path / 'mine.py'
        path.write_text('from configs import default\n\n\n' + '\n    '.join(body) + '\n')
        return f'--config={path}'

    return write_config_file


def test_flags_set_every_field(parse_config):
    """The value has the field's own type, also if the file leaves it at its default."""
    config = parse_config(DEFAULT, *(f'--config.{p}={VALUES[value_kind(p)]}' for p in FIELDS))
    for path in FIELDS:
        section, name = path.split('.')
        value = config[section][name]
        assert (type(value), value) == (value_kind(path), VALUES[value_kind(path)]), path


def test_file_sets_every_field(parse_config, file):
    config = parse_config(file(*(f'config.{p} = {VALUES[value_kind(p)]!r}' for p in FIELDS)))
    for path in FIELDS:
        section, name = path.split('.')
        value = config[section][name]
        assert (type(value), value) == (value_kind(path), VALUES[value_kind(path)]), path


def test_unset_options_are_none(parse_config):
    config = parse_config(DEFAULT)
    assert config.norm.groups is config.optim.others_lr is config.sweep is None
    assert config.optim.warmup_steps == 100


def test_find_set_fields_by_flag_and_file(parse_config, file):
    """Overrides are the fields with another value than the default."""
    mine = file('config.model.d_model = 8', 'config.model.n_layers = 3', "config.sweep = {'a': 1}")
    config = parse_config(mine, '--config.optim.lr=0.25', '--config.model.d_ff=1024').to_dict()
    assert find_overrides(config) == {'model.d_model': 8, 'optim.lr': 0.25}
    assert find_set_fields(config) == {'model.d_model', 'optim.lr', 'model.d_ff'}


def test_flag_has_field_type(parse_config, file):
    """The value in the file may be a whole number, or None."""
    mine = file('config.optim.b2 = 1', 'config.scaling.embedding_std = None')
    config = parse_config(mine, '--config.optim.b2=0.5', '--config.scaling.embedding_std=0.25')
    assert (config.optim.b2, config.scaling.embedding_std) == (0.5, 0.25)
    assert type(parse_config(mine).optim.b2) is float


def test_switch_needs_no_value(parse_config):
    config = parse_config(DEFAULT, '--config.norm.scale', '--noconfig.model.embedding_scale')
    assert config.norm.scale is True and config.model.embedding_scale is False


def test_field_reference_follows_overrides(parse_config, file):
    mine = file("config.model.d_ff = 4 * config.model.get_ref('d_model')")
    assert parse_config(mine, '--config.model.d_model=32').model.d_ff == 128


def test_empty_config_gets_all_fields():
    """A field with a default gets it; a field without one is still missing."""
    config = ConfigDict({'model': {'d_model': 8}})
    add_fields(config)
    assert config.model.bias is False and config.norm.groups is None
    with pytest.raises(ValueError, match=r'config has no model\.n_layers'):
        resolve(config)


@pytest.mark.parametrize(
    ('path', 'text'), [('norm.groups', '1.5'), ('optim.b2', '(0.9,0.99)'), ('norm.groups', 'None')]
)
def test_flag_with_wrong_type_is_refused(path, text, refusal):
    expected = flag_type_error(path, text, FIELDS[path].types)
    assert refusal(DEFAULT, f'--config.{path}={text}') == expected


def test_unknown_flag_suggests_nearest_field(refusal):
    message = "the config has no field norm.group. Did you mean 'norm.groups'?"
    assert refusal(DEFAULT, '--config.norm.group=4') == message


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('config.optim = {}; config.optimm = {}', "no field optimm. Did you mean 'optim'?"),
        ('config.optimm.lr = 1.0', "reads optimm, which is not set. Did you mean 'optim'?"),
        (
            'config.optim.lr = config.optim.others_lr',
            "published default are unset: use .get('others_lr').",
        ),
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
            'no field model.enable_dropout. Dropout is on if',
        ),
    ],
)
def test_unknown_field_in_file_is_refused_with_line(line, message, refusal, file):
    answer = refusal(file('config.train.steps = 3', line))
    assert message in answer and '/mine.py:7: ' in answer


def test_wrong_type_in_file_is_refused_on_resolve(parse_config, file):
    with pytest.raises(ValueError, match=r"norm\.groups must be int or None; got 'a' of type str"):
        resolve(parse_config(file("config.norm.groups = 'a'")))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('def config(): pass', 'has no get_config()'),
        ('def get_config(): pass', 'returns nothing'),
    ],
)
def test_file_without_config_is_refused_with_advice(text, message, refusal, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, 'config_config', raising=False)  # the file of another test
    (tmp_path / 'mine.py').write_text(text)
    for overrides in ((), ('--config.optim.lr=1',)):
        answer = refusal(f'--config={tmp_path}/mine.py', *overrides)
        assert message in answer and 'A config file defines get_config()' in answer


def test_refused_argument_is_one_line(refusal, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, 'config_config', raising=False)  # the file of another test
    path = tmp_path / 'mine.py'
    path.write_text("def get_config(size):\n    raise ValueError(f'no size {size}')\n")
    assert refusal(f'--config={path}:huge') == f"{path}:2: get_config('huge'): no size huge"
    path.write_text('def get_config():\n    return None\n')
    answer = refusal(f'--config={path}:huge')
    assert answer == f'--config={path} takes no name behind a colon; got :huge. Leave it out.'


def test_value_error_without_argument_keeps_traceback(parse_config, capsys, file):
    with pytest.raises(SystemExit):
        parse_config(file("config.optim.lr = float('fast')"))
    assert 'Traceback' in capsys.readouterr().err


def test_other_file_errors_keep_traceback(parse_config, file):
    with pytest.raises(AttributeError, match='no_such'):
        parse_config(file('flag = "".no_such'))


@pytest.mark.parametrize('sweep_flags', [(), ("--config.sweep={'optim.lr': (0.1, 0.2)}",)])
def test_program_reports_overrides_and_checkpoint_fields(
    sweep_flags, parse_config, tmp_path, monkeypatch
):
    """A run and a sweep use the config that they report."""
    (tmp_path / 'RUN' / 'checkpoints' / '4').mkdir(parents=True)
    write_config(tmp_path / 'RUN', tiny_config({'model.d_ff': 48}))
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(train, 'train', lambda *arguments, **options: started.append(arguments))
    monkeypatch.setattr(
        train,
        'train_sweep',
        lambda base, *arguments, **options: started.append((resolve(base), *arguments)),
    )
    parse_config(DEFAULT, '--config.train.init_from=RUN', '--config.model.n_heads=2', *sweep_flags)
    train.main()
    ((recipe, *_, (overrides, followed)),) = started
    assert overrides == 'changed from configs/default.py: model.n_heads=2, train.init_from=RUN'
    assert followed.startswith('from RUN: model.d_model=16, ') and 'n_heads' not in followed
    assert 'model.d_ff=48' in followed and recipe.model.d_ff == 48


def test_run_reports_overrides_after_header(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, 'open_text', lambda *_: pytest.fail('said'))
    with pytest.raises(pytest.fail.Exception):
        train.train(tiny_config(), tmp_path / 'run', notes=['word', 'more'])
    assert capsys.readouterr().out.splitlines()[1:] == ['word', 'more']


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    return tmp_path


def test_tilde_is_expanded(parse_config, at_home):
    """Bash does not expand it after '='."""
    (at_home / 'mine.py').write_text((ROOT / 'configs' / 'default.py').read_text())
    config = parse_config('--config=~/mine.py', '--workdir', '~/x')
    assert train.WORKDIR.value == f'{at_home}/x'
    assert config.optim.lr and default_workdir(resolve(config)).name.startswith('mine-')
    parse_config('--config=~/mine.py', '--workdir=gs://bucket/~/x')
    assert train.WORKDIR.value == 'gs://bucket/~/x'


def test_unknown_home_is_refused(refusal):
    assert "there is no user 'nobody_here'" in refusal(DEFAULT, '--workdir=~nobody_here/x')
    assert '--config=~nobody_here/a.py is not a file' in refusal('--config=~nobody_here/a.py')


def test_listed_and_repeated_paths_are_expanded(at_home):
    values = flags.FlagValues()
    lists, several = PathListParser(), PathParser()
    flags.DEFINE(lists, 'list', 'runs', '', flag_values=values, serializer=CSV)
    flags.DEFINE_multi(several, None, 'again', [], '', flag_values=values)
    values(['program', '--list=~/a,b,~/c', '--again=~/a', '--again=b'])
    assert values.list == [f'{at_home}/a', 'b', f'{at_home}/c']
    assert values.again == [f'{at_home}/a', 'b']


@pytest.mark.parametrize('text', ['', 'a,,b', ',', 'a, '])
def test_empty_path_in_list_is_refused(text):
    """Catches an unset variable that is read as no folder at all."""
    values = flags.FlagValues()
    flags.DEFINE(PathListParser(), 'workdir', 'runs', '', flag_values=values, serializer=CSV)
    with pytest.raises(flags.Error, match=r'^flag --workdir=.*: must list at least one path') as e:
        values(['program', f'--workdir={text}'])
    assert '\n' not in str(e.value)


def test_local_path_is_no_url_and_has_its_ending(at_home):
    """Catches a folder named `gs:`, and flag and value twice in the message."""
    values = flags.FlagValues()
    for name, endings in (('out', ('.html', '.png')), ('figures', ())):
        flags.DEFINE(LocalPathParser(name, endings), name, None, '', flag_values=values)
    values(['program', '--out=~/a.png', '--figures='])
    assert (values.out, values.figures) == (f'{at_home}/a.png', '')
    for word, message in (
        ('--figures=gs://b/a', r'^--figures=gs://b/a must be a path on this machine\. [^\n]*$'),
        ('--out=gs://b/a.png', r'^--out=gs://b/a.png must be a path on this machine\. [^\n]*$'),
        ('--out=a.md', r'^--out must end in .html, .png; got a.md$'),
    ):
        with pytest.raises(flags.Error, match=message):
            values(['program', word])


@pytest.mark.parametrize('text', ['nan', 'inf', '-inf'])
def test_numbers_must_be_finite(text):
    """absl compares NaN with the bounds, and lets it through."""
    values = flags.FlagValues()
    for name in ('rate', 'config.optim.lr'):
        flags.DEFINE_float(name, None, '', flag_values=values)
    values(['program', f'--config.optim.lr={text}'])
    check_numbers(values)  # a field of the config has its own check
    values(['program', f'--rate={text}'])
    with pytest.raises(ValueError, match=rf'^--rate must be a finite number; got {text}\.'):
        check_numbers(values)


def test_every_file_flag_is_a_path_flag():
    """Catches a path flag that is defined as a string."""
    names = 'workdir|checkpoint|out|page|pages|figure|figures|table|reference|claims'
    text = re.compile(rf"DEFINE_(?:multi_)?(?:string|list)\(\s*'({names})'")
    programs = [*ROOT.glob('eval/**/*.py'), ROOT / 'train.py', ROOT / 'tpu' / 'plan.py']
    sources = {path: path.read_text() for path in programs}
    assert not [(path, match[1]) for path in sources if (match := text.search(sources[path]))]
    assert sum(source.count('define_path(') for source in sources.values()) > 20


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (
            jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nAt'),
            'error: the run does not fit in device memory (RESOURCE_EXHAUSTED: Out of '
            'memory allocating 9 bytes.). Try, in this order: a larger train.microbatches',
        ),
        (
            OSError(errno.ENOSPC, 'No space left on device', '/a/b/file'),
            'error: the disk that holds /a/b is full (',
        ),
        (OSError(errno.EIO, 'Input/output error', '/a'), 'error: [Errno 5] Input/output error'),
    ],
)
def test_run_errors_are_one_line_with_advice(error, message, capsys):
    def main():
        raise error

    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        run_trainer(main)(['train.py'])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT and line.startswith(message)


def test_other_xla_errors_keep_traceback():
    def main():
        raise jax.errors.JaxRuntimeError('INTERNAL: a bug')

    with pytest.raises(jax.errors.JaxRuntimeError):
        run_trainer(main)(['train.py'])


def test_command_words_are_arguments(monkeypatch):
    """Catches `eval.convert import-hf FOLDER` refused as words of another program."""
    argv = ['eval.convert', 'import-hf', 'folder', 'a.b=c']
    monkeypatch.setattr('sys.argv', argv)
    with flagsaver.flagsaver():
        assert parse_flags(argv, has_arguments=True) == argv
        with pytest.raises(SystemExit):
            parse_flags(argv)


HELPS = (
    *('eval', 'eval.catalogue', 'eval.claims', 'eval.compare', 'eval.convert', 'eval.coordinates'),
    *('eval.fit', 'eval.generate', 'eval.noise', 'eval.report', 'eval.rules', 'eval.runs'),
    *('eval.serve', 'eval.sync', 'tpu.plan'),
)


@pytest.mark.full  # a process each
@pytest.mark.parametrize('module', HELPS)
def test_help_is_one_screen(module):
    """--help exits 0 and shows the program's flags first. Catches options of suites, and the whole
    default config.
    """
    command = [sys.executable, '-m', module, '--help']
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = process.stdout.splitlines()
    assert process.returncode == 0 and not process.stderr, process.stderr
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    assert sum(line.startswith('  --') for line in lines) > 1


def test_help_lists_flags_and_text():
    """Catches a default that is lost, and lines that absl adds."""
    values = flags.FlagValues()
    flags.DEFINE_multi_string('word', [], 'A word.', flag_values=values)
    flags.DEFINE_float('rate', 0.1 + 0.2, 'A rate.', flag_values=values)
    flags.DEFINE_bool('dry', False, 'No effect.', flag_values=values)
    description = 'Does this.\n\n    python -m it --word=A\n\nMore of it.\n'
    program_flags = [values[name] for name in ('word', 'rate', 'dry')]
    assert format_help(description, program_flags).splitlines() == [
        'Does this.',
        '',
        '    python -m it --word=A',
        '',
        '  --word=...  A word.',
        '  --rate=0.3  A rate.',
        '  --dry       No effect.',
        '',
        'More of it.',
    ]
