"""Contract: every named choice that changes the model.

The changes are generated from the tables, so that a new name is tested at once. A row combines
several changes of different fields, as each program costs some seconds for any number of them. A
row trains four runs mapped together for 50 steps, in a single program: as configured, with every
traced number changed, with another seed, and with another order of the text. Each keeps its types
and learns. If the code of a choice is more than plain operations (state, rules of differentiation,
branches, barriers, another type), each run also equals the single run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.fields import CHOICES, FIELDS
from lm.training.state import make_hyper
from tests.helpers import (
    VOCAB,
    another,
    checked_config,
    list_choices,
    make_training,
    stack,
    tiny_config,
    tiny_learner,
)

BASE = {
    'model.d_model': 8,
    'model.n_layers': 1,
    'model.d_ff': 16,
    'model.position': 'none',
    'kernels.implementation': 'reference',
    'optim.lr': 0.01,
    'optim.schedule': 'warmup_stable_decay',
    'train.steps': 50,
}
STEPS = 50
CHANGED = {  # of what belongs to no part; the options of parts are changed by their bounds
    'optim.lr': 0.005,
    'optim.weight_decay': 1.0,
    'optim.clip_norm': 0.5,
    'optim.others_lr': 0.02,
    'optim.ghost_radius': 0.02,
    'optim.match_rms': 0.4,
    'optim.match_norm': 2.0,
    'optim.update_clip': 0.15,
    'optim.update_clip_sigmas': 0.5,
    'optim.embedding_gradient_shrink': 0.5,
    'scaling.init_scale': 0.5,
    'scaling.embedding_std': 0.1,
    'train.steps': 30.0,
}
# The same layers at other sites: some norms without state and some with.
SAME_LAYERS = {
    'model.embedding_norm': ('batchnorm',),
    'model.final_norm': ('batchnorm',),
    'model.qk_norm': ('layernorm', 'ghost_batchnorm', 'unified'),
}
# Tried at their own interfaces; here once, together.
ELSEWHERE = (
    'data.objective',
    'loss.name',
    'model.activation',
    'optim.name',
    'optim.others',
    'optim.schedule',
    'optim.decay_rule',
    'scaling.name',
    'scaling.init',
    'kernels.attention',
    'kernels.implementation',
    'kernels.linear_attention',
    'kernels.recurrence',
    'kernels.matmul',
    'kernels.rms_norm',
    'kernels.softmax',
    'kernels.cross_entropy',
    'train.eval_objectives',
)
# Every option of attention, in as few rows as there can be: one layer has one gate.
ATTENTION_OPTIONS = (
    {
        'model.n_layers': 2,
        'model.position': 'rope',
        'model.qk_norm': 'rmsnorm',
        'attention.qk_norm_over': 'model',
        'attention.gate': 'elementwise',
        'attention.softcap': 5.0,
        'attention.logit_scale': 'learned',
        'attention.sinks': 'learned',
        'attention.affine_scaled': True,
        'attention.window': 3,
        'attention.full_every': 2,
        'attention.full_at': 1,
        'attention.rope_local_base': 100.0,
        'attention.no_rope_every': 3,
        'attention.rope_scaling': 'yarn',
        'attention.rope_factor': 4.0,
        'kernels.implementation': 'xla',
    },
    {
        'attention.gate': 'headwise',
        'attention.logit_scale': 'mup',
        'model.qkv_bias': True,
        'model.mlp_bias': True,
        'attention.sinks': 'off_by_one',
    },
    {
        'model.attention': 'l2',
        'attention.l2_scaled': 'key',
        'model.position': 'learned',
        'model.qk_norm': 'none',  # keys of one length would leave nothing of what l2 adds
    },
)
TWO_OPTIMIZERS = {
    'optim.name': 'lion',
    'optim.others_lr': 0.005,
    'optim.ghost_radius': 0.2,
    'kernels.implementation': 'reference',  # has the forward mode that the radius asks for
    'optim.match_rms': 0.2,
    'optim.update_clip': 1.0,
    'optim.update_clip_sigmas': 3.0,
    'optim.embedding_gradient_shrink': 0.1,
    'optim.cautious_decay': True,
    'optim.cautious_updates': True,
}
PATHS = [path for path in CHOICES if path not in (*SAME_LAYERS, *ELSEWHERE)]
# More than plain operations: these come first, so that they share few programs, each made twice.
NOT_PLAIN = [
    {'model.norm': 'batchnorm'},
    {'model.norm': 'crmsnorm'},
    {'model.norm': 'powernorm'},
    {'model.norm': 'unified'},
    {'model.placement': 'mix'},
    {'model.mlp': 'moe'},
    {'model.reparam': 'weight_norm'},
    {'model.reparam': 'sigma'},
    {'model.remat': 'full'},
    {'model.dtype': 'bfloat16'},
    {'kernels.implementation': 'xla_cpu'},
    {'model.attention': 'linear', 'kernels.linear_attention': 'chunked'},
    {'model.attention': 'gated_delta', 'kernels.recurrence': 'chunked'},
    {'model.activation': 'selu', 'mlp.alpha_dropout': 0.1},
    {'model.dropout': 0.1},
    {'kernels.matmul': 'wta_crs', 'kernels.wta_crs_least': 1},
    {'train.on_divergence': 'skip_step', 'train.on_spike': 'skip'},
    TWO_OPTIMIZERS,
    {'loss.chunk': 20},
    {'optim.average': 'schedule_free'},
]
# A norm stands in blocks, before the readout or behind the embedding: three of them a program.
SITES = ('model.norm', 'model.final_norm', 'model.embedding_norm')
OF_TABLES = list_choices(PATHS, tiny_config(BASE))
IN_BLOCKS = [changes for changes in OF_TABLES if 'model.norm' in changes]
OTHERS = [changes for changes in OF_TABLES if changes not in IN_BLOCKS]
PLAIN = [
    *OTHERS,
    *({SITES[i % 3]: changes['model.norm']} for i, changes in enumerate(IN_BLOCKS)),
    *({path: name} for path, names in SAME_LAYERS.items() for name in names),
    *ATTENTION_OPTIONS,
    {'model.tie_embeddings': True, 'model.activation': 'swiglu'},
    {'model.bias': True, 'model.readout_bias': True, 'model.mlp': 'moe'}
    | {'mlp.gates': 'renormalised', 'mlp.router_noise': 0.0},
    {'model.qk_norm': 'rmsnorm:scale=False', 'model.norm': 'layernorm:bias=False'},
    {'model.position': 'rope', 'attention.rope_scaling': 'llama3', 'attention.rope_factor': 8.0}
    | {'attention.rope_fraction': 0.5, 'attention.rope_base': 100.0},
    {'train.trainable': 'norms', 'model.norm': 'layernorm'},
    {
        'model.reparam': 'shared+sigma',
        'reparam.roles': 'hidden+readout+embedding',
        'model.tie_embeddings': False,  # there is no readout of its own where they are tied
    },
    {'model.reparam': 'sigma+normalize_and_project', 'reparam.gamma_start': 'one'}
    | {'optim.match_norm': 1.0},
]
# These hide the effect of others: a model that rounds, or with few trained weights.
APART = ('model.dtype', 'train.trainable')


def fits(row) -> bool:
    """Returns whether train.py would accept the choice."""
    try:
        checked_config(BASE | row)
    except ValueError:
        return False
    return True


def combine_rows(all_changes) -> list[dict]:
    """Returns rows with all changes, each in the smallest valid row that has none of its fields."""
    rows = []
    for changes in all_changes:
        is_apart = bool(changes.keys() & set(APART))
        open_to = [row for row in rows if not is_apart and not row.keys() & {*changes, *APART}]
        for row in sorted(open_to, key=len):
            if fits(row | changes):
                row.update(changes)
                break
        else:
            rows.append(dict(changes))
    return rows


ROWS = combine_rows([*NOT_PLAIN, *(changes for changes in PLAIN if changes not in NOT_PLAIN)])
DEFAULT = ROWS[::8]  # a row takes 5 to 30 CPU-seconds: most are full
DEAR = [row for row in ROWS if row not in DEFAULT]
ALONE = [row for row in ROWS if any(changes.items() <= row.items() for changes in NOT_PLAIN)]
IN_BLOCKS = [row for row in IN_BLOCKS if not any(row.items() <= full.items() for full in ROWS)]


def row_name(row) -> str:
    return ' '.join(f'{path}={row[path]}' for path in row)


# Of the loss, relative. Batched products add up in another order than single ones.
RTOL = {'float32': 1e-6, 'bfloat16': 1e-3}
RTOL_OF_NORM = {'crmsnorm': 3e-6}  # its square of a sum rounds more: 1.4e-6 seen
# At this learning rate rounding grows from 1e-7 to 9e-4 over the steps, with either kernel; at the
# low rate of the changed run the losses agree to 3e-7.
RTOL_OF_ATTENTION = {'gated_delta': 3e-3}


def batch(step: int, order: int) -> dict[str, np.ndarray]:
    """Half of the tokens random, so that the loss stays well above 0; half repeat the last."""
    rng = np.random.default_rng((step, order))
    tokens = rng.integers(1, VOCAB, (8, 9), dtype=np.int32)
    tokens[:, 1::2] = tokens[:, :-1:2]
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


def changed_value(path, value):
    changed = CHANGED[path] if path in CHANGED else another(FIELDS[path].option, float(value))
    return jnp.float32(changed)


def four_runs(config):
    """(keys, hypers, batches) of the plain run, of all numbers changed, of a seed, of an order."""
    plain = make_hyper(config)
    changed = {path: changed_value(path, value) for path, value in plain.items()}
    keys = [jax.random.key(seed) for seed in (0, 0, 1, 0)]
    orders = (0, 0, 0, 1)
    batches = [stack([batch(i, order) for i in range(STEPS)]) for order in orders]
    return keys, [plain, changed, plain, plain], batches


def train_four(config):
    keys, hypers, batches = four_runs(config)
    mapped = jax.tree.map(lambda *b: np.stack(b, 1), *batches)
    return make_training(tiny_learner(config), runs=4)(jnp.stack(keys), stack(hypers), mapped)


@pytest.mark.parametrize(
    'changes',
    [*DEFAULT, *(pytest.param(row, marks=pytest.mark.full) for row in [*DEAR, *IN_BLOCKS])],
    ids=row_name,
)
def test_every_choice_trains_beside_others(changes):
    """Catches the failure of a choice, and its side effects on another choice in its row."""
    losses, last = train_four(checked_config(BASE | changes))
    for leaf in jax.tree.leaves(last):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert len({float(loss) for loss in losses[-1]}) == 4
    fell = losses[0] - np.mean(losses[-5:], 0)
    slow = 0.002 if changes.get('model.reparam') == 'lora' else 0.02  # lora trains few weights
    assert np.all(fell > np.array([0.1, slow, 0.1, 0.1])), fell  # the changed one learns slowly


@pytest.mark.full
@pytest.mark.parametrize('changes', ALONE, ids=row_name)
def test_mapped_run_equals_single_run(changes):
    config = checked_config(BASE | changes)
    losses, _ = train_four(config)
    train_single = make_training(tiny_learner(config))
    rtol = RTOL_OF_NORM.get(config.model.norm, RTOL[config.model.dtype])
    rtol = max(rtol, RTOL_OF_ATTENTION.get(config.model.attention, 0.0))
    for run, run_inputs in enumerate(zip(*four_runs(config), strict=True)):
        np.testing.assert_allclose(losses[:, run], train_single(*run_inputs)[0], rtol=rtol, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(('balance', 'unread'), [('loss', ['mlp.bias_rate']), ('bias', [])])
def test_every_number_changes_the_losses(balance, unread):
    """A run for each, mapped together: a number that no program reads would show."""
    config = checked_config(BASE | {'model.mlp': 'moe', 'mlp.balance': balance})
    plain = make_hyper(config)
    hypers = [plain, *(plain | {path: changed_value(path, plain[path])} for path in plain)]
    batches = stack([batch(i, 0) for i in range(STEPS)])
    many = jax.tree.map(lambda b: np.stack([b] * len(hypers), 1), batches)
    keys = jnp.stack([jax.random.key(0)] * len(hypers))
    losses, _ = make_training(tiny_learner(config), runs=len(hypers))(keys, stack(hypers), many)
    same = [p for i, p in enumerate(plain) if np.array_equal(losses[:, i + 1], losses[:, 0])]
    assert same == unread


def test_every_change_is_in_a_row():
    assert all(any(changes.items() <= row.items() for row in ROWS) for changes in NOT_PLAIN + PLAIN)
