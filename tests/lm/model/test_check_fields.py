"""Contract: errors in a single field are reported before anything is traced."""

import math
import re

import pytest

from lm.config.fields import CHOICES, FIELDS
from lm.config.groups import OPTIMIZER, SCHEDULE_OPTIONS
from lm.model.check import check
from modules.choices import choose
from modules.losses import AUXILIARIES
from modules.optim import OPTIMIZERS, SCHEDULES
from modules.optim.groups import GROUPS
from modules.options import LARGEST_INT, declared_options
from modules.params import ROLES
from tests.helpers import checked_config, tiny_config

pytestmark = pytest.mark.usefixtures('nothing_is_traced')

NAMES = {path: tuple(choice.table) for path, choice in CHOICES.items()} | {
    path: field.option.choices
    for path, field in FIELDS.items()
    if field.option and field.option.choices
}
NUMBERS = [path for path, field in FIELDS.items() if {int, float} & set(field.types)]
BOUNDED = [path for path in NUMBERS if FIELDS[path].option]
STABLE = 'warmup_stable_decay'
COMPLETE_P = {'scaling.name': 'complete_p', 'scaling.base_width': 8, 'scaling.base_depth': 1}
LLAMA3 = {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}
YARN = LLAMA3 | {'attention.rope_scaling': 'yarn'}


def find_reader(path):
    """Returns {field: name} of a part that reads the option, or {}."""
    section, name = path.split('.')
    if name not in declared_options(SCHEDULES[STABLE]) and name.endswith(SCHEDULE_OPTIONS):
        return {'optim.schedule': STABLE}  # a setting of a group
    for field, choice in CHOICES.items():
        for row, part in choice.table.items():
            terms = [AUXILIARIES[term] for term in getattr(part, 'auxiliary', ())]
            is_read_by_term = section == 'loss' and any(
                name in declared_options(term) for term in terms
            )
            if is_read_by_term or (choice.section == section and name in declared_options(part)):
                return {field: row}
    return {}


@pytest.mark.parametrize('path', NAMES)
def test_misspelt_name_lists_choices_and_nearest(path):
    """Covers every table: a table without lookup would accept the typo."""
    name = max(NAMES[path], key=len)
    with pytest.raises(ValueError, match=re.escape(f"Did you mean '{name}'")) as error:
        check(tiny_config({**find_reader(path), path: name + 'x'}))
    assert str(error.value).startswith(path + ' must be one of ')
    assert all(choice in str(error.value) for choice in NAMES[path])


@pytest.mark.parametrize('path', NAMES)
def test_every_table_name_passes(path):
    """The exceptions are optimizers for hidden matrices alone, as optimizer of the others."""
    for name in NAMES[path]:
        changes = {**find_reader(path), path: name}
        if path.endswith('_scale') and name in ('mean', 'median'):  # of ternary weights
            changes[path.replace('_scale', '_format')] = 'int2'
        if path == 'optim.others' and set(OPTIMIZERS[name].roles) != set(ROLES):
            with pytest.raises(ValueError, match=f'optim.others={name} does not support'):
                checked_config(changes)
        else:
            checked_config(changes)


def test_every_choice_is_looked_up():
    """Every string field is a name, a path, or checked by `lm.data`."""
    strings = {path for path, field in FIELDS.items() if str in field.types}
    ours = {path for path in strings if not path.startswith('data.')} | {'data.objective'}
    ours |= {'data.loss_on', 'data.missing_text'}
    lists = {f'attention.rope_{which}_factor' for which in ('short', 'long')}
    lists |= {'optim.stages', *(f'optim.{group}_{OPTIMIZER}' for group in GROUPS)}
    lists |= {'model.pattern'}  # tests/lm/config/test_pattern.py
    lists |= {'train.stages'}  # tests/lm/config/test_stages.py
    free = {'train.init_from', 'train.profile', 'reparam.roles', 'loss.token_weights'}
    free |= {'train.branch_from', 'train.checkpoint_steps'}  # test_checkpoint_steps.py
    # tests/lm/run/test_held_out_texts.py, tests/eval/evaluation/test_during_training.py
    free |= {'eval.texts', 'eval.suites', 'eval.suite_options'}
    free |= {f'kernels.{operand}_format' for operand in 'xwg'}  # test_low_precision.py
    free |= {f'kernels.{operand}_block' for operand in ('x', 'w', 'g', 'dx_w')}
    free |= {'kernels.wide_layers'}
    assert ours - free - lists == NAMES.keys()


def test_name_from_another_field_names_that_field():
    """For example Schedule-Free, which other programs list among optimizers."""
    with pytest.raises(ValueError, match=r"'schedule_free' is a value of optim.average"):
        tiny_config({'optim.name': 'schedule_free'})
    with pytest.raises(ValueError, match=r"'layernorm' is a value of model.norm\.$"):
        tiny_config({'model.placement': 'layernorm'})


def test_dissimilar_name_suggests_nothing():
    with pytest.raises(ValueError, match=r'must be one of .*got') as error:
        choose({'rmsnorm': 1}, 'qqq', 'model.norm')
    assert 'Did you mean' not in str(error.value)


@pytest.mark.parametrize('path', BOUNDED)
def test_values_beyond_bounds_are_refused(path):
    """The minimum itself passes: catches < instead of <=."""
    minimum, maximum = FIELDS[path].option.minimum, FIELDS[path].option.maximum
    (kind,) = {int, float} & set(FIELDS[path].types)
    if kind is int and maximum == math.inf:
        maximum = LARGEST_INT
    fitting = {
        'model.d_model': {'model.n_heads': 1, 'model.n_kv_heads': 1, 'model.position': 'none'},
        'model.n_heads': {'model.n_kv_heads': 1},
        'model.head_dim': {'model.position': 'none'},
        'scaling.base_width': {'scaling.name': 'mup', 'scaling.base_heads': 1},
        'scaling.base_depth': COMPLETE_P,
        'scaling.base_heads': {'scaling.name': 'mup', 'scaling.base_width': 8},
        'scaling.depth_alpha': COMPLETE_P,
        'optim.momentum_start': {'optim.name': 'muon', 'optim.momentum_warmup_steps': 5},
        'optim.momentum_warmup_steps': {'optim.name': 'muon', 'optim.momentum_start': 0.5},
        'optim.outer_lr': {'train.steps': 30},
        'optim.outer_momentum': {'train.steps': 30},
        'kernels.recurrence_chunk': {'model.attention': 'gla'},
        'attention.key_heads': {'attention.value_heads': 1},
        'attention.value_heads': {'attention.key_heads': 1},
        'mlp.n_experts': {'mlp.experts_per_token': 1},
        'mlp.bias_rate': {'mlp.balance': 'bias'},
        'loss.router_z_loss': {'mlp.router_z_loss': True},
        'eval.texts_every': {'eval.texts': "{'a': 'python'}"},
        'eval.texts_tokens': {'eval.texts': "{'a': 'python'}"},
        'eval.suites_every': {'eval.suites': 'layers'},
        'train.spike_window': {'train.spike_from': 2},
        'train.spike_from': {'train.spike_window': 10_000},
        'data.mask_ratio_most': {'data.mask_ratio_least': 0.0},
        'data.span_most': {'data.span_least': 1},
        'attention.rope_original_length': LLAMA3,
        'attention.rope_low_frequency_factor': LLAMA3,
        'attention.rope_high_frequency_factor': LLAMA3
        | {'attention.rope_low_frequency_factor': 0.0},
        'attention.rope_beta_fast': YARN | {'attention.rope_beta_slow': 1e-37},
        'attention.rope_beta_slow': YARN,
        'attention.rope_attention_factor': YARN,
        'attention.rope_local_base': {'attention.window': 4, 'attention.full_every': 2},
        'attention.rope_fraction': {'model.d_model': 200}
        | {'model.n_heads': 1, 'model.n_kv_heads': 1},
    }
    changes = find_reader(path) | fitting.get(path, {})
    beyond = [minimum - 1, math.nan, math.nextafter(maximum, math.inf)]
    if kind is int:
        beyond = [minimum - 1, maximum + 1]
    elif maximum == math.inf:
        beyond = beyond[:1]
    if minimum - 1 == minimum:
        beyond = [math.nan]
    for value in map(kind, beyond):
        message = f'{re.escape(path)} must be .+; got {re.escape(str(value))}$'
        with pytest.raises(ValueError, match=message):
            check(tiny_config(changes | {path: value}))
    check(tiny_config(changes | {path: kind(minimum)}))


def test_every_number_has_bounds():
    """`lm.data` checks the numbers of the data section."""
    free = {path for path in NUMBERS if path not in BOUNDED}
    assert not {path for path in free if not path.startswith('data.')}
    for path in BOUNDED:
        bounds = FIELDS[path].option.minimum, FIELDS[path].option.maximum
        assert bounds != (-math.inf, math.inf), path


@pytest.mark.parametrize('path', [path for path, field in FIELDS.items() if field.is_part_option])
def test_unread_option_names_its_readers(path):
    """Catches an option that silently changes nothing."""
    values = {int: 2, float: 0.5, bool: True}
    texts = ['hidden', *FIELDS[path].option.choices]  # roles have no choices
    value = values.get(FIELDS[path].types[0]) or texts[-1]
    (reader,) = find_reader(path).items()
    unread = {
        'model.qk_norm': 'rmsnorm',
        'model.placement': 'pre',
        'model.norm': 'none',
        'optim.schedule': 'constant',
    }
    changes = {field: name for field, name in unread.items() if (field, name) != reader}
    try:
        config = tiny_config(changes | {path: value})
    except ValueError as error:
        message = str(error)
        assert message.startswith(f'{path}={value} is not used by this config')
        assert f'{reader[0]}=' in message.split('It is used with')[1]
    else:  # all rows of its tables read it
        assert path in config.readers
    checked_config({reader[0]: reader[1]})
