"""Dropout in a model. Property: what is dropped where, and that nothing is without it. Contract:
which kernel there is for it, and what is refused.
"""

import jax
import numpy as np
import pytest

from lm.config.resolve import resolve, to_dict, update_recipe
from lm.model.kernels import select_kernels
from lm.model.transformer import ACTIVATIONS
from lm.run.start import carry_over
from lm.training.state import make_hyper
from lm.training.step import compute_activations
from modules.statistics import STATS
from tests.helpers import checked_config, initial_state, packed_batch, tiny_learner, train_step

PATHS = ('model.dropout', 'model.attention_dropout', 'model.embedding_dropout')
DROPS = checked_config({'model.n_layers': 1, 'model.dropout': 0.25, 'model.position': 'learned'})


def places(rates, mutable=(STATS, ACTIVATIONS)):
    """{place: what the stream has there, less what it had at the place before}."""
    learner, state = tiny_learner(DROPS), initial_state(DROPS)
    hyper = make_hyper(DROPS) | {path: np.float32(rate) for path, rate in rates.items()}

    @jax.jit
    def run(state, hyper):
        variables = learner.variables(state.weights)
        return compute_activations(learner, variables, packed_batch(rows=64), mutable, hyper)[1]

    seen = run(state, hyper)[ACTIVATIONS]
    streams = [seen['embedding'], *(seen['layers'][n][0] for n in ('after_attention', 'after_mlp'))]
    return [streams[0], streams[1] - streams[0], streams[2] - streams[1]]


@pytest.mark.full
def test_each_rate_drops_in_its_place_and_only_in_training():
    """Shares of zeros, of the embeddings and of what attention and the MLP add. The rate of the
    probabilities alone changes what attention adds, and zeroes none of it. Catches a rate that is
    read at another place, one mask for two, and dropout in evaluation.
    """
    none, off = dict.fromkeys(PATHS, 0.0), places({}, mutable=(ACTIVATIONS,))
    for found, wanted in zip(places(none), off, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    embedding, attended, mapped = places(none | {'model.dropout': 0.25})
    assert not np.any(embedding == 0)
    for part in (attended, mapped):
        np.testing.assert_allclose(np.mean(part == 0), 0.25, atol=0.03)  # deviation 0.005
    assert np.mean((attended == 0) != (mapped == 0)) > 0.3
    embedding, *_ = places(none | {'model.embedding_dropout': 0.5})
    np.testing.assert_allclose(np.mean(embedding == 0), 0.5, atol=0.03)
    embedding, attended, _ = places(none | {'model.attention_dropout': 0.5})
    np.testing.assert_array_equal(embedding, off[0])
    assert np.mean(np.abs(attended - off[1]) > 1e-4) > 0.5  # 0 where it drops all of a row's
    assert np.mean(attended[:, 4:] == 0) < 0.1


@pytest.mark.full
def test_without_it_nothing_of_it_is_in_the_program():
    """No number, no key and no random bit; spelt out it is the same program."""
    plain = checked_config({'model.n_layers': 1})
    spelt = resolve(to_dict(update_recipe(plain, dict.fromkeys(PATHS, 0.0))))
    assert spelt == plain and not make_hyper(plain).keys() & {*PATHS}
    state = initial_state(plain)
    text = train_step(plain).lower(state, packed_batch(), make_hyper(plain)).as_text()
    assert state.stats == {} and 'threefry' not in text and 'rng_bit_generator' not in text


def test_a_start_from_weights_without_it_has_keys_of_its_own():
    """And keeps what else was carried; catches statistics that are gone as a key came or went."""
    keys, mean = np.arange(4), np.ones(3)
    with_both = {'stats': {'layers': {'dropout_key': keys, 'norm': {'mean': mean}}}}
    plain = {'stats': {'layers': {'norm': {'mean': 2 * mean}}}}
    found = carry_over(plain, with_both)['stats']['layers']
    assert found['dropout_key'] is keys and found['norm']['mean'][0] == 2
    assert carry_over(with_both, plain)['stats']['layers'].keys() == {'norm'}
    assert carry_over({}, plain) is plain


def test_a_kernel_with_dropout_is_chosen_where_the_choice_is_open():
    for platform in ('cpu', 'gpu', 'tpu'):
        assert select_kernels(DROPS, platform).kernel_name('attention') == 'reference'
    fused = update_recipe(DROPS, {'model.attention_dropout': 0.0})
    assert select_kernels(fused, 'cpu').kernel_name('attention') == 'blocked'
    assert select_kernels(fused, 'tpu').kernel_name('attention') == 'splash'


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'kernels.attention': 'splash'}, r'=reference, or model\.attention_dropout=0'),
        ({'kernels.implementation': 'xla'}, 'kernels.attention=blocked drops no probabilities'),
        ({'model.attention': 'linear'}, 'linear has no probabilities'),
        ({'model.dropout': 1.0}, r'model\.dropout must be between 0 and 0\.99; got 1\.0'),
    ],
)
def test_what_cannot_drop_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        checked_config({'model.dropout': 0.1} | changes)
    if 'model.dropout' not in changes:
        checked_config({'model.dropout': 0.1, 'model.attention_dropout': 0.0} | changes)
