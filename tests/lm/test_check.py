"""Contract: what can be wrong with a config is said before anything is traced."""

import math
import re
import time

import jax
import pytest

from lm.check import check, check_devices
from lm.config import CHOICES, FIELDS, readers_of
from modules.choices import choose, nearest_divisor
from modules.losses import AUXILIARIES
from modules.optim import OPTIMIZERS
from modules.options import LARGEST_INT, options
from modules.params import ROLES
from tests.helpers import checked_config, tiny_config


@pytest.fixture(autouse=True)
def nothing_is_traced():
    """Fails the test where JAX traces or compiles anything."""
    seen = []

    def listen(event, duration, **_):
        del duration
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in seen if 'compile' in event or 'trace' in event]


def test_tiny_config_passes():
    check(tiny_config())


NAMES = {path: tuple(choice.table) for path, choice in CHOICES.items()} | {
    path: field.option.choices
    for path, field in FIELDS.items()
    if field.option and field.option.choices
}
NUMBERS = [path for path, field in FIELDS.items() if {int, float} & set(field.types)]
BOUNDED = [path for path in NUMBERS if FIELDS[path].option]
LLAMA3 = {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}


def reader_of(path):
    """{field: name} of a part that reads the option, if any part does."""
    section, name = path.split('.')
    for field, choice in CHOICES.items():
        for row, part in choice.table.items():
            terms = [AUXILIARIES[term] for term in getattr(part, 'auxiliary', ())]
            of_term = section == 'loss' and any(name in options(term) for term in terms)
            if of_term or (choice.section == section and name in options(part)):
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
    assert ours - {'train.init_from', 'reparam.roles'} == NAMES.keys()


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
    least, most = FIELDS[path].option.least, FIELDS[path].option.most
    (kind,) = {int, float} & set(FIELDS[path].types)
    if kind is int and most == math.inf:
        most = LARGEST_INT
    fitting = {
        'model.d_model': {'model.n_heads': 1, 'model.n_kv_heads': 1, 'model.position': 'none'},
        'model.n_heads': {'model.n_kv_heads': 1},
        'mlp.n_experts': {'mlp.experts_per_token': 1},
        'data.mask_ratio_most': {'data.mask_ratio_least': 0.0},
        'data.span_most': {'data.span_least': 1},
        'attention.rope_original_length': LLAMA3,
        'attention.rope_low_frequency_factor': LLAMA3,
        'attention.rope_high_frequency_factor': LLAMA3
        | {'attention.rope_low_frequency_factor': 0.0},
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
            check(tiny_config({path: kind(value)} | changes))
    check(tiny_config({path: kind(least)} | changes))


def test_every_number_has_a_bound():
    """Numbers of the data section are checked by `lm.data`."""
    free = {path for path in NUMBERS if path not in BOUNDED}
    assert not {path for path in free if not path.startswith('data.')}
    for path in BOUNDED:
        bounds = FIELDS[path].option.least, FIELDS[path].option.most
        assert bounds != (-math.inf, math.inf), path


@pytest.mark.parametrize('path', [path for path, field in FIELDS.items() if field.of_parts])
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
        assert path in readers_of(config)
    checked_config({reader[0]: reader[1]})


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'model.attention': 'linear', 'kernels.attention': 'blocked'},
            r'kernels.attention=blocked would change nothing: model.attention=linear',
        ),
        (
            {'kernels.linear_attention': 'chunked'},
            r'kernels.linear_attention=chunked would change nothing: model.attention=softmax',
        ),
        ({'attention.full_every': 2}, r'attention.full_every=2 .*window is None'),
        ({'attention.window': 0}, r'attention.window must be between 1 and .*got 0'),
        (
            {'attention.qk_norm_over': 'model', 'model.qk_norm': 'none'},
            r'qk_norm_over=model is about model.qk_norm, which is none',
        ),
        (
            {'attention.softcap': 30.0, 'kernels.attention': 'cudnn', 'model.dtype': 'bfloat16'},
            r'kernels.attention=cudnn does not serve softcap=30.0; those that do: .*blocked',
        ),
        (
            {'model.attention': 'nala', 'model.position': 'alibi'},
            r'model.position=alibi adds to the logits of softmax attention.*Choose',
        ),
        (
            {'model.d_model': 48, 'model.n_heads': 5, 'model.n_kv_heads': 5},
            r'n_heads must divide model.d_model; got 5 heads for a width of 48. .*works: [46]\.',
        ),
        (
            {'model.n_heads': 8, 'model.n_kv_heads': 3},
            r'n_kv_heads must divide model.n_heads; got 3 for 8 heads. .*works: [24]\.',
        ),
        (
            {'model.n_heads': 2, 'model.n_kv_heads': 4},
            r'n_kv_heads must divide model.n_heads; got 4 for 2 heads. .*works: 2\.',
        ),
        (
            {'model.d_model': 6, 'model.n_heads': 2},
            r'head width d_model / n_heads must be even; got 3',
        ),
        (
            {'attention.rope_fraction': 0.3},
            r'rope_fraction=0.3 of the head width .* = 8 is 2.4 .*works: 0.25 \(2 features\)',
        ),
        (
            {'attention.rope_factor': 2.0},
            'rope_factor=2.0 is read with attention.rope_scaling=linear.llama3 alone, and .* none',
        ),
        (
            {'attention.rope_scaling': 'linear', 'attention.rope_factor': 2.0}
            | {'attention.rope_original_length': 4096},
            'rope_original_length=4096 is read with attention.rope_scaling=llama3 alone, .* linear',
        ),
        (
            {'attention.rope_scaling': 'llama3'},
            'rope_scaling=llama3 divides frequencies by attention.rope_factor, which is 1',
        ),
        (
            LLAMA3 | {'attention.rope_low_frequency_factor': 4.0},
            'rope_low_frequency_factor must be below .*rope_high_frequency_factor; got 4.0 and 4.0',
        ),
        (
            {'model.position': 'alibi', 'model.attention': 'linear'},
            'model.position=alibi adds to the logits .*attention=linear has none. Choose .*softmax',
        ),
        (
            {'data.batch_size': 8, 'train.microbatches': 5},
            r'microbatches must divide data.batch_size; got 5 for 8 sequences. .*works: 4\.',
        ),
        (
            {'model.norm': 'powernorm', 'norm.groups': 5},
            r'norm.groups must divide the width 16 that model.norm=powernorm .*; got 5 .*: 4\.',
        ),
        (
            {'model.norm': 'seednorm', 'norm.heads': 6},
            r'norm.heads must divide the width 16 that model.norm=seednorm .*; got 6 .*: 4\.',
        ),
        (
            {'model.qk_norm': 'evonorm_s0', 'norm.groups': 16},
            'norm.groups must divide the width 8 that model.qk_norm=evonorm_s0 normalizes; got 16',
        ),
        (
            {'model.norm': 'evonorm_s0', 'norm.groups': 16},
            'norm.groups=16 leaves model.norm=evonorm_s0 groups of one feature each',
        ),
        (
            {'model.norm': 'ghost_batchnorm', 'norm.ghost_batches': 3},
            'norm.ghost_batches must divide the sequences of a microbatch; got 3 for 8. .*: [24]',
        ),
        (
            {'model.norm': 'ghost_batchnorm', 'train.microbatches': 4},
            'norm.ghost_batches must divide the sequences of a microbatch; got 4 for 2. .*: 2',
        ),
        (
            {'norm.window': 2},
            r'norm.window=2 is read by no part of this config .model.norm=rmsnorm, .*=unified',
        ),
        (
            {'model.norm': 'crmsnorm', 'model.d_model': 15, 'model.n_heads': 1}
            | {'model.n_kv_heads': 1, 'model.position': 'none'},
            'model.norm=crmsnorm keeps d_model - 1 .* must be even; got 15. Nearest .* 16',
        ),
        (
            {'model.mix_fraction': 0.5},
            r'model.mix_fraction=0.5 .*\(model.placement=pre\).* read with model.placement=mix',
        ),
        (
            {'model.placement': 'hybrid'},
            'attention.norm_values normalizes values by model.qk_norm, which is none .*=hybrid',
        ),
        (
            {'model.mlp': 'moe', 'mlp.experts_per_token': 5},
            'mlp.experts_per_token must be at most mlp.n_experts; got 5 of 4',
        ),
        (
            {'model.placement': 'wide', 'model.bias': True},
            'model.bias=True: experts .model.mlp=moe. have no biases',
        ),
        (
            {'model.placement': 'wide', 'model.mlp': 'dense'},
            'model.placement=wide needs model.mlp=moe; got dense',
        ),
        (
            {'model.placement': 'wide', 'model.reparam': 'weight_norm'},
            'model.placement=wide needs model.reparam=shared; got weight_norm',
        ),
        (
            {'model.reparam': 'shared+shared'},
            r'model.reparam=shared\+shared names a row twice',
        ),
        ({'model.reparam': 'none+shared'}, 'of which one stands alone'),
        (
            {'model.qk_norm': 'rmsnorm:bias=True'},
            'model.qk_norm=rmsnorm:bias: rmsnorm has no such option, only eps, scale',
        ),
        (
            {'model.qk_norm': 'rmsnorm:eps=2'},
            'model.qk_norm=rmsnorm:eps must be between 0 and 1; got 2.0',
        ),
        ({'model.qk_norm': 'rmsnorm:scale'}, 'options follow a name as NAME:OPTION=VALUE'),
        (
            {'model.reparam': 'weight_norm', 'scaling.init_scale': 0.0},
            'model.reparam=weight_norm divides by .*scaling.init_scale must be at least .*got 0.0',
        ),
        (
            {'model.reparam': 'shared+weight_norm', 'scaling.init_scale': 1e-20},
            'model.reparam=weight_norm divides by the norms',
        ),
        (
            {'optim.schedule': 'exponential', 'optim.final_lr_fraction': 0.0},
            'never gets to 0: optim.final_lr_fraction must be above 0; got 0. .*schedule=linear',
        ),
        (
            {'optim.schedule': 'cyclic', 'optim.cycles': 9, 'optim.warmup_steps': 3},
            'optim.cycles must leave .*; got 9 for the 17 steps .* The most that works: 8',
        ),
        ({'mesh.data': 0}, 'mesh.data must be a number of devices, or -1 for all; got 0'),
        (
            {'optim.embedding_gradient_shrink': 0.1, 'model.tie_embeddings': True},
            r'embedding_gradient_shrink is of the embedding .*tie_embeddings=True',
        ),
        (
            {'loss.name': 'spherical_z', 'model.logit_softcap': 30.0},
            r'loss.name=spherical_z .* needs model.logit_softcap=0, got 30.0',
        ),
        (
            {'loss.name': 'adversarial_comp_sum', 'model.logit_softcap': 30.0},
            r'loss.name=adversarial_comp_sum .* needs model.logit_softcap=0, got 30.0',
        ),
        ({'optim.others_lr': -1.0}, r'optim.others_lr must be between 0 and .*got -1.0'),
        (
            {'optim.others': 'muon'},
            r'optim.others=muon is not for .* embedding, readout, vector, only hidden. '
            r'Give it to .*optim.name=muon',
        ),
        ({'loss.chunk': -1}, r'loss.chunk must be between 0 and .*got -1'),
        (
            {'optim.average': 'schedule_free', 'model.reparam': 'normalize_and_project'},
            r'average=schedule_free steers .* model.reparam=normalize_and_project maps them .*'
            r'Choose optim.average=ema',
        ),
        (
            {'optim.average': 'schedule_free', 'optim.schedule_free_beta': 1.0},
            'optim.schedule_free_beta must be between 0.01 and .*got 1.0',
        ),
        (
            {'optim.average': 'ema', 'optim.average_decay': 1.0},
            'optim.average_decay must be between 0 and .*got 1.0',
        ),
    ],
)
def test_fields_that_do_not_fit_each_other(changes, said):
    with pytest.raises(ValueError, match=said):
        check(tiny_config(changes))


def test_a_prime_width_is_answered_at_once():
    """A search through all numbers up to it would take minutes."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r'Nearest that works: 1\.'):
        check(tiny_config({'model.d_model': 10**9 + 7}))
    assert time.process_time() - began < 1
    assert [nearest_divisor(24, n) for n in (1, 5, 7, 9, 11, 100)] == [1, 4, 6, 8, 12, 24]


def test_odd_head_width_is_fine_without_rope():
    check(tiny_config({'model.d_model': 6, 'model.n_heads': 2, 'model.position': 'learned'}))


@pytest.mark.parametrize(
    ('rows', 'parts', 'devices', 'nearest'), [(12, 1, 8, 16), (3, 1, 8, 8), (24, 2, 8, 32)]
)
def test_batch_that_devices_cannot_share(rows, parts, devices, nearest):
    config = tiny_config({'data.batch_size': rows, 'train.microbatches': parts})
    with pytest.raises(ValueError, match=r'data\.batch_size must be a multiple') as error:
        check_devices(config, devices, 1)
    assert f'{parts} * {devices}; got {rows}.' in str(error.value)
    assert f'Nearest that works: {nearest}.' in str(error.value)
    fitting = {'data.batch_size': nearest, 'train.microbatches': parts}
    check_devices(tiny_config(fitting), devices, 1)


def test_devices_that_processes_cannot_share():
    with pytest.raises(ValueError, match='8 devices do not spread evenly over 3 processes'):
        check_devices(tiny_config(), 8, 3)
