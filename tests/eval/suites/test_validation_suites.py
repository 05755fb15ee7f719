"""Suites of the validation split. Equivalence: they read the same rows and losses as perplexity."""

import dataclasses

import jax
import numpy as np
import pytest

from eval.load import Intervention, open_data
from eval.suites.ablate import ablate
from eval.suites.ablate import sum_cross_entropy as ablated_cross_entropy
from eval.suites.calibration import bootstrap_units, calibration, split_halves
from eval.suites.layers import layers, sum_angles
from eval.suites.perplexity import perplexity
from eval.suites.reading import (
    TargetRow,
    jit_statistic,
    split_rows,
    validation_batches,
    validation_rows,
)
from eval.suites.sharpness import sharpness
from lm.data.tokenizers import ByteTokenizer
from lm.inference.interventions import build_collections
from tests.eval.suites.checkpoints import checkpoint_from_recipe
from tests.helpers import checked_config

READ = {  # across documents, within them
    'rows': {'data.packing': 'concat'},
    'documents': {'data.packing': 'best_fit', 'data.mask_documents': True},
}


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Documents shorter and longer than a row."""
    folder = tmp_path_factory.mktemp('text')
    for i in range(30):
        (folder / f'{i}.txt').write_text(f'{i}: ' + 'abcdefgh ' * (1 + i % 5))
    return {
        'data.source': f'text:{folder}/*.txt',
        'data.cache_dir': str(folder / 'cache'),
        'data.validation_fraction': 0.5,
        'data.seq_len': 16,
    }


@pytest.fixture(scope='module', params=READ)
def checkpoint(request, corpus):
    config = checked_config(corpus | READ[request.param] | {'model.n_layers': 3})
    loaded = checkpoint_from_recipe(config, ByteTokenizer(), meta={'data': None})
    params = loaded.weights.params
    params = params | {'readout': 3 * params['readout']}  # far from uniform
    return dataclasses.replace(loaded, weights=loaded.weights.replace(params=params))


@pytest.mark.full
def test_suites_read_the_same_tokens_as_perplexity(checkpoint):
    expected = perplexity(checkpoint).numbers
    suite_result = calibration(checkpoint, tokens=0, resamples=20, calibrator='correctness')
    assert suite_result.numbers['tokens'] == expected['tokens']
    np.testing.assert_allclose(suite_result.numbers['nll'], expected['validation_ce'], rtol=1e-5)
    assert sum(suite_result.items['tokens']) == expected['tokens']
    np.testing.assert_allclose(
        sum(suite_result.items['nll']), expected['tokens'] * expected['validation_ce'], rtol=1e-5
    )
    assert suite_result.numbers['held_out_nll_scaled'] < suite_result.numbers['held_out_nll']
    assert suite_result.numbers['temperature'] > 1.2  # the readout was made three times too large
    table = suite_result.tables['Reliability'].columns
    assert sum(table['tokens']) == expected['tokens'] + 2 * suite_result.numbers['held_out_tokens']
    assert (
        0 < suite_result.numbers['held_out_ece_calibrated'] < suite_result.numbers['held_out_ece']
    )
    suite_result = layers(checkpoint, tokens=0)
    assert suite_result.numbers['tokens'] == expected['tokens']
    np.testing.assert_allclose(suite_result.numbers['ce'], expected['validation_ce'], rtol=1e-5)
    increase = suite_result.tables['Loss without each block'].columns['loss increase']
    assert len(increase) == 3 and np.abs(increase).min() > 1e-4
    apart = suite_result.tables['Angular distance of the streams before blocks'].columns
    assert len(apart['layer']) == 3 + 2 + 1


@pytest.mark.full
def test_fewer_tokens_are_the_first_rows(checkpoint):
    all_rows = validation_rows(checkpoint, 0)
    some = validation_rows(checkpoint, 40)
    assert 40 <= sum(row.is_target.sum() for row in some) < 40 + 16
    for row, same in zip(some, all_rows, strict=False):
        np.testing.assert_array_equal(row.tokens, same.tokens)


def test_rows_name_their_documents(checkpoint):
    """There are as many documents as in the split, each with its text in order."""
    split = open_data(checkpoint).validation
    bos = checkpoint.learner.bos_id
    rows = list(split_rows(split, checkpoint.recipe.data.mask_documents, bos))
    tokens_by_document = {}
    for row in rows:
        for token, number in zip(
            row.tokens[1:][row.is_target], row.document[row.is_target], strict=True
        ):
            tokens_by_document.setdefault(int(number), []).append(int(token))
    texts = sorted(
        [*document.tolist(), checkpoint.tokenizer.eos_id] for document in split.documents()
    )
    assert sorted(tokens_by_document.values()) == texts


def test_halves_are_disjoint_and_equal():
    unit = np.repeat([0, 1, 2, 3], [5, 1, 3, 2])
    np.testing.assert_array_equal(split_halves(unit), unit == 0)  # 5, then 1 + 3 and 2 in the other
    first = split_halves(np.repeat(np.arange(50), 7))
    assert abs(first.sum() - 175) <= 7


def test_units_are_documents_or_rows():
    def row(*document):
        document = np.array(document)
        return TargetRow(np.zeros(len(document) + 1, int), np.ones(len(document), bool), document)

    np.testing.assert_array_equal(bootstrap_units([row(3, 3), row(3, 5)]), [0, 0, 0, 1])
    np.testing.assert_array_equal(bootstrap_units([row(0, 0), row(0)]), [0, 0, 1])
    with pytest.raises(ValueError, match='needs at least two documents or rows of validation text'):
        bootstrap_units([row(0, 0)])


def test_angles_match_arccos():
    streams = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    streams[2, 0] = 0.0
    weights = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    angle, influence = sum_angles(streams, weights)
    lengths = np.maximum(np.linalg.norm(streams, axis=-1), 1e-9)
    for i in range(3):
        for j in range(3):
            cos = (streams[i] * streams[j]).sum(-1) / (lengths[i] * lengths[j])
            by_hand = weights * np.arccos(np.clip(cos, -1, 1)) / np.pi
            if i != j:
                np.testing.assert_allclose(angle[i, j], by_hand.sum(), rtol=1e-4)
            np.testing.assert_allclose(influence[i, j], (weights * (1 - cos)).sum(), atol=1e-5)
    np.testing.assert_array_equal(np.diagonal(angle)[:2], 0.0)


def test_small_angle_keeps_its_digits():
    """At 1e-4 the cosine is 1 in float32."""
    pair = np.array([[[1.0, 0.0]], [[np.cos(1e-4), np.sin(1e-4)]]], np.float32)
    angle, _ = sum_angles(pair, np.ones(1))
    np.testing.assert_allclose(angle[0, 1], 1e-4 / np.pi, rtol=1e-3)


@pytest.mark.full
def test_sharpness_without_optimizer_state(checkpoint):
    """There is no folder, and so no state of the optimizer."""
    suite_result = sharpness(checkpoint, rows=2, iterations=4, rounds=2)
    assert suite_result.numbers['sharpness'] > suite_result.numbers['sharpness_2'] > 0
    assert (
        0 < suite_result.numbers['logit_curvature'] < 0.5
        and suite_result.numbers['logit_sharpness'] > 0
    )
    assert 0 < suite_result.numbers['lipschitz_mean'] <= suite_result.numbers['lipschitz_max']
    lines = suite_result.tables['Eigenvalues of the Hessian'].columns
    assert 'preconditioned_sharpness' not in suite_result.numbers
    assert lines['value'][-1] is None and 'cannot be read' in lines['how'][-1]


@pytest.mark.full
def test_ablation_is_the_loss_with_zeroed_heads(checkpoint):
    """Equivalence: each entry against the same intervention on whole rows of the split, and the
    sum of all against the loss of perplexity.
    """
    suite_result = ablate(checkpoint, tokens=0)
    expected = perplexity(checkpoint).numbers
    assert suite_result.numbers['tokens'] == expected['tokens']
    np.testing.assert_allclose(suite_result.numbers['ce'], expected['validation_ce'], rtol=1e-5)
    heads = suite_result.tables['Loss without each head'].columns
    n_heads = checkpoint.recipe.model.n_heads
    assert heads['layer'] == [layer for layer in (1, 2, 3) for _ in range(n_heads)]
    assert heads['head'] == [*range(n_heads)] * 3
    mlps = suite_result.tables['Loss without each MLP'].columns['loss increase']
    assert np.abs(mlps).min() > 1e-4 and suite_result.numbers['mlp_max'] == max(mlps)
    collections = build_collections(
        checkpoint.recipe, [Intervention('heads', 'zero', layers=1, heads=1)], None
    )
    split = open_data(checkpoint).validation
    loss = jit_statistic(checkpoint, ablated_cross_entropy)
    sums = [
        jax.device_get(loss(checkpoint.weights, batch, checkpoint.hyper, collections))
        for batch in validation_batches(checkpoint, split, 0)
    ]
    ce, n_tokens = np.sum(sums, 0)
    at = heads['layer'].index(2) + 1
    np.testing.assert_allclose(
        heads['loss increase'][at], ce / n_tokens - suite_result.numbers['ce'], atol=1e-5
    )
