"""Contract: conflicts between fields, or with the devices, are reported before anything is
traced.
"""

import time

import pytest

from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.model.check import check
from modules.choices import nearest_divisor
from tests.helpers import tiny_config
from tests.lm.model.test_check_fields import LLAMA3

pytestmark = pytest.mark.usefixtures('nothing_is_traced')


def test_tiny_config_passes():
    check(tiny_config())


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'model.attention': 'linear', 'kernels.attention': 'blocked'},
            r'kernels.attention=blocked would have no effect: model.attention=linear',
        ),
        (
            {'kernels.linear_attention': 'chunked'},
            r'kernels.linear_attention=chunked would have no effect: model.attention=softmax',
        ),
        (
            {'model.attention': 'gla', 'kernels.linear_attention': 'chunked'},
            r'kernels.linear_attention=chunked would have no effect: model.attention=gla',
        ),
        (
            {'kernels.recurrence': 'reference', 'model.attention': 'linear'},
            r'kernels.recurrence=reference would have no effect: model.attention=linear',
        ),
        ({'attention.full_every': 2}, r'attention.full_every=2 .*window=None'),
        (
            {'attention.window': 2, 'attention.full_every': 2, 'attention.full_at': 2},
            r'full_at=2 must be below attention.full_every=2',
        ),
        ({'attention.window': 0}, r'attention.window must be at least 1; got 0'),
        (
            {'attention.qk_norm_over': 'model', 'model.qk_norm': 'none'},
            r'qk_norm_over=model needs a norm .* model.qk_norm=none',
        ),
        (
            {'attention.softcap': 30.0, 'kernels.attention': 'cudnn', 'model.dtype': 'bfloat16'},
            r'kernels.attention=cudnn does not support softcap=30.0. These kernels do: .*blocked',
        ),
        (
            {'model.attention': 'nala', 'model.position': 'alibi'},
            r'model.position=alibi adds to the logits of softmax attention.*Choose',
        ),
        (
            {'model.d_model': 48, 'model.n_heads': 5, 'model.n_kv_heads': 5},
            r'n_heads must divide model.d_model; got 5 for 48. .*works: [46]\.',
        ),
        (
            {'model.n_heads': 8, 'model.n_kv_heads': 3},
            r'n_kv_heads must divide model.n_heads; got 3 for 8. .*works: [24]\.',
        ),
        (
            {'model.n_heads': 2, 'model.n_kv_heads': 4},
            r'n_kv_heads must divide model.n_heads; got 4 for 2. .*works: 2\.',
        ),
        (
            {'model.d_model': 6, 'model.n_heads': 2},
            r'head width, model.head_dim, must be even; got 3',
        ),
        (
            {'attention.rope_fraction': 0.3},
            r'rope_fraction=0.3 of the head width, .* = 8, is 2.4 .*works: 0.25 \(2 features\)',
        ),
        (
            {'attention.rope_factor': 2.0},
            'rope_factor=2.0 has no effect with .*=none; it is used with linear.dynamic.*longrope',
        ),
        (
            {'attention.rope_scaling': 'linear', 'attention.rope_factor': 2.0}
            | {'attention.rope_original_length': 4096},
            'rope_original_length=4096 has no effect with .*=linear; .* with dynamic.*longrope',
        ),
        (
            {'attention.rope_scaling': 'llama3'},
            'rope_scaling=llama3 divides frequencies by attention.rope_factor, which is 1',
        ),
        (
            LLAMA3 | {'attention.rope_scaling': 'yarn', 'attention.rope_beta_slow': 32.0},
            'rope_beta_slow must be below attention.rope_beta_fast; got 32.0 and 32.0',
        ),
        (
            {'attention.rope_scaling': 'dynamic', 'attention.rope_fraction': 0.25},
            'dynamic needs at least 4 rotated features per head; got 2 of 8',
        ),
        (
            {'attention.rope_scaling': 'longrope', 'attention.rope_short_factor': '1,2'},
            "rope_short_factor must have 4 positive numbers .*got '1,2', which has 2",
        ),
        (
            {'attention.rope_local_base': 100.0, 'attention.window': 4},
            'rope_local_base=100 needs layers with a window .*: set .*full_every',
        ),
        ({'attention.no_rope_every': 1}, 'no_rope_every=1 removes the rotation .*position=none'),
        (
            LLAMA3 | {'attention.rope_low_frequency_factor': 4.0},
            'rope_low_frequency_factor must be below .*rope_high_frequency_factor; got 4.0 and 4.0',
        ),
        (
            {'model.position': 'alibi', 'model.attention': 'linear'},
            'position=alibi adds to the logits .*attention=linear has no such .*Choose .*softmax',
        ),
        (
            {'data.batch_size': 8, 'train.microbatches': 5},
            r'microbatches must divide data.batch_size; got 5 for 8. .*works: 4\.',
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
            'norm.groups=16 leaves one feature in each group of model.norm=evonorm_s0',
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
            r'norm.window=2 is not used by this config .model.norm=rmsnorm, .*=unified',
        ),
        (
            {'model.norm': 'crmsnorm', 'model.d_model': 15, 'model.n_heads': 1}
            | {'model.n_kv_heads': 1, 'model.position': 'none'},
            'model.norm=crmsnorm uses d_model - 1 .* even model.d_model; got 15. Nearest .* 16',
        ),
        (
            {'model.mix_fraction': 0.5},
            r'model.mix_fraction=0.5 .*\(model.placement=pre\).* used with model.placement=mix',
        ),
        (
            {'model.placement': 'hybrid'},
            'attention.norm_values=True normalizes .* model.qk_norm, which is none .*=hybrid',
        ),
        (
            {'model.mlp': 'moe', 'mlp.experts_per_token': 5},
            'mlp.experts_per_token must be at most mlp.n_experts; got 5 and 4',
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
            r'model.reparam=shared\+shared names the same part twice',
        ),
        ({'model.reparam': 'none+shared'}, 'cannot be joined with other names'),
        (
            {'model.qk_norm': 'rmsnorm:bias=True'},
            'model.qk_norm=rmsnorm:bias: rmsnorm has no such option, only eps, scale',
        ),
        (
            {'model.qk_norm': 'rmsnorm:eps=2'},
            'model.qk_norm=rmsnorm:eps must be between 0 and 1; got 2.0',
        ),
        ({'model.qk_norm': 'rmsnorm:scale'}, 'must have the form NAME:OPTION=VALUE'),
        (
            {'model.reparam': 'weight_norm', 'scaling.init_scale': 0.0},
            'model.reparam=weight_norm divides by .*scaling.init_scale must be at least .*got 0.0',
        ),
        (
            {'model.reparam': 'shared+weight_norm', 'scaling.init_scale': 1e-20},
            'model.reparam=weight_norm divides by the norms',
        ),
        (
            {'model.reparam': 'sigma', 'scaling.zero_init': 'query'},
            'model.reparam=sigma divides by .* query starts at 0 .scaling.zero_init=query',
        ),
        (
            {'model.reparam': 'spectral_cap+weight_norm', 'scaling.zero_init': 'both'},
            'model.reparam=weight_norm divides by .* query starts at 0 .scaling.zero_init=both',
        ),
        (
            {
                'model.reparam': 'weight_compander',
                'reparam.roles': 'readout',
                'scaling.zero_init': 'readout',
            },
            'model.reparam=weight_compander divides by .* readout starts at 0',
        ),
        (
            {'model.reparam': 'spectral_norm', 'scaling.name': 'mup_full', 'scaling.base_width': 4},
            'query starts at 0 .scaling.zero_init=none, scaling.name=mup_full',
        ),
        (
            {'optim.schedule': 'exponential', 'optim.final_lr_fraction': 0.0},
            'never reaches 0, so optim.final_lr_fraction must be above 0; got 0. .*schedule=linear',
        ),
        (
            {'optim.schedule': 'cyclic', 'optim.cycles': 9, 'optim.warmup_steps': 3},
            'optim.cycles must leave .*; got 9 cycles for the 17 steps .* Largest that works: 8',
        ),
        ({'mesh.data': 0}, 'mesh.data must be a number of devices, or -1 for all; got 0'),
        (
            {'optim.embedding_gradient_shrink': 0.1, 'model.tie_embeddings': True},
            r'embedding_gradient_shrink needs an embedding .*tie_embeddings=True',
        ),
        (
            {'loss.name': 'spherical_z', 'model.logit_softcap': 30.0},
            r'loss.name=spherical_z .* needs model.logit_softcap=0; got 30.0',
        ),
        (
            {'loss.name': 'adversarial_comp_sum', 'model.logit_softcap': 30.0},
            r'loss.name=adversarial_comp_sum .* needs model.logit_softcap=0; got 30.0',
        ),
        ({'optim.others_lr': -1.0}, r'optim.others_lr must be at least 0 and finite; got -1.0'),
        (
            {'optim.others': 'muon'},
            r'optim.others=muon does not support .* embedding, readout, vector, only hidden. '
            r'Use it for .*optim.name=muon',
        ),
        (
            {'optim.name': 'muon', 'optim.muon_polynomial': 'polar_express', 'optim.muon_steps': 3},
            r'polar_express has constants for 5 steps.* got muon_steps=3\. Set muon_steps to 5',
        ),
        (
            {'optim.name': 'gauss_newton', 'loss.name': 'focal'},
            r'optim.name=gauss_newton needs .*convex.*loss.name=cross_entropy; got focal',
        ),
        (
            {'optim.name': 'sven', 'optim.sven_group': 3},
            r'optim.sven_group must divide data.batch_size; got 3 for 8\. .*works: [24]\.',
        ),
        (
            {'optim.name': 'sophia', 'model.norm': 'powernorm'},
            r'optim.name=sophia needs .* of the gradient, which model.norm=powernorm does not',
        ),
        (
            {'optim.ghost_radius': 1.0, 'model.embedding_norm': 'unified'},
            r'optim.ghost_radius needs .* of the logits, which model.embedding_norm=unified does',
        ),
        (
            {'optim.ghost_radius': 0.0},
            r'optim.ghost_radius must be at least 1e-06 and finite; got 0.0',
        ),
        ({'loss.chunk': -1}, r'loss.chunk must be at least 0; got -1'),
        (
            {'optim.average': 'schedule_free', 'model.reparam': 'normalize_and_project'},
            r'average=schedule_free keeps .*reparam=normalize_and_project maps the weights .*'
            r'Choose optim.average=ema',
        ),
        (
            {'optim.average': 'schedule_free', 'optim.schedule_free_beta': 1.0},
            'optim.schedule_free_beta must be at least 0.01 and below 1; got 1.0',
        ),
        (
            {'optim.average': 'schedule_free', 'optim.ghost_radius': 1.0},
            r'optim.ghost_radius limits .* optim.average=schedule_free moves the weights after it',
        ),
        (
            {'model.reparam': 'normalize_and_project', 'optim.ghost_radius': 1.0},
            r'model.reparam=normalize_and_project moves the weights after it',
        ),
        (
            {'optim.decay_rule': 'l2', 'optim.name': 'sven', 'optim.weight_decay': 0.1},
            r'optim.name=sven evaluates the loss itself, but optim.decay_rule=l2 adds',
        ),
        (
            {'optim.decay_rule': 'l2', 'optim.name': 'adamp', 'optim.weight_decay': 0.1},
            r'decay_rule=l2 adds .* optim.name=adamp cannot reduce it',
        ),
        (
            {'optim.match_rms': 0.2, 'optim.match_norm': 1.0},
            r'optim.match_rms and optim.match_norm each set the size .* Choose one of them',
        ),
        (
            {'optim.match_norm_floor': 0.3, 'optim.match_norm': 1.0},
            r'optim.match_norm and optim.match_norm_floor each set the size',
        ),
        (
            {'optim.match_norm_roles': 'hidden+readout'},
            r'match_norm_roles=hidden\+readout would have no effect without optim.match_norm',
        ),
        (
            {'optim.match_norm': 1.0, 'scaling.zero_init': 'both'},
            r'a matrix of zeros never changes, but query starts at 0 .*zero_init=both',
        ),
        (
            {
                'optim.match_norm': 1.0,
                'optim.match_norm_roles': 'hidden+readout',
                'scaling.zero_init': 'readout',
            },
            r'a matrix of zeros never changes, but readout starts at 0',
        ),
        (
            {'optim.match_norm': 1.0, 'model.reparam': 'lora'},
            r'never changes, but a factor of model.reparam=lora starts at 0',
        ),
        (
            {'optim.match_norm': 1.0, 'scaling.init_scale': 0.0},
            r'never changes, but matrices start at 0 \(scaling.init_scale=0.0\)',
        ),
        (
            {
                'optim.match_norm': 1.0,
                'optim.match_norm_roles': 'hidden+readout',
                'model.reparam': 'normalize_and_project',
            },
            r"normalize_and_project does not project the role 'readout'. Set reparam.roles to hid",
        ),
        (
            {'optim.match_norm': 1.0, 'scaling.name': 'mup', 'scaling.base_width': 8},
            r'mup scales .* but optim.match_norm sizes them relative .*=hyper_p.standard',
        ),
        (
            {'optim.decay_rule': 'l2', 'optim.cautious_decay': True},
            r'cautious_decay .*decay_rule=l2 adds decay to the gradient.*decay_rule=decoupled',
        ),
        (
            {'optim.name': 'cge', 'optim.cautious_updates': True},
            r'optim.cautious_updates compares .* optim.name=cge has none',
        ),
        (
            {'optim.embedding_gradient_shrink': 0.1, 'optim.others': 'sophia'},
            r'optim.others=sophia evaluates the loss itself, but optim.embedding_gradient_shrink',
        ),
        (
            {'optim.average': 'ema', 'optim.average_decay': 1.0},
            'optim.average_decay must be at least 0 and below 1; got 1.0',
        ),
    ],
)
def test_conflicting_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_config(changes))


@pytest.mark.parametrize(
    'changes',
    [
        {'optim.match_norm': 1.0, 'scaling.zero_init': 'readout'},
        {'optim.match_norm_floor': 0.3, 'scaling.zero_init': 'both', 'model.reparam': 'lora'},
    ],
)
def test_zeros_pass_where_no_norm_is_taken(changes):
    """Of a role that is not matched, or with a floor, which leaves updates of zeros unchanged."""
    check(tiny_config(changes))


def test_prime_width_is_refused_quickly():
    """A search through all smaller numbers would take minutes."""
    start = time.process_time()
    with pytest.raises(ValueError, match=r'Nearest that works: 1\.'):
        check(tiny_config({'model.d_model': 10**9 + 7}))
    assert time.process_time() - start < 1
    assert [nearest_divisor(24, n) for n in (1, 5, 7, 9, 11, 100)] == [1, 4, 6, 8, 12, 24]


def test_odd_head_width_passes_without_rope():
    check(tiny_config({'model.d_model': 6, 'model.n_heads': 2, 'model.position': 'learned'}))


@pytest.mark.parametrize(
    ('rows', 'parts', 'devices', 'nearest'), [(12, 1, 8, 16), (3, 1, 8, 8), (24, 2, 8, 32)]
)
def test_indivisible_batch_names_nearest(rows, parts, devices, nearest):
    config = tiny_config({'data.batch_size': rows, 'train.microbatches': parts})
    mesh = make_mesh(config.mesh)
    assert mesh.size == devices
    with pytest.raises(ValueError, match=r'data\.batch_size must be a multiple') as error:
        check_devices(config, mesh)
    assert f'mesh.data = {parts} * {devices}; got {rows}.' in str(error.value)
    assert f'Nearest that works: {nearest}.' in str(error.value)
    fitting = {'data.batch_size': nearest, 'train.microbatches': parts}
    check_devices(tiny_config(fitting), mesh)


def test_uneven_process_count_is_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match='8 devices cannot be divided evenly among 3 processes'):
        check_devices(config, make_mesh(config.mesh), 3)
