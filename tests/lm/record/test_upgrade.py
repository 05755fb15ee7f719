"""Contract: a config of commit 0447279 keeps its meaning."""

import copy
import json
from pathlib import Path

import pytest

from lm.config.resolve import flatten, to_dict
from lm.record.run import Run
from lm.record.upgrade import is_old, resolve_stored, resolve_stored_cell
from modules.norms import NORMS
from modules.options import declared_options
from modules.placements import PLACEMENTS
from tests.helpers import checked_config

V0 = Path(__file__).parents[2] / 'fixtures' / 'v0'
OLD = json.loads((V0 / 'run' / 'config.json').read_text())


def old_config(changes=()):
    tree = copy.deepcopy(OLD)
    for path, value in dict(changes).items():
        section, name = path.split('.')
        assert name in tree[section], path
        tree[section][name] = value
    return tree


def resolve_old(changes):
    return flatten(resolve_stored(old_config(changes)))


def test_other_fields_are_unchanged():
    """Every old record has the fields that nothing reads."""
    before, current = flatten(OLD), flatten(resolve_stored(OLD))
    removed = {
        'model.norm_eps',
        'model.n_experts',
        'model.experts_per_token',
        'model.expert_capacity',
    }
    assert before.keys() - current.keys() == removed
    assert {
        path: current[path] for path in before.keys() - removed if current[path] != before[path]
    } == {
        'model.final_norm': 'rmsnorm',
        'model.mlp': 'dense',
        'model.embedding_scale': False,
        'loss.balance_loss': None,
        'optim.decay_fraction': None,
    }
    added = {
        path: current[path] for path in current.keys() - before.keys() if current[path] is not None
    }
    added = {path: value for path, value in added.items() if not path.startswith('kernels.')}
    for path, parts in resolve_stored(OLD).readers.items():
        if path in added:
            assert {declared_options(part.row)[path.split('.')[1]].default for part in parts} == {
                added[path]
            }
            del added[path]
    # Heads shared the width, nothing was dropped, one optimizer had all, evaluation the weights it
    # trained, rows were read causally, no step was traced, and the mesh had two axes.
    assert added == {
        'model.head_dim': OLD['model']['d_model'] // OLD['model']['n_heads'],
        'model.qkv_bias': False,
        'model.mlp_bias': False,
        'model.readout': 'learned',
        'model.stream': 'plain',
        **dict.fromkeys(
            ('model.dropout', 'model.attention_dropout', 'model.embedding_dropout'), 0.0
        ),
        **dict.fromkeys(('mesh.fsdp', 'mesh.expert', 'mesh.context', 'mesh.tensor'), 1),
        'mesh.axes': 'given',
        'optim.cautious_decay': False,
        'optim.cautious_updates': False,
        'optim.match_norm_roles': 'hidden',
        'optim.momentum_dtype': 'float32',
        'optim.second_moment_dtype': 'float32',
        'optim.weight_dtype': 'float32',
        'optim.weight_rounding': 'stochastic',
        'optim.others': OLD['optim']['name'],
        'optim.average': 'none',
        'scaling.init': 'fan_in',
        'scaling.zero_init': 'none',
        'data.objective': 'causal',
        'data.missing_text': 'skip',
        'data.validation_source': '',
        'train.eval_objectives': 'causal',
        'train.stage_rule': 'none',
        'train.profile': '',
        'train.checkpoint_steps': '',
        'train.branch_from': '',
        'train.on_spike': 'record',
        'train.spike_sigmas': 6.0,
        'train.spike_window': 128,
        'train.spike_from': 64,
        'eval.texts_tokens': 131_072,
    }


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'model.norm_eps': 0.1}, {'norm.eps': 0.1}),
        (
            {'model.mlp': 'moe', 'model.n_experts': 8, 'model.expert_capacity': 2.0},
            {'mlp.n_experts': 8, 'mlp.experts_per_token': 2, 'mlp.expert_capacity': 2.0}
            | {'loss.balance_loss': 0.01},
        ),
        ({'model.n_experts': 8}, {'mlp.n_experts': None}),
        (
            {'model.norm': 'powernorm', 'norm.momentum': 0.5},
            {'norm.ema_decay': 0.5, 'norm.momentum': None},
        ),
        (
            {'model.norm': 'batchnorm', 'norm.momentum': 0.5},
            {'norm.momentum': 0.5, 'norm.ema_decay': None},
        ),
        (
            {'model.norm': 'batchnorm', 'model.qk_norm': 'unified', 'norm.momentum': 0.5},
            {'norm.momentum': 0.5, 'norm.ema_decay': 0.5},
        ),
        (
            {'model.placement': 'wide', 'model.n_experts': 8},  # with model.mlp='auto'
            {'model.reparam': 'shared', 'model.mlp': 'moe', 'mlp.n_experts': 8},
        ),
        (
            {'model.placement': 'wide', 'model.reparam': 'weight_norm', 'model.mlp': 'moe'},
            {'model.placement': 'wide', 'model.reparam': 'shared+weight_norm'},
        ),
        (
            {'model.placement': 'wide', 'model.mlp': 'dense'},
            {'model.placement': 'pre', 'model.reparam': 'shared', 'model.mlp': 'dense'},
        ),
        (
            {'model.placement': 'wide', 'model.mlp': 'dense', 'model.reparam': 'weight_norm'},
            {'model.placement': 'pre', 'model.reparam': 'shared+weight_norm'},
        ),
        ({'model.placement': 'hybrid'}, {'attention.norm_values': True}),
        ({'model.placement': 'hybrid_star'}, {'attention.norm_values': True}),
        ({'model.placement': 'post'}, {'model.final_norm': 'none', 'model.reparam': 'none'}),
        ({'optim.schedule': 'warmup_stable_decay'}, {'optim.decay_fraction': 0.2}),
        ({'optim.schedule': 'constant'}, {'optim.final_lr_fraction': None}),
    ],
)
def test_moved_fields_have_present_names(changes, expected):
    fields = resolve_old(changes)
    assert {path: fields[path] for path in expected} == expected


@pytest.mark.parametrize(
    'changes',
    [*({'model.norm': name} for name in NORMS), *({'model.placement': p} for p in PLACEMENTS)],
)
def test_present_config_is_read_unchanged(changes):
    resolved = resolve_stored(old_config(changes))
    assert resolve_stored(to_dict(resolved)) == resolved
    config = checked_config(changes)
    assert resolve_stored(json.loads(json.dumps(to_dict(config)))) == config


def test_present_record_is_checked():
    raw = to_dict(checked_config())
    raw['mlp']['n_experts'] = 4
    assert is_old(OLD) and not is_old(raw)
    with pytest.raises(ValueError, match=r'mlp\.n_experts=4 is not used by'):
        resolve_stored(raw)


def test_unknown_field_is_named():
    raw = old_config()
    raw['model']['n_layer'] = 3
    message = r"no field model\.n_layer\. Did you mean 'model\.n_layers'"
    with pytest.raises(ValueError, match=message):
        resolve_stored(raw)


def test_cell_changes_have_present_names():
    config, changes = resolve_stored_cell(OLD, {'model.norm_eps': 0.1, 'optim.lr': 0.5})
    assert changes == {'norm.eps': 0.1, 'optim.lr': 0.5}
    assert (config.norm.options['eps'], config.optim.lr) == (0.1, 0.5)
    for norm, path in (('powernorm', 'norm.ema_decay'), ('batchnorm', 'norm.momentum')):
        old_changes = {'model.norm': norm, 'norm.momentum': 0.5}
        assert resolve_stored_cell(OLD, old_changes)[1] == {'model.norm': norm, path: 0.5}


def test_folder_without_config_holds_no_run(tmp_path):
    with pytest.raises(ValueError, match='contains no run: there is no'):
        Run(tmp_path).read_recipe()
