"""Contract: errors about a name or a flag suggest a valid one."""

import ast

import pytest

from lm.config.fields import FIELDS
from lm.config.other_programs import foreign_names
from lm.config.resolve import resolve
from lm.config.suggestions import check_flags, field_hint, flag_type_error, sweep_hint, tune_hint
from lm.model.check import check
from lm.study.plan.cells import expand_sweep
from modules.choices import ROWS_BY_ALIAS
from tests.helpers import tiny_config, tiny_raw
from tests.lm.model.test_check_fields import NAMES


@pytest.mark.parametrize(
    ('path', 'fields'),
    [
        ('optim.learning_rate', ["'optim.lr'"]),
        ('lr', ["'optim.lr'"]),
        ('train.batch_size', ["'data.batch_size'"]),
        ('seed', ["'data.seed'", "'train.seed'"]),
        ('warmup', ["'norm.warmup'", "'optim.warmup_steps'"]),
        ('model.nrom', ["'model.norm'"]),
        ('stepps', ["'train.steps'"]),
        ('hidden_size', ["'model.d_model'"]),
        ('model.D', ["'model.d_model'"]),
    ],
)
def test_unknown_field_suggests_fields(path, fields):
    hint = field_hint(path, FIELDS)
    assert hint == f' Did you mean {" or ".join(fields)}?'


@pytest.mark.parametrize('path', ['qqq', 'train.max_length_of_it', 'data.path', 'optim.matrix'])
def test_dissimilar_field_suggests_nothing(path):
    assert field_hint(path, FIELDS) == ''


def test_aliases_differ_from_field_names():
    names = {name for table in NAMES.values() for name in table}
    shared = {'seed', 'warmup'}  # names of several fields
    assert foreign_names().fields.keys() & {path.split('.')[1] for path in FIELDS} == shared
    assert set(ROWS_BY_ALIAS.values()) <= names
    rows = sorted(ROWS_BY_ALIAS.keys() & names)
    assert not rows, f'{rows} are rows now: remove these aliases from modules/choices.py'


@pytest.mark.parametrize(
    ('path', 'name', 'suggestion'),
    [
        ('model.placement', 'sandwich', 'peri'),
        ('model.placement', 'Pre-LN', 'pre'),
        ('model.placement', 'preln', 'pre'),
        ('model.placement', 'postnorm', 'post'),
        ('model.placement', 'olmo2', 'output'),
        ('optim.name', 'adam', 'adamw'),
        ('optim.schedule', 'cosine', 'warmup_cosine'),
        ('model.dtype', 'bf16', 'bfloat16'),
        ('model.norm', 'batch_norm', 'batchnorm'),
    ],
)
def test_common_name_suggests_our_name(path, name, suggestion):
    with pytest.raises(ValueError, match=f"Did you mean '{suggestion}'"):
        check(tiny_config({path: name}))


def test_several_names_suggest_a_sweep():
    with pytest.raises(ValueError, match=r"""sweep="{'model.norm': \('rmsnorm', 'layernorm'\)}"""):
        tiny_config({'model.norm': 'rmsnorm,layernorm'})


@pytest.mark.parametrize(
    'text',
    [
        '{optim.lr: (1e-3,3e-3)}',
        '{optim.lr: [1e-3,3e-3]}',
        'optim.lr=1e-3,3e-3',
        'optim.lr=(1e-3, 3e-3)',
        "{'optim.lr': (10**-3, 3e-3)}",
    ],
)
def test_invalid_sweep_suggests_a_working_flag(text):
    flag = sweep_hint(text, FIELDS)
    literal = flag.split('--config.sweep="')[1].split('"')[0]
    expected = [{'optim.lr': 1e-3}, {'optim.lr': 3e-3}]
    assert [
        cell.changes for cell in expand_sweep(tiny_raw(), ast.literal_eval(literal))
    ] == expected
    with pytest.raises(ValueError, match='must be a Python literal') as error:
        expand_sweep(tiny_raw(), text)
    assert flag in str(error.value)


@pytest.mark.parametrize(
    ('path', 'text', 'message'),
    [
        (
            'optim.lr',
            '(1e-3,3e-3)',
            "number; got '(1e-3,3e-3)'. To try several values, use a sweep",
        ),
        ('train.seed', '0,1', """--config.sweep="{'train.seed': (0, 1)}\""""),
        ('train.steps', '1e3', "must be a whole number; got '1e3'. Write 1000."),
        ('train.steps', '1.5', "must be a whole number; got '1.5'."),
        ('model.bias', 'maybe', "must be True or False; got 'maybe'."),
        ('norm.groups', 'None', 'For None, leave the flag out.'),
    ],
)
def test_invalid_value_suggests_a_valid_one(path, text, message):
    assert message in flag_type_error(path, text, FIELDS[path].types)


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--config.lr=1', "no field lr. Did you mean 'optim.lr'"),
        ('-config.optim.learning_rate', "Did you mean 'optim.lr'"),
        ('--config.model=3', 'model is a section'),
        ('--config=gpt2', r'such as configs/llama_124m\.py'),
        ('--config=configs/defalt.py', "is not a file. .* Did you mean 'configs/default.py'"),
        ('--config.tunes={}', "no field tunes. Did you mean 'tune'"),
        ('--config.sweeps={}', "no field sweeps. Did you mean 'sweep'"),
    ],
)
def test_unknown_flag_is_refused(flag, message):
    with pytest.raises(ValueError, match=message):
        check_flags(['train.py', flag], FIELDS)


@pytest.mark.parametrize(
    ('flags', 'suggestion'),
    [
        ('--config.tune.optim.lr=None', {'tune': {'optim.lr': None}}),
        ('--config.tune.lr=1e-3 --config.tune.seeds=4', {'tune': {'optim.lr': 1e-3, 'seeds': 4}}),
        ('--config.tune.budget 30', {'tune': {'optim.lr': None, 'budget': 30}}),
        (
            "--config.tune={'optim.b2':0.9} --config.tune.budget=30",
            {'tune': {'optim.b2': 0.9, 'budget': 30}},
        ),
        ('--config.sweep.optim.lr=1e-3,3e-3', {'sweep': {'optim.lr': (1e-3, 3e-3)}}),
        ('--config.sweep.train.seed=(0,1)', {'sweep': {'train.seed': (0, 1)}}),
    ],
)
def test_partial_dict_suggests_the_whole_dict(flags, suggestion):
    ((name, expected),) = suggestion.items()
    with pytest.raises(ValueError, match=f'config.{name} is one dict') as error:
        check_flags(['train.py', *flags.split()], FIELDS)
    literal = str(error.value).split(f'--config.{name}="')[1].split('"')[0]
    assert ast.literal_eval(literal) == expected


def test_flags_that_work_pass():
    """An argument of the config file, a sweep, values apart from their flag."""
    for argv in (
        ['--config=configs/default.py:argument', '--config.optim.lr=1', '--workdir=x'],
        ['--config', 'configs/default.py', '--config.optim.lr', '1', '--config.sweep={}'],
        ['--noconfig.model.bias', '--config.tune={}', '--config.sweep', '{}'],
    ):
        check_flags(['train.py', *argv], FIELDS)


def test_unknown_section_suggests_a_field():
    with pytest.raises(ValueError, match=r"no field lr\. Did you mean 'optim.lr'"):
        resolve(tiny_raw() | {'lr': 1e-3})


def test_invalid_tune_suggests_a_dict():
    for tune in (['optim.lr'], 'optim.lr', '{optim.lr: None}'):
        assert tune_hint(tune, FIELDS) == """Did you mean --config.tune="{'optim.lr': None}"?"""
    for tune in (3, ['eps']):  # no name; and one of several fields
        assert tune_hint(tune, FIELDS).startswith('For example: --config.tune=')
