"""Interventions: identities, patches from another text, positions, generation, and refusals."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lm.inference.engine import Engine, Request
from lm.inference.interventions import SITES, Intervention
from lm.inference.load import jit_with_learner
from lm.inference.probes import observe
from lm.inference.sampling import Sampling
from tests.eval.suites.checkpoints import make_checkpoint

LAYERS, HEADS = 4, 2
TEXTS = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 2, 6)), jnp.int32)
A, B = TEXTS
CASES = {  # scanned, two blocks of kinds of their own in a period, and several streams
    'plain': {},
    'unrolled': {'model.scan_layers': False},
    'pattern': {'model.pattern': 'linear+softmax'},
    'streams': {'model.stream': 'hyper_connections'},
}


@functools.cache
def load_case(case='plain'):
    sizes = {'model.n_layers': LAYERS, 'model.n_heads': HEADS, 'model.n_kv_heads': HEADS}
    return make_checkpoint(sizes | CASES[case])


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_scale_by_one_changes_nothing(case):
    """Bit for bit, at every site at once."""
    checkpoint = load_case(case)
    changes = [Intervention(site, 'scale', 1.0) for site in SITES]
    np.testing.assert_array_equal(checkpoint.logits(A, changes), checkpoint.logits(A))


@pytest.mark.full
@pytest.mark.parametrize('case', ['plain', 'unrolled', 'pattern'])
def test_zeroed_heads_remove_attention(case):
    """The stream after attention is the stream before it, in this layer alone."""
    checkpoint = load_case(case)
    changed = checkpoint.activations(A, [Intervention('heads', 'zero', layers=1)])
    before, after = changed['after_mlp'], changed['after_attention']
    np.testing.assert_array_equal(after[1], before[0])
    assert all(np.abs(after[i] - before[i - 1]).max() > 1e-3 for i in (2, 3))
    whole = checkpoint.activations(A)
    np.testing.assert_allclose(after[0], whole['after_attention'][0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_patching_everything_gives_the_logits_patched_from(case):
    """Heads and hidden units of all layers with the embedding, or the last stream alone."""
    checkpoint = load_case(case)
    source = checkpoint.activations(B, within=True)
    assert source['heads'].shape == (LAYERS, *B.shape, HEADS, 16 // HEADS)
    assert source['hidden'].shape[:3] == (LAYERS, *B.shape)
    expected = checkpoint.logits(B)
    assert np.abs(expected - checkpoint.logits(A)).max() > 1e-2
    for names in (('final',), ('embedding', 'heads', 'hidden')):
        patch = [Intervention(name, 'replace', source[name]) for name in names]
        np.testing.assert_allclose(checkpoint.logits(A, patch), expected, rtol=1e-4, atol=1e-5)


def test_operations_apply_in_order_where_they_are_selected():
    checkpoint = load_case()
    changes = [
        Intervention('embedding', 'scale', 2.0, positions=[1, 2]),
        Intervention('embedding', 'add', np.arange(16.0), positions=2),
        Intervention('embedding', 'replace', 7.0, rows=1, positions=4, features=[0, 3]),
        Intervention('embedding', 'scale', 3.0, rows=1, positions=4),
    ]
    expected = np.array(checkpoint.activations(A)['embedding'])
    expected[:, 1:3] *= 2
    expected[:, 2] += np.arange(16.0)
    expected[1, 4, [0, 3]] = 7
    expected[1, 4] *= 3
    actual = checkpoint.activations(A, changes)['embedding']
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_change_at_a_position_reaches_later_positions_alone():
    checkpoint = load_case()
    change = Intervention('after_mlp', 'add', 1.0, layers=0, positions=3)
    difference = np.abs(checkpoint.logits(A, [change]) - checkpoint.logits(A)).max((0, 2))
    assert (difference[:3] == 0).all() and (difference[3:] > 1e-4).all()


def test_another_value_needs_no_new_program():
    checkpoint = load_case()
    program = jit_with_learner(observe, checkpoint.learner)

    def run(value, head):
        checkpoint.logits(A, [Intervention('heads', 'scale', value, layers=2, heads=head)])
        return program._cache_size()

    assert run(0.0, 0) == run(0.5, 1) == run(2.0, 0)


@pytest.mark.full
@pytest.mark.parametrize('case', ['plain', 'pattern'])
def test_cached_decoding_has_the_interventions(case):
    checkpoint = load_case(case)
    changes = [
        Intervention('heads', 'zero', layers=[1, 3], heads=1),
        Intervention('after_mlp', 'add', np.linspace(-1, 1, 16), layers=1),
    ]
    expected, cache = checkpoint.logits(A, changes), checkpoint.init_cache(len(A), A.shape[1])
    assert np.abs(expected - checkpoint.logits(A)).max() > 1e-2
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        part = A[:, start:stop]
        logits, cache = checkpoint.extend(cache, part, interventions=changes)
        np.testing.assert_allclose(logits, expected[:, start:stop], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_engine_generates_with_interventions():
    """A last stream along the readout of one token, for every row, makes the model repeat it."""
    checkpoint = load_case()
    direction = 100 * checkpoint.variables['params']['readout'][:, 77]
    changes = [Intervention('final', 'replace', direction)]
    engine = Engine(checkpoint, slots=1, capacity=8, interventions=changes)
    engine.admit(Request((1, 5), 3, Sampling(0.0)))
    tokens = [
        token.id for _ in range(3) for update in engine.step().values() for token in update.tokens
    ]
    assert tokens == [77, 77, 77]


INVALID = [
    ({'site': 'block', 'operation': 'zero'}, 'site must be one of'),
    ({'site': 'heads', 'operation': 'drop'}, 'operation must be one of'),
    ({'site': 'heads', 'operation': 'scale'}, 'needs a value; got None'),
    ({'site': 'heads', 'operation': 'zero', 'value': 1.0}, 'takes no value'),
    ({'site': 'final', 'operation': 'zero', 'layers': 1}, 'is in no block'),
    ({'site': 'hidden', 'operation': 'zero', 'heads': 1}, 'selected at the site heads'),
    ({'site': 'heads', 'operation': 'zero', 'layers': 4}, 'from 0 to 3; got .4.'),
    ({'site': 'heads', 'operation': 'zero', 'heads': 2}, 'from 0 to 1; got .2.'),
    ({'site': 'heads', 'operation': 'add', 'value': np.ones(3)}, 'must broadcast to .L=4, B=2'),
]


@pytest.mark.parametrize(('fields', 'message'), INVALID)
def test_wrong_interventions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        load_case().logits(A, [Intervention(**fields)])


def test_generation_has_no_rows_to_select():
    change = Intervention('heads', 'zero', positions=2)
    with pytest.raises(ValueError, match='cannot be selected here'):
        load_case().intervened_variables([change])


def test_experts_have_no_hidden_units():
    checkpoint = make_checkpoint({'model.mlp': 'moe'})
    with pytest.raises(ValueError, match='hidden units of experts belong to other tokens'):
        checkpoint.logits(A, [Intervention('hidden', 'zero')])
