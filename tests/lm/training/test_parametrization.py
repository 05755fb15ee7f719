"""Parametrisations in the model: the base model, zero initialization, refusals; little compiles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import flatten, update_recipe
from lm.devices.mesh import make_mesh
from lm.model.base_size import base_head_dim
from lm.model.check import attention_scores, check
from lm.run.tables import parameter_rows
from lm.training.state import make_hyper
from lm.training.update import bind_rows, decay_shares, peak_lrs
from modules.params import named_leaves
from modules.scaling import DECAY_RULES, PARAMETRIZATIONS, Growth
from modules.scaling.parametrization import RELATIVE
from tests.helpers import HYPERSPHERE, checked_config, initial_state, tiny_config, tiny_learner

BASE = {'scaling.base_width': 8, 'scaling.base_depth': 1}
GROWING = [n for n, row in PARAMETRIZATIONS.items() if row.grows and not row.is_absolute]


def grow_config(name, **changes):
    """The tiny model, of width 16 and depth 2, against a base model half as large."""
    sizes = {'width': 'scaling.base_width', 'depth': 'scaling.base_depth'}
    base = {sizes[size]: BASE[sizes[size]] for size in PARAMETRIZATIONS[name].grows}
    return checked_config({'scaling.name': name, **base, **changes})


@pytest.mark.parametrize('name', GROWING)
def test_base_sizes_equal_standard(name):
    """Bitwise equal are the same factors, deviations, scores and decay.

    Catches a constant that does not cancel. The only difference is mup_full, whose queries start at
    0.
    """
    config = tiny_config(HYPERSPHERE if RELATIVE in PARAMETRIZATIONS[name].families else {})
    at_base = update_recipe(
        config,
        {
            'scaling.name': name,
            **{
                f'scaling.base_{size}': {'width': 16, 'depth': 2}[size]
                for size in PARAMETRIZATIONS[name].grows
            },
        },
    )
    expected, description = tiny_learner(config).description, tiny_learner(at_base).description
    assert description.scalings == expected.scalings
    assert set(named_leaves(description.growths).values()) == {Growth()}
    stds = named_leaves(expected.init_stds)
    for path, std in named_leaves(description.init_stds).items():
        assert std == (0 if name == 'mup_full' and path.endswith('query') else stds[path]), path
    assert attention_scores(at_base) == attention_scores(config)


def test_growths_match_parameters():
    """Doubles the width: shapes of the model, including grouped heads, gates and experts."""
    config = grow_config(
        'mup',
        **{
            'model.n_kv_heads': 1,
            'model.n_heads': 2,
            'model.activation': 'swiglu',
            'scaling.base_heads': 2,
        },
    )
    growths = named_leaves(tiny_learner(config).description.growths)
    sides = {path: (growth.fan_in, growth.fan_out) for path, growth in growths.items()}
    grow_both = {path for path, growth in sides.items() if growth == (2, 2)}
    assert grow_both == {
        f'layers/{name}'
        for name in (
            'attention/query',
            'attention/key',
            'attention/value',
            'attention/out',
            'mlp/up',
            'mlp/gate',
            'mlp/down',
        )
    }
    assert sides['embedding'] == (1, 2) and sides['readout'] == (2, 1)
    assert {growth.width for growth in growths.values()} == {2}


def test_router_outputs_do_not_grow():
    """The router counts as an output, like the readout."""
    config = grow_config('mup', **{'model.mlp': 'moe'})
    growths = named_leaves(tiny_learner(config).description.growths)
    assert (growths['layers/mlp/router'].fan_in, growths['layers/mlp/router'].fan_out) == (2, 1)
    assert (growths['layers/mlp/up'].fan_in, growths['layers/mlp/up'].fan_out) == (2, 2)


def test_logits_per_width():
    """sqrt(H_base) / H if heads grow in width, unchanged if they grow in number."""
    wider = grow_config('mup', **{'scaling.base_heads': 2})
    assert base_head_dim(wider) == 4 and attention_scores(wider).scale == 4**0.5 / 8
    more_heads = grow_config('mup')
    assert base_head_dim(more_heads) == 8 and attention_scores(more_heads).scale is None
    assert base_head_dim(grow_config('mup_simple')) is None
    assert wider.base.model.n_heads == 2 and more_heads.base.model.n_heads == 1
    assert (
        more_heads.base is more_heads.base and more_heads.base.base is more_heads.base
    )  # built once
    with_head_dim = grow_config('mup', **{'scaling.base_heads': 1, 'model.head_dim': 6}).base.model
    assert (with_head_dim.n_heads, with_head_dim.head_dim) == (
        1,
        6,
    )  # all heads together are half as wide


@pytest.mark.full
def test_tied_readout_is_scaled():
    """The table, twice as wide, gives logits half as large, and is not scaled as an embedding.

    Catches a table that is scaled where it is looked up, or nowhere.
    """
    tied = {'model.tie_embeddings': True}
    tokens = jnp.ones((1, 4), jnp.int32)
    readouts = []
    for config in (grow_config('mup', **tied), tiny_config(tied)):
        learner = tiny_learner(config)
        variables = learner.variables(initial_state(tiny_config(tied)).weights)
        readouts.append(
            jax.jit(lambda v, m=learner.model: m.apply(v, tokens, method='activations'))(variables)
        )
    (x, readout), (y, plain) = readouts
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(readout.weight_DV, plain.weight_DV / 2)


@pytest.mark.full
def test_zero_init_covers_named_roles():
    """As configured, and queries with mup_full as published; not keys, values and gates."""
    gates = {'attention.gate': 'elementwise', 'attention.affine_scaled': True}
    for config, zero in (
        (tiny_config({'scaling.zero_init': 'query'} | gates), {'query'}),
        (tiny_config({'scaling.zero_init': 'both'}), {'query', 'readout'}),
        (grow_config('mup_full'), {'query'}),
        (grow_config('mup_full', **{'scaling.zero_init': 'readout'}), {'query', 'readout'}),
    ):
        params = named_leaves(initial_state(config).params)
        zero_names = {path.split('/')[-1] for path, w in params.items() if not np.any(w)}
        assert zero_names == zero


@pytest.mark.full
def test_embedding_std_scales_embedding():
    """A number of the run: the same draw, times the deviation."""
    config = tiny_config({'scaling.embedding_std': 0.5})
    plain, scaled = (named_leaves(initial_state(c).params) for c in (tiny_config(), config))
    np.testing.assert_allclose(scaled['embedding'], 0.5 * 4 * plain['embedding'], rtol=1e-6)
    np.testing.assert_array_equal(scaled['readout'], plain['readout'])
    assert 'scaling.embedding_std' in make_hyper(config)


@pytest.mark.full
def test_orthogonal_init():
    config = tiny_config({'scaling.init': 'orthogonal'})
    params = initial_state(config).params
    up = np.asarray(named_leaves(params)['layers/mlp/up'])
    np.testing.assert_allclose(np.linalg.svd(up, compute_uv=False), 1.0, rtol=1e-5)


def compute_shares(config, fraction=1.0):
    flat = flatten(config)
    description = tiny_learner(config).description
    rule = bind_rows(config, flat)['optim.decay_rule']
    peaks = peak_lrs(flat)
    fractions = dict.fromkeys(peaks, fraction)
    shares = named_leaves(decay_shares(description, rule, flat, fractions, peaks))
    return {path: float(share) for path, share in shares.items()}


@pytest.mark.full
def test_independent_decay_ignores_learning_rate():
    """No parametrisation divides the decay by it: catches a learning rate that enters again."""
    for name in GROWING:
        config = grow_config(name, **{'optim.decay_rule': 'independent', 'optim.weight_decay': 0.1})
        slow, fast = (
            compute_shares(update_recipe(config, {'optim.lr': lr})) for lr in (1e-3, 1e-1)
        )
        assert slow == fast and set(slow.values()) == {0.0, 0.1}


@pytest.mark.full
def test_table_lists_rates_and_decays():
    """The table has, under every rule, the decay of each parameter, and its horizon in steps."""
    for rule in DECAY_RULES:
        config = grow_config('mup', **{'optim.decay_rule': rule, 'optim.weight_decay': 0.1})
        shares = compute_shares(config)
        table_rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
        rows = {row['parameter']: row for row in table_rows}
        assert rows.keys() == shares.keys()
        for path, row in rows.items():
            assert float(row['decay/step']) == pytest.approx(shares[path], rel=1e-2)
            steps = row['horizon (steps)'].replace(',', '')
            assert (steps == '-') == (shares[path] == 0)
            if steps != '-':
                assert float(steps) == pytest.approx(1 / shares[path], abs=0.5)


INVALID = (
    ({'scaling.name': 'mup'}, 'mup scales relative to a base model. Set scaling.base_width'),
    (
        {'scaling.name': 'complete_p', 'scaling.base_width': 8},
        'Set scaling.base_depth to the depth of the model',
    ),
    ({'scaling.base_width': 8}, 'base_width=8 is not used by .*scaling.name=standard'),
    ({'scaling.name': 'unit', 'scaling.base_width': 8}, 'base_width=8 is not used by'),
    ({'scaling.name': 'unit', 'scaling.base_heads': 2}, 'base_heads=2 applies to logits q k / H'),
    ({'scaling.name': 'unit', 'model.placement': 'peri'}, 'unit scales the outputs of blocks'),
    (
        {'scaling.name': 'mup_simple', 'scaling.base_width': 8, 'scaling.base_heads': 2},
        'base_heads=2 applies to logits q k / H .* which scaling.name=mup_simple',
    ),
    (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'model.n_heads': 1, 'model.n_kv_heads': 1},
        'at a width of 8, model.n_heads=1 would become 0.5, which must be a whole number',
    ),
    (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'scaling.base_heads': 3},
        'must divide the width; got 3 heads for a width of 8',
    ),
    (
        {'scaling.name': 'complete_p', **BASE, 'optim.name': 'sgd'},
        'no rules for optim.name=sgd, a sgd-like .* supports adam-like optimizers. Choose '
        'scaling.name=standard.*mup.*spectral',
    ),
    (
        {
            'scaling.name': 'mup',
            'scaling.base_width': 8,
            'optim.name': 'muon',
            'optim.match_rms': 0.2,
        },
        'mup scales the updates of optim.name=muon as spectral-like .*optim.match_rms rescales',
    ),
    (
        {
            'scaling.name': 'mup',
            'scaling.base_width': 8,
            'optim.name': 'sgd',
            'optim.match_rms': 0.2,
        },
        'mup scales the updates of optim.name=sgd as sgd-like .*optim.match_rms rescales',
    ),
    (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'optim.others': 'adafactor'},
        'with optim.adafactor_absolute=False they have another size',
    ),
    (
        {
            'scaling.name': 'mup',
            'scaling.base_width': 8,
            'optim.name': 'shampoo',
            'optim.shampoo_graft': False,
        },
        'with optim.shampoo_graft=False they have another size',
    ),
    (
        {'scaling.name': 'complete_p', **BASE, 'optim.name': 'sophia'},
        'complete_p scales epsilons, which does not work with optim.name=sophia',
    ),
    (
        {'scaling.name': 'spectral', 'scaling.base_width': 8, 'model.tie_embeddings': True},
        'spectral has different standard deviations or learning rates .*Choose scaling.name=mup',
    ),
    (
        {'scaling.name': 'unit', 'scaling.init': 'small'},
        'unit draws weights with standard deviation 1 .*scaling.init=small has its own',
    ),
    (
        {'scaling.name': 'complete_p', **BASE, 'model.placement': 'peri'},
        'complete_p scales the outputs of blocks.*placement=peri normalizes',
    ),
    (
        {'scaling.name': 'hyper_p', **BASE, **HYPERSPHERE, 'optim.name': 'adamw'},
        'hyper_p has no factor of width, .* those of optim.name=adamw are not. Choose .*muon',
    ),
    (
        {'scaling.name': 'hyper_p', **BASE, 'optim.name': 'muon'},
        'hyper_p trains matrices of constant norm: it needs optim.match_norm=1.*hidden.readout.*'
        'got match_norm=None for hidden and a projection of None',
    ),
    (
        {'scaling.name': 'hyper_p', **BASE, **HYPERSPHERE, 'optim.match_norm_roles': 'hidden'},
        'needs optim.match_norm=1, optim.match_norm_roles=hidden.readout',
    ),
    (
        {'scaling.name': 'hyper_p', **BASE, **HYPERSPHERE, 'optim.others': 'sgd'},
        'no rules for optim.others=sgd, a sgd-like',
    ),
    (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'optim.match_norm': 1.0},
        'mup scales the updates of .* optim.match_norm sizes them relative .*=hyper_p.standard',
    ),
    (
        {'scaling.name': 'complete_p', **BASE, 'model.reparam': 'shared'},
        'complete_p has a learning rate for each block, but model.reparam=shared shares one',
    ),
)


@pytest.mark.parametrize(('changes', 'message'), INVALID)
def test_conflicting_scalings_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        check(tiny_config(changes))


def test_one_sided_growth_with_spectral_is_refused():
    config = grow_config('mup', **{'model.mlp': 'moe', 'optim.name': 'muon'})
    with pytest.raises(ValueError, match='no rule for layers/mlp/router, because only one'):
        tiny_learner(config)
