"""Contract: what can be wrong with one field of a config is said before anything is traced."""

import math
import re

import pytest

from lm.config.fields import CHOICES, FIELDS
from lm.model.check import check
from modules.choices import choose
from modules.losses import AUXILIARIES
from modules.optim import OPTIMIZERS
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
COMPLETE_P = {'scaling.name': 'complete_p', 'scaling.base_width': 8, 'scaling.base_depth': 1}
LLAMA3 = {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}
YARN = LLAMA3 | {'attention.rope_scaling': 'yarn'}


def reader_of(path):
    """{field: name} of a part that reads the option, if any part does."""
    section, name = path.split('.')
    for field, choice in CHOICES.items():
        for row, part in choice.table.items():
            terms = [AUXILIARIES[term] for term in getattr(part, 'auxiliary', ())]
            of_term = section == 'loss' and any(name in declared_options(term) for term in terms)
            if of_term or (choice.section == section and name in declared_options(part)):
                return {field: row}
    return {}


@pytest.mark.parametrize('path', NAMES)
def test_misspelt_name_gives_the_choices_and_the_nearest(path):
    """Every table: one that is not looked up would let the typo through."""
    name = max(NAMES[path], key=len)
    with pytest.raises(ValueError, match=f"Did you mean '{name}'") as error:
        check(tiny_config({**reader_of(path), path: name + 'x'}))
    assert str(error.value).startswith(path + ' must be one of ')
    assert all(choice in str(error.value) for choice in NAMES[path])


@pytest.mark.parametrize('path', NAMES)
def test_every_name_in_every_table_passes(path):
    """But those of hidden matrices as the optimizer of the others."""
    for name in NAMES[path]:
        changes = {**reader_of(path), path: name}
        if path == 'optim.others' and set(OPTIMIZERS[name].roles) != set(ROLES):
            with pytest.raises(ValueError, match=f'optim.others={name} is not for'):
                checked_config(changes)
        else:
            checked_config(changes)


def test_every_choice_is_looked_up():
    """A string field of the config is a name, a path, or one that `lm.data` checks or reads."""
    strings = {path for path, field in FIELDS.items() if str in field.types}
    ours = {path for path in strings if not path.startswith('data.')} | {'data.objective'}
    ours |= {'data.loss_on'}
    lists = {f'attention.rope_{which}_factor' for which in ('short', 'long')}
    assert ours - {'train.init_from', 'train.profile', 'reparam.roles'} - lists == NAMES.keys()


def test_a_name_of_another_field_is_answered_with_that_field():
    """As Schedule-Free, which others have among optimizers."""
    with pytest.raises(ValueError, match=r"'schedule_free' is one of optim.average"):
        tiny_config({'optim.name': 'schedule_free'})
    with pytest.raises(ValueError, match=r"'layernorm' is one of model.norm\.$"):
        tiny_config({'model.placement': 'layernorm'})


def test_unlike_name_suggests_nothing():
    with pytest.raises(ValueError, match=r'must be one of .*got') as error:
        choose({'rmsnorm': 1}, 'qqq', 'model.norm')
    assert 'Did you mean' not in str(error.value)


@pytest.mark.parametrize('path', BOUNDED)
def test_nothing_beyond_the_bounds_passes(path):
    """And the least that may be passes: catches < where <= is meant."""
    least, most = FIELDS[path].option.minimum, FIELDS[path].option.maximum
    (kind,) = {int, float} & set(FIELDS[path].types)
    if kind is int and most == math.inf:
        most = LARGEST_INT
    fitting = {
        'model.d_model': {'model.n_heads': 1, 'model.n_kv_heads': 1, 'model.position': 'none'},
        'model.n_heads': {'model.n_kv_heads': 1},
        'model.head_dim': {'model.position': 'none'},
        'scaling.base_width': {'scaling.name': 'mup', 'scaling.base_heads': 1},
        'scaling.base_depth': COMPLETE_P,
        'scaling.base_heads': {'scaling.name': 'mup', 'scaling.base_width': 8},
        'scaling.depth_alpha': COMPLETE_P,
        'mlp.n_experts': {'mlp.experts_per_token': 1},
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
    changes = reader_of(path) | fitting.get(path, {})
    beyond = [least - 1, math.nan, math.nextafter(most, math.inf)]
    if kind is int:
        beyond = [least - 1, most + 1]
    elif most == math.inf:
        beyond = beyond[:1]
    if least - 1 == least:
        beyond = [math.nan]
    said = re.escape(f'{path} must be between {least} and {most}; got')
    for value in beyond:
        with pytest.raises(ValueError, match=said):
            check(tiny_config(changes | {path: kind(value)}))
    check(tiny_config(changes | {path: kind(least)}))


def test_every_number_has_a_bound():
    """Numbers of the data section are checked by `lm.data`."""
    free = {path for path in NUMBERS if path not in BOUNDED}
    assert not {path for path in free if not path.startswith('data.')}
    for path in BOUNDED:
        bounds = FIELDS[path].option.minimum, FIELDS[path].option.maximum
        assert bounds != (-math.inf, math.inf), path


@pytest.mark.parametrize('path', [path for path, field in FIELDS.items() if field.is_part_option])
def test_an_option_that_no_chosen_part_reads_is_refused(path):
    """It names the parts that would. Catches one that changes nothing in silence."""
    values = {int: 2, float: 0.5, bool: True}
    texts = ['hidden', *FIELDS[path].option.choices]  # the one without choices is of roles
    value = values.get(FIELDS[path].types[0]) or texts[-1]
    (reader,) = reader_of(path).items()
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
        said = str(error)
        assert said.startswith(f'{path}={value} is read by no part of this config')
        assert f'{reader[0]}=' in said.split('It is read with')[1]
    else:  # what all rows of its tables read
        assert path in config.readers
    checked_config({reader[0]: reader[1]})
