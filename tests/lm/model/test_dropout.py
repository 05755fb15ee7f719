"""Dropout in a model. Property: where it drops, and that nothing drops without it. Contract: the
kernel that is selected for it, and refusals.
"""

import jax
import numpy as np
import pytest

from lm.config.resolve import resolve, to_dict, update_recipe
from lm.model.block import ACTIVATIONS
from lm.model.kernels import select_kernels
from lm.run.start import carry_over
from lm.training.state import make_hyper
from lm.training.step import compute_activations
from modules.statistics import STATS
from tests.helpers import checked_config, initial_state, packed_batch, tiny_learner, train_step

PATHS = ('model.dropout', 'model.attention_dropout', 'model.embedding_dropout')
DROPS = checked_config({'model.n_layers': 1, 'model.dropout': 0.25, 'model.position': 'learned'})


def stream_changes(rates, mutable=(STATS, ACTIVATIONS)):
    """The embeddings, and the changes that attention and MLP make to the stream."""
    learner, state = tiny_learner(DROPS), initial_state(DROPS)
    hyper = make_hyper(DROPS) | {path: np.float32(rate) for path, rate in rates.items()}

    @jax.jit
    def run(state, hyper):
        variables = learner.variables(state.weights)
        return compute_activations(learner, variables, packed_batch(rows=64), mutable, hyper)[1]

    activations = run(state, hyper)[ACTIVATIONS]
    streams = [
        activations['embedding'],
        *(activations['layers'][n][0] for n in ('after_attention', 'after_mlp')),
    ]
    return [streams[0], streams[1] - streams[0], streams[2] - streams[1]]


@pytest.mark.full
def test_rates_drop_at_their_site_in_training_only():
    """Shares of zeros in the embeddings, and in the outputs of attention and MLP.

    The rate of the probabilities changes attention's output without zeros in it. Catches a rate
    that is read at another site, a mask shared by two sites, and dropout in evaluation.
    """
    no_rates, without_dropout = (
        dict.fromkeys(PATHS, 0.0),
        stream_changes({}, mutable=(ACTIVATIONS,)),
    )
    for change, expected in zip(stream_changes(no_rates), without_dropout, strict=True):
        np.testing.assert_allclose(change, expected, rtol=1e-6, atol=1e-6)
    embedding, attended, mapped = stream_changes(no_rates | {'model.dropout': 0.25})
    assert not np.any(embedding == 0)
    for change in (attended, mapped):
        np.testing.assert_allclose(np.mean(change == 0), 0.25, atol=0.03)  # deviation 0.005
    assert np.mean((attended == 0) != (mapped == 0)) > 0.3
    embedding, *_ = stream_changes(no_rates | {'model.embedding_dropout': 0.5})
    np.testing.assert_allclose(np.mean(embedding == 0), 0.5, atol=0.03)
    embedding, attended, _ = stream_changes(no_rates | {'model.attention_dropout': 0.5})
    np.testing.assert_array_equal(embedding, without_dropout[0])
    # A token whose probabilities are all dropped gets 0.
    assert np.mean(np.abs(attended - without_dropout[1]) > 1e-4) > 0.5
    assert np.mean(attended[:, 4:] == 0) < 0.1


@pytest.mark.full
def test_program_without_dropout_has_no_random_bits():
    """No number, no key and no random bit; rates of 0 give the same program."""
    plain = checked_config({'model.n_layers': 1})
    explicit = resolve(to_dict(update_recipe(plain, dict.fromkeys(PATHS, 0.0))))
    assert explicit == plain and not make_hyper(plain).keys() & {*PATHS}
    state = initial_state(plain)
    text = train_step(plain).lower(state, packed_batch(), make_hyper(plain)).as_text()
    assert state.stats == {} and 'threefry' not in text and 'rng_bit_generator' not in text


def test_carry_over_keeps_own_dropout_keys():
    """Other statistics are kept. Catches statistics lost when a key appears or disappears."""
    keys, mean = np.arange(4), np.ones(3)
    with_both = {'stats': {'layers': {'dropout_key': keys, 'norm': {'mean': mean}}}}
    plain = {'stats': {'layers': {'norm': {'mean': 2 * mean}}}}
    carried = carry_over(plain, with_both)['stats']['layers']
    assert carried['dropout_key'] is keys and carried['norm']['mean'][0] == 2
    assert carry_over(with_both, plain)['stats']['layers'].keys() == {'norm'}
    assert carry_over({}, plain) is plain


def test_open_choice_selects_kernel_with_dropout():
    for platform in ('cpu', 'gpu', 'tpu'):
        assert select_kernels(DROPS, platform).kernel_name('attention') == 'reference'
    fused = update_recipe(DROPS, {'model.attention_dropout': 0.0})
    assert select_kernels(fused, 'cpu').kernel_name('attention') == 'blocked'
    assert select_kernels(fused, 'tpu').kernel_name('attention') == 'splash'


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'kernels.attention': 'splash'}, r'=reference, or model\.attention_dropout=0'),
        ({'kernels.implementation': 'xla'}, 'kernels.attention=blocked does not support dropout'),
        ({'model.attention': 'linear'}, 'linear has no attention probabilities'),
        ({'model.dropout': 1.0}, r'model\.dropout must be between 0 and 0\.99; got 1\.0'),
    ],
)
def test_parts_without_dropout_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        checked_config({'model.dropout': 0.1} | changes)
    if 'model.dropout' not in changes:
        checked_config({'model.dropout': 0.1, 'model.attention_dropout': 0.0} | changes)
