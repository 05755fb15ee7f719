"""Stages of an update. Reference: each stage, and all stages in order, in float64 numpy. Contract:
numbers are mapped, a stage without its inputs is left out, the stored state keeps its layout.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import BatchFunctions, Direction, as_direction, unbox_state
from modules.optim.stages import (
    NO_DECAY,
    STAGES,
    apply_stages,
    build_stages,
    measure_ghost_radius,
    stage_inputs,
    stored_stages,
)
from modules.params import ParamSpec

SPECS = {
    'embedding': ParamSpec('embedding', ('vocab', 'embed')),
    'positions': ParamSpec('embedding', ('position', 'embed')),
    'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'scale': ParamSpec('vector', ('layer', 'embed')),
    'readout': ParamSpec('readout', ('embed', 'vocab'), ('embed',)),
}
SHAPES = {'embedding': (6, 4), 'positions': (5, 4), 'up': (2, 4, 3), 'scale': (2, 4)}
SHAPES |= {'readout': (4, 6)}
EACH = {'embedding': (0, 1), 'positions': (0, 1), 'up': (1, 2), 'scale': (1,), 'readout': (0, 1)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


GRADS, WEIGHTS, X = draw(0), draw(1), np.random.default_rng(2).normal(size=(2, 3, 5, 4))
GRADS['up'][1] *= 30  # layers of another size
RAW_GRADS = draw(3)  # of the loss, whose signs differ from those of GRADS
RAW_GRADS['scale'][1] = -GRADS['scale'][1]  # a layer without agreement
TOKENS = np.ones((2, 3, 5))
TOKENS[0, 1, 2], X[0, 1, 2] = 0, 100  # padding
X[1, 2, 4] *= 3  # the last token has the largest spread
SHARES = {'embedding': 0.1, 'positions': 0.2, 'up': 0.3, 'readout': 0.4}  # of a vector none
LEFT = np.array([0.25, 1.0]).reshape(2, 1, 1)  # of the decay of each layer, by the optimizer
RATES = dict(zip(SPECS, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
FACTORS = dict(zip(SPECS, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
TRAINED = {name: name != 'positions' for name in SPECS}
NUMBERS = {
    'optim.embedding_gradient_shrink': 0.25,
    'optim.clip_norm': 1.5,
    'optim.match_rms': 0.2,
    'optim.update_clip': 0.15,
    'optim.update_clip_sigmas': 3.0,
    'optim.ghost_radius': 0.02,
}


def half_gradient(grads, state, params=None):
    """The optimizer of these tests: half the gradient, and less decay of some matrices."""
    half = jax.tree.map(lambda g: 0.5 * g, grads)
    return half | {'up': Direction(half['up'], jnp.asarray(LEFT))}, state


def facts():
    """Arrays are of the type that is the default where they are made."""
    shares = {name: jnp.asarray(share) for name, share in SHARES.items()} | {'scale': NO_DECAY}
    return {
        'specs': SPECS,
        'penalty_shares': shares,
        'decay_shares': shares,
        'cautious_decay_shares': shares,
        'cautious_updates': True,
        'matched_roles': ('hidden', 'readout'),
        'learning_rates': jax.tree.map(jnp.asarray, RATES),
        'eps_factors': FACTORS,
        'optimizer': optax.GradientTransformation(lambda params: optax.EmptyState(), half_gradient),
        'trainable': TRAINED,
    }


def functions(tokens_at_a_time=0):
    """Logits are x W; other parts of a model do not matter."""

    def activations_fn(params, rows):
        return rows, jax.tree_util.Partial(lambda w, x: x @ w, params['readout'])

    fields = dict.fromkeys(BatchFunctions._fields) | {'rows': X, 'weights': TOKENS}
    return BatchFunctions(
        **fields | {'activations_fn': activations_fn, 'tokens_at_a_time': tokens_at_a_time}
    )


def rms(name, u):
    return np.sqrt(np.mean(u**2, EACH[name], keepdims=True))


def norms(name, u):
    return np.sqrt(np.sum(u**2, EACH[name], keepdims=True))


def resize_reference(
    name, u, match_rms=None, match_norm=None, match_norm_floor=None, update_clip=None
):
    if match_rms is not None and name == 'up':
        u = match_rms * u / rms(name, u)
    elif name in ('up', 'readout'):
        ratio = norms(name, WEIGHTS[name]) / norms(name, u)
        if match_norm is not None:
            u = match_norm * ratio * u
        elif match_norm_floor is not None:
            u = np.maximum(1, match_norm_floor * ratio) * u
    return u / np.maximum(1, rms(name, u) / (update_clip or np.inf))


def mask_reference(name, u):
    """`c_adamw.py` of the authors, with a mean for each layer of a stack."""
    mask = (RAW_GRADS[name] * u > 0).astype(float)
    return u * mask / np.maximum(np.mean(mask, EACH[name], keepdims=True), 1e-3)


def radius(change):
    spread = np.ptp(X @ change['readout'], axis=-1)
    return np.max(spread * TOKENS) / np.pi


def decayed_share(change):
    agrees = [(change[name] * WEIGHTS[name] <= 0).ravel() for name in SHARES]
    return np.mean(np.concatenate(agrees))


def norm(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in tree.values()))


def each(function):
    return lambda tree, **options: {name: function(name, u, **options) for name, u in tree.items()}


REFERENCES = {  # in the order in which they are applied
    'shrink_embedding_gradient': each(
        lambda name, g, embedding_gradient_shrink: (
            g * (embedding_gradient_shrink if name == 'embedding' else 1)
        )
    ),
    'add_penalty': each(lambda name, g: g + SHARES.get(name, 0) * WEIGHTS[name]),
    'clip': lambda tree, clip_norm: {
        n: g * min(1, clip_norm / norm(tree)) for n, g in tree.items()
    },
    'divide_by_eps_factor': each(lambda name, g: g / FACTORS[name]),
    'optimize': each(lambda name, g: g / 2),
    'mask_updates': each(mask_reference),
    'resize': each(resize_reference),
    'clip_by_history': lambda tree, update_clip_sigmas: tree,  # before it has a history
    'scale_by_learning_rate': each(lambda name, u: -RATES[name] * u),
    'apply_decay': each(
        lambda name, u: u - SHARES.get(name, 0) * (LEFT if name == 'up' else 1) * WEIGHTS[name]
    ),
    'apply_cautious_decay': each(
        lambda name, u: (
            u
            - SHARES.get(name, 0)
            * (LEFT if name == 'up' else 1)
            * np.where(u * WEIGHTS[name] <= 0, WEIGHTS[name], 0)
        )
    ),
    'freeze': each(lambda name, u: u * TRAINED[name]),
    'limit_ghost_radius': lambda tree, ghost_radius: {
        name: u * min(1, ghost_radius / radius(tree)) for name, u in tree.items()
    },
}


WITH_DIRECTIONS = (
    'mask_updates',
    'resize',
    'clip_by_history',
    'apply_decay',
    'apply_cautious_decay',
)


def stage_options(name, numbers=NUMBERS):
    paths = {option: f'optim.{option}' for option in stage_inputs(STAGES[name])[1]}
    return {option: numbers[path] for option, path in paths.items() if path in numbers}


def run(name, updates, **options):
    """Returns (updates, the state that the stage returns)."""
    stage_facts = {fact: facts()[fact] for fact in stage_inputs(STAGES[name])[0]}
    stage = optax.with_extra_args_support(STAGES[name](**stage_facts, **options))
    batch = functions()._asdict() | {'grad': RAW_GRADS}
    return stage.update(updates, unbox_state(stage.init(WEIGHTS)), WEIGHTS, **batch)


def assert_same(actual, expected, rtol=1e-12):
    for name, leaf in expected.items():
        value = as_direction(actual[name]).value
        np.testing.assert_allclose(value, leaf, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize('name', STAGES)
def test_stage_matches_reference(name):
    """Catches an rms of all layers, a clip of each leaf, positions taken for words, a radius or a
    limit of the norm that is met from above, and a share of the decay that is lost.
    """
    with jax.enable_x64(True):
        updates = half_gradient(GRADS, ())[0] if name in WITH_DIRECTIONS else GRADS
        before = {leaf: np.asarray(as_direction(u).value) for leaf, u in updates.items()}
        actual, state = run(name, updates, **stage_options(name))
        assert_same(actual, REFERENCES[name](before, **stage_options(name)))
        if name == 'limit_ghost_radius':
            np.testing.assert_allclose(state.ghost_radius, radius(before), rtol=1e-12)
        if name == 'apply_cautious_decay':
            np.testing.assert_allclose(state.decayed_share, decayed_share(before), rtol=1e-6)
        if isinstance(actual['up'], Direction):
            np.testing.assert_array_equal(actual['up'].decay_share, LEFT)


@pytest.mark.parametrize('name', [name for name in STAGES if stage_inputs(STAGES[name])[1]])
def test_numbers_are_mapped(name):
    """Runs of a single program, some without any limit. Catches a branch on a traced number."""
    grads = jax.tree.map(jnp.float32, GRADS)
    options = {option: jnp.float32([value, 1e6]) for option, value in stage_options(name).items()}
    mapped = jax.jit(jax.vmap(lambda options: run(name, grads, **options)[0]))(options)
    for i in range(2):
        numbers = {option: np.float64(values[i]) for option, values in options.items()}
        assert_same(
            jax.tree.map(lambda u, i=i: u[i], mapped), REFERENCES[name](GRADS, **numbers), 1e-5
        )


@pytest.mark.parametrize(
    'options',
    [
        {'match_rms': 0.2},
        {'update_clip': 0.15},
        {'match_norm': 0.3},
        {'match_norm_floor': 2.0},
        {'match_norm': 0.3, 'update_clip': 0.15},
    ],
    ids='-'.join,
)
def test_resize_with_some_options(options):
    """Catches vectors that are matched, a clip that has no size to compare with, a floor that is
    met from above, and a norm of all layers.
    """
    expected = REFERENCES['resize'](GRADS, **options)
    assert_same(run('resize', GRADS, **options)[0], expected, 1e-5)
    if 'match_norm_floor' in options:  # of its two layers, one is larger than the floor
        assert_same({'up': expected['up'][1]}, {'up': GRADS['up'][1]})
        assert np.abs(expected['up'][0] / GRADS['up'][0] - 1).min() > 0.1
    mapped = {name: jnp.float32([value, 2 * value]) for name, value in options.items()}
    pair = jax.vmap(lambda options: run('resize', GRADS, **options)[0])(mapped)
    twice = {name: 2 * value for name, value in options.items()}
    assert_same(jax.tree.map(lambda u: u[1], pair), REFERENCES['resize'](GRADS, **twice), 1e-5)


def test_matched_role_without_parameter_is_refused():
    specs = {name: spec for name, spec in SPECS.items() if name != 'readout'}
    STAGES['resize'](specs, ('hidden', 'readout'), match_rms=0.1)
    with pytest.raises(ValueError, match=r"no parameter has the role 'readout'"):
        STAGES['resize'](specs, ('hidden', 'readout'), match_norm=1.0)


def test_zero_update_stays_zero():
    """A zero gradient gives no NaN."""
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    assert not any(
        leaf.any() for leaf in run('resize', zeros, **stage_options('resize'))[0].values()
    )


@pytest.mark.parametrize('decay', ['apply_decay', 'apply_cautious_decay'])
def test_stages_apply_in_order(decay):
    """Catches a gradient that shrinks behind its clipping, a decay that is clipped, and a radius
    of the step before its rate or its decay. Of the two stages of decay an update has one.
    """
    assert list(STAGES) == list(REFERENCES)
    absent = {'apply_decay': 'cautious_decay_shares', 'apply_cautious_decay': 'decay_shares'}[decay]
    with jax.enable_x64(True):
        stages = build_stages(facts() | {absent: None}, NUMBERS)
        assert len(stages) == len(STAGES) - 1 and decay in stages
        state = unbox_state(stored_stages(stages).init(WEIGHTS))
        args = (stages, GRADS, state, WEIGHTS)
        batch = functions()._asdict() | {'grad': RAW_GRADS}
        actual, later, metrics = apply_stages(*args, **batch)
        inputs, expected = {}, GRADS
        for name in stages:
            inputs[name], expected = expected, REFERENCES[name](expected, **stage_options(name))
        assert_same(actual, expected)
        radius_before = radius(inputs['limit_ghost_radius'])
        np.testing.assert_allclose(metrics['ghost_radius'], radius_before, rtol=1e-12)
        if decay == 'apply_cautious_decay':
            share = decayed_share(inputs[decay])
            np.testing.assert_allclose(metrics.pop('decayed_share'), share, rtol=1e-6)
        assert metrics.keys() == {'ghost_radius', 'update_clip_factor'}
        assert jax.tree.structure(later) == jax.tree.structure(state)


@pytest.mark.parametrize('name', STAGES)
def test_stage_without_inputs_is_left_out(name):
    """None counts as missing, and one of two options is enough."""
    fact_names, options = stage_inputs(STAGES[name])
    for fact in fact_names:
        without = build_stages(facts() | {fact: None}, NUMBERS)
        assert name not in without and len(without) < len(STAGES)
    numbers = NUMBERS | {f'optim.{option}': None for option in options}
    assert (name in build_stages(facts(), numbers)) == (not options)
    assert name in build_stages(facts(), NUMBERS | {'optim.match_rms': None})


def test_stored_state_keeps_checkpoint_order():
    """Clipping first, then the factors where there are some, then the optimizer; last the history
    of updates, if it clips them, and no other.
    """
    adam = optax.scale_by_adam()
    inputs = facts() | {'optimizer': adam}
    for factors, place in ((FACTORS, 2), (None, 1)):
        stages = build_stages(inputs | {'eps_factors': factors}, NUMBERS)
        state = stored_stages(stages).init(WEIGHTS)
        assert state[place + 1].update_norms.count == 0 and len(state) == place + 2
        stages.pop('clip_by_history')
        state = stored_stages(stages).init(WEIGHTS)
        expected = (optax.EmptyState(),) * place + (adam.init(WEIGHTS),)
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        batch = functions()._asdict() | {'grad': jax.tree.map(jnp.float32, RAW_GRADS)}
        args = jax.tree.map(jnp.float32, (GRADS, state, WEIGHTS))
        _, later, _ = apply_stages(stages, *args, **batch)
        assert later[place].count == 1


def levanter_clip(norms, sigmas):
    """`clip_update_by_historical_norm` of Levanter, in numpy: the factor of each update."""
    factors = []
    for i, norm in enumerate(norms):
        past = norms[max(0, i - 128) : i]
        limit = past.mean() + sigmas * max(past.std(), 1e-6) if len(past) >= 64 else np.inf
        factors.append(limit / max(norm, 1e-6) if norm > limit else 1.0)
    return np.array(factors)


def test_updates_are_clipped_by_their_history():
    """Over 200 updates of two runs with other limits, some far larger than the rest. Catches a
    history of clipped norms, a norm of each parameter, and weight decay that is clipped.
    """
    sizes = 1 + 0.05 * np.random.default_rng(0).normal(size=200)
    sizes[[30, 80, 81, 150]] = 5.0, 4.0, 3.0, 4.0
    unit = jax.tree.map(lambda leaf: jnp.float32(leaf / norm(GRADS)), GRADS)
    unit['up'] = Direction(unit['up'], jnp.asarray(LEFT))

    def scan(sigmas):
        stage = STAGES['clip_by_history'](SPECS, update_clip_sigmas=sigmas)

        def update(state, size):
            scaled = jax.tree.map(lambda u: u * size, unit)
            scaled['up'] = unit['up']._replace(value=unit['up'].value * size)
            clipped, state = stage.update(scaled, state)
            values = {name: as_direction(u).value for name, u in clipped.items()}
            return state, (optax.tree.norm(values), clipped['up'].decay_share)

        return jax.lax.scan(update, unbox_state(stage.init(unit)), jnp.float32(sizes))[1]

    norms, shares = jax.jit(jax.vmap(scan))(jnp.float32([3.0, 1e6]))
    expected = levanter_clip(sizes, 3.0)
    clipped = np.flatnonzero(expected < 1)
    assert {80, 81, 150} <= {*clipped} and 30 not in clipped
    np.testing.assert_allclose(norms[0], sizes * expected, rtol=1e-4)
    np.testing.assert_allclose(norms[1], sizes, rtol=1e-5)
    assert (np.asarray(shares) == LEFT).all()


@pytest.mark.parametrize('tokens_at_a_time', [0, 6, 100])
def test_ghost_radius_in_chunks(tokens_at_a_time):
    """Catches a mean, padding that counts, and a last chunk that is left out."""
    with jax.enable_x64(True):
        actual = measure_ghost_radius(functions(tokens_at_a_time), WEIGHTS, GRADS)
        np.testing.assert_allclose(actual, radius(GRADS), rtol=1e-12)


def test_cautious_decay_by_hand():
    """With a negligible direction, weights of its sign shrink by the share, others stay exactly; a
    weight whose update is 0 decays. Catches the sign of the change for that of the direction.
    """
    direction = 1e-33 * jnp.float32([1.0, -1.0, 1.0, -1.0, 0.0, 1e33])
    scale = 2.0**-33  # times the change it is 0 in float32
    weight = scale * jnp.float32([2.0, -2.0, -2.0, 2.0, 3.0, 0.0])
    stage = STAGES['apply_cautious_decay'](cautious_decay_shares={'w': jnp.float32(0.25)})
    change = {'w': -1e-3 * direction}
    updates, state = stage.update(change, stage.init({'w': weight}), {'w': weight})
    after = np.asarray(weight + updates['w']) / scale
    np.testing.assert_array_equal(after[:5], [1.5, -1.5, -2.0, 2.0, 2.25])
    np.testing.assert_allclose(state.decayed_share, 4 / 6, rtol=1e-6)


def test_cautious_decay_without_decayed_parameters():
    """Nothing changes, and the share is 0 rather than 0 / 0."""
    stage = STAGES['apply_cautious_decay'](cautious_decay_shares=dict.fromkeys(SPECS, NO_DECAY))
    updates, state = stage.update(GRADS, stage.init(WEIGHTS), WEIGHTS)
    assert_same(updates, GRADS)
    assert float(state.decayed_share) == 0


def test_cautious_updates_keep_the_mean_size():
    """Where half of the entries of one size agree, these are twice as large. An update of the sign
    of its gradient stays. Catches a mask without its mean, and a mean over layers.
    """
    spec = {'w': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))}
    grads = jnp.float32([[[1, -1], [1, -1]], [[2, 3], [4, 5]]])
    direction = {'w': jnp.ones((2, 2, 2))}
    stage = STAGES['mask_updates'](specs=spec, cautious_updates=True)
    updates, _ = stage.update(direction, stage.init(direction), None, grad={'w': grads})
    np.testing.assert_array_equal(updates['w'], [[[2, 0], [2, 0]], [[1, 1], [1, 1]]])
