"""Blocks of several kinds over depth.

Reference: options that vary by layer, and the blocks of models of one kind in sequence.
Equivalence: scan, remat, a cache, packing, runs and devices change nothing.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from eval.convert.patterns import stack_layers
from lm.config.resolve import update_recipe
from lm.inference.blocks import iterate_blocks, make_sequence, select_blocks
from lm.inference.decoding import extend, init_cache
from lm.inference.probes import join_blocks, observe, split_blocks
from lm.model.block import Block
from lm.model.pattern import block_groups, block_stacks
from lm.training.diagnostics import make_diagnose_step
from lm.training.flops import attention_flops, count_matmul_params, flops_in_full
from lm.training.state import make_hyper
from lm.training.step import make_train_step
from modules.params import named_leaves
from modules.sequence import whole_rows
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    make_training,
    packed_batch,
    stack,
    tiny_batch,
    tiny_learner,
    tiny_model,
    train_step,
    trained_on_all_devices,
)

PATTERN = 'model.pattern'
LAYERS = 10  # two periods and a rest
HYBRID = {PATTERN: 'linear*3+softmax', 'model.n_layers': LAYERS, 'model.scan_layers': True}
WINDOWS = HYBRID | {PATTERN: 'softmax:window=3,rope_base=50.0*3+softmax'}
WINDOWS |= {'attention.no_rope_every': 3}  # counts the blocks of the model
BY_LAYER = {'attention.window': 3, 'attention.full_every': 4, 'attention.rope_local_base': 50.0}
BY_LAYER |= {'attention.no_rope_every': 3, 'model.n_layers': LAYERS, 'model.scan_layers': True}
TOKENS = tiny_batch(rows=2)['tokens'][:, :-1]


@functools.cache
def build_case(changes):
    """Returns (learner, variables at the start)."""
    learner = tiny_learner(checked_config(dict(changes)))
    return learner, learner.variables(initial_state(learner.recipe).weights)


def build(changes):
    return build_case(tuple(changes.items()))


def draw_case(changes):
    """Returns (learner, variables without statistics); compiles no initialization."""
    learner, rng = tiny_learner(checked_config(changes)), np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: np.float32(rng.normal(0.0, 0.3, s.shape)), learner.description.used_shapes
    )
    return learner, {'params': params}


def restack(variables, recipe):
    """Returns the variables of a model of one kind that has the same blocks."""
    params = {p: np.asarray(x) for p, x in named_leaves(variables['params']).items()}
    return {'params': unflatten_dict(stack_layers(params, recipe), sep='/')}


def lower_forward(changes):
    """Returns the text of the lowered forward pass."""
    learner, variables = draw_case(changes)
    return jax.jit(learner.model.apply).lower(variables, TOKENS).as_text()


@pytest.mark.parametrize(('layers', 'n_last'), [(8, 0), (10, 2)])
def test_names_and_shapes(layers, n_last):
    """Parameters are stacked by their place in the period; each has the matrices of its kind."""
    changes = HYBRID | {'model.n_layers': layers, PATTERN: 'linear/moe*3+softmax'}
    learner = tiny_learner(checked_config(changes))
    shapes = {p: x.shape for p, x in named_leaves(learner.description.used_shapes).items()}
    axes = {p: spec.axes[0] for p, spec in named_leaves(learner.description.used_specs).items()}
    for name, count, places in (('layers', 2, 4), ('layers_last', 1, n_last)):
        blocks = {path.split('/')[1] for path in shapes if path.startswith(f'{name}/')}
        assert blocks == {f'block_{place + 1}' for place in range(places)}
        for block in blocks:
            up = f'{name}/{block}/mlp/up'
            experts = () if block == 'block_4' else (4,)
            assert shapes[up] == (count, *experts, 16, 32) and axes[up] == 'layer'
            assert (f'{name}/{block}/mlp/router' in shapes) == bool(experts)
    single = block_groups(checked_config(HYBRID | {PATTERN: 'linear|softmax'}))
    assert [(g.name, g.count, g.stacks[0].path) for g in single] == [
        ('layers', LAYERS - 1, 'layers'),
        ('layers_last', 1, 'layers_last'),
    ]


def test_every_block_is_numbered_once():
    texts = ['linear*3+softmax', 'linear|softmax', 'linear+softmax|l2*2', 'nala*4+l2']
    for text in (*texts, 'l2*2|linear*3+softmax|', 'l2|linear|softmax'):
        stacks = block_stacks(checked_config(HYBRID | {PATTERN: text}))
        assert sorted(n for s in stacks for n in s.numbers) == list(range(1, LAYERS + 1)), text
        layers = checked_config(HYBRID | {PATTERN: text}).layers
        for blocks in stacks:
            assert all(layers[n - 1] == blocks.recipe for n in blocks.numbers)


def test_windows_equal_options_by_layer():
    """The same model in two spellings. Catches blocks that are numbered within their stack, in
    another order, or without the options of their item.
    """
    learner, variables = draw_case(WINDOWS)
    same = tiny_learner(checked_config(BY_LAYER))
    expected = jax.jit(same.model.apply)(restack(variables, learner.recipe), TOKENS)
    logits = jax.jit(learner.model.apply)(variables, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert attention_flops(learner.recipe) == attention_flops(same.recipe)
    assert flops_in_full(learner) == flops_in_full(same)


def test_first_blocks_and_placements_equal_an_unrolled_period():
    """Two spellings of the same blocks. Catches first blocks in another order, and blocks with the
    placement of the model.
    """
    first, *period = 'linear:placement=output', 'softmax', 'softmax:window=3'
    text = f'{first}|{"+".join(period)}|'
    changes = {'model.n_layers': 5, 'model.placement': 'pre'}
    learner, variables = draw_case(changes | {PATTERN: text})
    names = {path for path in named_leaves(variables['params'])}
    assert any(path.startswith('layers_first/attention_norm_out/') for path in names)
    assert any(path.startswith('layers/block_2/attention_norm_in/') for path in names)
    same = tiny_learner(checked_config(changes | {PATTERN: '+'.join([first, *period, *period])}))
    params = named_leaves(variables['params'])
    renamed = {path: leaf for path, leaf in params.items() if not path.startswith('layers')}
    for blocks in block_stacks(learner.recipe):
        for place, number in enumerate(blocks.numbers):
            for path, leaf in params.items():
                if path.startswith(f'{blocks.path}/'):
                    end = path.removeprefix(f'{blocks.path}/')
                    renamed[f'layers/block_{number}/{end}'] = leaf[place : place + 1]
    renamed = {'params': unflatten_dict(renamed, sep='/')}
    logits = jax.jit(learner.model.apply)(variables, TOKENS)
    expected = jax.jit(same.model.apply)(renamed, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_blocks_equal_those_without_a_pattern():
    """Applies blocks of a linear and of a softmax model in turn."""
    text = 'linear/moe*2+softmax:position=none'
    learner, variables = build(HYBRID | {PATTERN: text, 'model.placement': 'layernorm_scaling'})
    _, activations = observe(learner, initial_state(learner.recipe).weights, TOKENS)
    base = {'model.n_layers': LAYERS, 'model.placement': 'layernorm_scaling'}
    uniform = {
        True: base | {'model.attention': 'linear', 'model.mlp': 'moe'},
        False: base | {'model.position': 'none'},
    }
    x_BTD, sequence = activations['embedding'], whole_rows(TOKENS.shape[1])
    for i, block in enumerate(iterate_blocks(learner, variables)):
        config = checked_config(uniform[i % 3 != 2])
        (group,) = block_groups(config)
        module = Block(config, tiny_model(config).kernels, group.stacks[0].group)
        x_BTD = module.apply(block.variables, x_BTD, jnp.float32(i + 1), sequence)[0]
        np.testing.assert_allclose(x_BTD, activations['after_mlp'][i], rtol=1e-4, atol=1e-5)
    assert i == LAYERS - 1


def test_program_has_one_scan_for_each_group():
    """A period compiles its blocks once, whatever the depth."""
    base = {PATTERN: 'softmax:window=3*3+softmax', 'model.scan_layers': True}
    texts = {n: lower_forward(base | {'model.n_layers': n}) for n in (8, 16, 10)}

    def count(text):
        return len(re.findall('stablehlo.while', text)), len(re.findall('dot_general', text))

    (whiles, products), single = count(texts[8]), count(lower_forward({'model.scan_layers': True}))
    assert count(texts[16]) == (whiles, products)
    # `single` has a block and the readout.
    assert single[0] >= 1 and products - 1 == 4 * (single[1] - 1)
    inner = single[0] - 1  # loops of a block
    assert whiles == 1 + 4 * inner
    assert count(texts[10]) == (2 + 6 * inner, 1 + 6 * (single[1] - 1))


def test_flops_add_up_by_kind():
    """Half of the blocks of each kind cost half of both models. Catches the experts of another
    kind.
    """
    experts = 'softmax:window=3/moe:experts_per_token=3'
    mixed = {PATTERN: f'linear/moe:n_experts=8,experts_per_token=1+{experts}'}
    kinds = (
        {'model.attention': 'linear', 'mlp.n_experts': 8, 'mlp.experts_per_token': 1},
        {'attention.window': 3, 'mlp.experts_per_token': 3},
    )
    kinds = [{'model.mlp': 'moe'} | changes for changes in kinds]
    learners = [
        tiny_learner(checked_config({'model.n_layers': 4} | changes)) for changes in (mixed, *kinds)
    ]
    params = [count_matmul_params(learner) for learner in learners]
    pairs = [attention_flops(learner.recipe) for learner in learners]
    assert 2 * params[0] == params[1] + params[2] and 2 * pairs[0] == pairs[1] + pairs[2]
    assert pairs[1] != pairs[2] and params[1] != params[2]


def test_caches_have_sizes_by_kind():
    """A linear block keeps a state of fixed size, a softmax block all keys."""
    learner, variables = draw_case(HYBRID)
    short, long = (init_cache(learner, variables, 2, n).layers for n in (4, 8))
    for blocks in block_stacks(learner.recipe):
        sizes = [sum(x.size for x in jax.tree.leaves(blocks.find(c))) for c in (short, long)]
        is_softmax = blocks.recipe.attention.name == 'softmax'
        assert sizes[1] == sizes[0] * (2 if is_softmax else 1) > 0
        count = {x.shape[0] for x in jax.tree.leaves(blocks.find(long))}
        assert count == {blocks.count}


@pytest.mark.full
@pytest.mark.parametrize('changes', [HYBRID, WINDOWS, HYBRID | {PATTERN: 'nala/moe+l2|softmax'}])
def test_cached_decoding_equals_whole_rows(changes):
    """Five tokens and then three, one by one."""
    learner, variables = build(changes)
    expected = jax.jit(learner.model.apply)(variables, TOKENS)
    step = jax.jit(functools.partial(extend, learner))
    logits, cache = step(variables, init_cache(learner, variables, 2, 8), TOKENS[:, :5])
    parts = [logits]
    for t in range(5, 8):
        logits, cache = step(variables, cache, TOKENS[:, t : t + 1])
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_documents_are_independent():
    """A packed row gives the logits of its documents alone."""
    learner, variables = build(HYBRID)
    apply = jax.jit(learner.model.apply)
    packed = apply(variables, TOKENS, np.repeat([[1, 1, 1, 2, 2, 2, 2, 2]], 2, 0))
    for part in (slice(3), slice(3, 8)):
        expected = jax.jit(learner.model.apply)(variables, TOKENS[:, part])
        np.testing.assert_allclose(packed[:, part], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(packed - apply(variables, TOKENS)).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize('changes', [{'model.scan_layers': False}, {'model.remat': 'dots'}])
def test_scan_and_remat_keep_a_step(changes):
    base = HYBRID | {PATTERN: 'linear+softmax/moe:router_noise=0.0', 'model.n_layers': 5}
    config, changed = checked_config(base), checked_config(base | changes)
    state, batch = initial_state(config), packed_batch()
    after, metrics = train_step(config)(state, batch, make_hyper(config))
    again, same = train_step(changed)(state, batch, make_hyper(changed))
    np.testing.assert_allclose(metrics['loss'], same['loss'], rtol=1e-5)
    assert_trees_close(after.params, again.params, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_equal_items_lower_like_no_pattern():
    """As text, also if the pattern is set in a recipe that nothing resolves again."""
    config = checked_config({'model.scan_layers': True, 'model.n_layers': 8})
    again = update_recipe(config, {PATTERN: 'softmax*3+softmax'})
    assert again.model.pattern and not again.is_mixed
    texts = [
        jax.jit(make_train_step(tiny_learner(c)))
        .lower(initial_state(c), packed_batch(), make_hyper(c))
        .as_text()
        for c in (config, again)
    ]
    assert texts[0] == texts[1]
    shapes = [named_leaves(tiny_learner(c).description.shapes) for c in (config, again)]
    assert shapes[0] == shapes[1]


@pytest.mark.full
def test_runs_beside_each_other_equal_single_ones():
    config = checked_config(HYBRID | {'model.n_layers': 5})
    learner, steps = tiny_learner(config), 2
    batches = [stack([packed_batch(10 * run + s) for s in range(steps)]) for run in range(2)]
    hypers = [make_hyper(checked_config(HYBRID | {'model.n_layers': 5, 'optim.lr': lr}))
              for lr in (1e-3, 1e-2)]  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 2)
    joined = jax.tree.map(lambda *x: np.stack(x, 1), *batches)
    losses, _ = make_training(learner, 2)(keys, stack(hypers), joined)
    single = make_training(learner)
    for run in range(2):
        expected, _ = single(keys[run], hypers[run], batches[run])
        np.testing.assert_allclose(losses[:, run], expected, rtol=1e-5)


@pytest.mark.full
def test_eight_devices_equal_one():
    config = checked_config(HYBRID | {'model.n_layers': 5})
    learner, hyper = tiny_learner(config), make_hyper(config)
    batches = stack([packed_batch(s) for s in range(2)])
    state = trained_on_all_devices(learner, batches, hyper)
    _, expected = make_training(learner)(jax.random.key(0), hyper, batches)
    assert_trees_close(state.params, jax.device_get(expected).params, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_probes_are_in_depth_order():
    """Activations, shifts, blocks as functions, and skipped blocks."""
    learner, variables = build(HYBRID)
    weights = initial_state(learner.recipe).weights
    _, activations = observe(learner, weights, TOKENS)
    assert activations['after_mlp'].shape[0] == LAYERS
    rejoined = join_blocks(learner.recipe, split_blocks(learner.recipe, activations))
    jax.tree.map(np.testing.assert_array_equal, rejoined, activations)
    streams = activations['embedding']
    sequence = make_sequence(learner, np.ones_like(TOKENS))
    active_L = np.ones(LAYERS, bool)
    for i, block in enumerate(iterate_blocks(learner, variables)):
        assert block.number == i + 1
        streams = block.apply(block.variables, block.number, streams, sequence)
        np.testing.assert_allclose(streams, activations['after_mlp'][i], rtol=1e-4, atol=1e-5)
    active_L[5] = False
    _, skipped = learner.model.apply(
        select_blocks(learner, variables, active_L), TOKENS, mutable=('activations',)
    )
    after = join_blocks(learner.recipe, skipped['activations'])['after_mlp']
    np.testing.assert_array_equal(after[5], after[4])
    np.testing.assert_allclose(after[:5], activations['after_mlp'][:5], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_diagnostics_are_in_depth_order():
    """Louder weights in block 6 are seen in layer 6; heads have no entropy in linear blocks."""
    config = checked_config(HYBRID)
    state, batch = initial_state(config), tiny_batch()
    diagnose = jax.jit(make_diagnose_step(tiny_learner(config)))
    before = diagnose(state, batch, make_hyper(config))
    louder = jax.tree.map(lambda w: w.copy(), dict(state.params))
    louder['layers']['block_2']['mlp']['down'][1] *= 100  # the second block of the second period
    after = diagnose(state.replace(params=louder), batch, make_hyper(config))
    changed = after['layer_param_norm'] != before['layer_param_norm']
    np.testing.assert_array_equal(changed, np.arange(1, LAYERS + 1) == 6)
    for name in ('weight_rms_hidden', 'singular_value_down'):
        np.testing.assert_array_equal(after[name] != before[name], changed, name)
    assert all(value.shape[:1] in ((), (LAYERS,)) for value in before.values())


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [
        {'scaling.name': 'mup', 'scaling.base_width': 8},
        {'scaling.name': 'complete_p', 'scaling.base_width': 8, 'scaling.base_depth': 5},
        {'model.reparam': 'weight_norm', 'optim.name': 'muon'},
        {'model.placement': 'hybrid', 'model.qk_norm': 'rmsnorm', 'model.dropout': 0.1}
        | {'model.attention_dropout': 0.0},
        {'model.placement': 'resi_dual', 'train.microbatches': 2, 'optim.average': 'ema'},
    ],
)
def test_a_step_with_other_parts(changes):
    """Factors of a parametrisation are those of the same matrices in a model of one kind."""
    config = checked_config(HYBRID | {'model.n_layers': 5} | changes)
    _, metrics = train_step(config)(initial_state(config), packed_batch(), make_hyper(config))
    assert np.isfinite(metrics['loss'])
    ours = named_leaves(tiny_learner(config).description.scalings)
    uniform = checked_config({'model.attention': 'linear', 'model.n_layers': 5} | changes)
    for path, scaling in named_leaves(tiny_learner(uniform).description.scalings).items():
        if path.startswith('layers/'):
            assert ours[path.replace('layers/', 'layers/block_2/')] == scaling, path


@pytest.mark.full
def test_first_gradients_reach_every_block():
    """No block is left out, and none is applied twice with the same parameters."""
    learner, variables = build(HYBRID | {'model.n_layers': 5})

    def loss(params):
        logits_BTV = learner.model.apply({'params': params}, TOKENS)
        return jnp.mean(jax.nn.logsumexp(logits_BTV, -1))

    grads = jax.jit(jax.grad(loss))(variables['params'])
    norms = {p: np.abs(g).sum((*range(1, g.ndim),)) for p, g in named_leaves(grads).items()}
    layered = {p: n for p, n in norms.items() if p.startswith('layers')}
    assert all((n > 0).all() for n in layered.values())
    assert {len(n) for n in layered.values()} == {1} and len(layered) > 30
