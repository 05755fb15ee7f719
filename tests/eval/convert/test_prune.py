"""Reference: scores and masks of small matrices, and scores against the effect of removal.

Property: a share is exact for every output or matrix. Contract: models that cannot be pruned.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert import prune
from eval.convert.fold import write_workdir
from eval.convert.scores import (
    DAMPING,
    MOMENTS,
    REMOVE,
    SCORES,
    SQUARES,
    largest_per_matrix,
    largest_per_output,
    obs,
    regularise,
    taylor,
    taylor_published,
    wanda,
)
from eval.load import load
from lm.data.tokenizers import ByteTokenizer
from lm.inference.probes import gradients, next_token_loss, observe
from lm.training.state import Weights
from modules.params import ParamSpec, as_matrices, named_leaves
from tests.eval.convert.test_commands import checkpoint

OUT = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
RNG = np.random.default_rng


def test_scores_and_masks_by_hand():
    """Catches rows for columns, a square for its root, and signs that matter."""
    weights_IO, squares_I = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([4.0, 1.0])
    scores_IO = wanda(weights_IO, squares_I)
    np.testing.assert_array_equal(scores_IO, [[2, 4], [3, 0.5]])
    chosen = largest_per_output(scores_IO, 0.5)
    np.testing.assert_array_equal(chosen, [[False, True], [True, False]])
    np.testing.assert_array_equal(largest_per_output(-scores_IO, 0.5), ~chosen)


@pytest.mark.parametrize('remove', REMOVE)
@pytest.mark.parametrize(('share', 'n_inputs', 'n'), [(0.1, 64, 6), (0.29, 100, 29), (0.5, 7, 3)])
def test_share_is_exact_per_output(remove, share, n_inputs, n):
    """The share is exact for equal weights too. Catches a threshold, which takes all ties, and 28
    for 29 of 100.
    """
    rng = RNG(0)
    for weights_IO in (rng.normal(size=(3, n_inputs, 5)), np.ones((3, n_inputs, 5))):
        scores_IO = wanda(weights_IO, rng.uniform(1, 1, (3, n_inputs)))
        mask_IO = largest_per_output(REMOVE[remove](scores_IO, rng), share)
        np.testing.assert_array_equal(mask_IO.sum(-2), n)


@pytest.mark.parametrize(('share', 'n'), [(0.1, 3), (0.5, 17), (0.02, 0)])
def test_share_is_exact_per_matrix(share, n):
    """35 weights of each of 3 matrices, equal weights too. Catches a share of all matrices, and of
    outputs.
    """
    for ranks_IO in (
        RNG(0).normal((9.0, 0.0, 5.0), size=(5, 7, 3)).T,
        np.ones((3, 7, 5)),
    ):
        if n == 0:
            with pytest.raises(ValueError, match='to remove one of 35 weights per matrix'):
                largest_per_matrix(ranks_IO, share)
            continue
        mask_IO = largest_per_matrix(ranks_IO, share)
        np.testing.assert_array_equal(mask_IO.sum((-1, -2)), n)
        chosen, unchosen = np.where(mask_IO, ranks_IO, np.inf), np.where(mask_IO, -np.inf, ranks_IO)
        assert (chosen.min((-1, -2)) >= unchosen.max((-1, -2))).all()


def test_obs_is_the_error_after_compensation():
    """Least squares over the weights after the removed weight, with DAMPING as rows of the data.
    Catches the diagonal of H^-1 in place of its root's, the weights before in place of those after,
    and a root.
    """
    rng = RNG(0)
    x_MI = rng.normal(size=(40, 5)) @ rng.normal(size=(5, 5))
    weights_IO, n = rng.normal(size=(5, 2)), len(x_MI)
    moments_II = x_MI.T @ x_MI / n
    scores_IO = obs(weights_IO, moments_II)
    damp = DAMPING * np.trace(moments_II) / 5
    rows_MI = np.concatenate([x_MI, np.sqrt(n * damp) * np.eye(5)])
    for i, o in np.ndindex(5, 2):
        lost_M = rows_MI[:, i] * weights_IO[i, o]
        behind = rows_MI[:, i + 1 :]
        made_up = behind @ np.linalg.lstsq(behind, lost_M, rcond=None)[0]
        expected = np.sum((lost_M - made_up) ** 2) / n
        assert scores_IO[i, o] == pytest.approx(expected, rel=1e-9)


def test_dead_input_has_obs_0():
    """The other inputs score as without it. Catches a singular H, and a score of an input that
    changes nothing.
    """
    x_MI = RNG(0).normal(size=(30, 4))
    moments_II = x_MI.T @ x_MI / 30
    moments_II[2], moments_II[:, 2] = 0.0, 0.0
    scores_IO = obs(np.ones((4, 3)), moments_II)
    assert (scores_IO[2] == 0).all() and (np.delete(scores_IO, 2, 0) > 0).all()


def test_gradient_scores_by_hand():
    """Catches a sign that matters in one score only, and a wrong factor."""
    assert regularise(-2.0, 3.0, 0.5) == 4.0  # -2 + 0.5 * 3 * 4
    assert taylor(-1.0, 3.0) == taylor(1.0, 3.0) == 7.5
    assert taylor_published(-1.0, 3.0) == pytest.approx(3.9955)  # |-3 + 9/2000 - 1|
    assert taylor_published(-1.0, -2.0) == pytest.approx(1.002)  # |2 + 4/2000 - 1|


TOKENS_BT = RNG(0).integers(1, 16, (3, 8), dtype=np.int32)
UP = 'layers/mlp/up'


@functools.cache
def read_model():
    """Returns (a checkpoint, its score reader)."""
    model = checkpoint({})
    model = dataclasses.replace(model, weights=jax.device_put(model.weights))
    return model, prune.ScoreReader(model.learner, 2)


@pytest.mark.full
def test_taylor_score_matches_loss_change():
    """Removes each of 24 weights and computes the loss of one row. Catches a gradient of other
    tokens, of the sum of losses, or without the weight.
    """
    model, reader = read_model()
    params, rows_1T = model.weights.params, TOKENS_BT[:1]
    pruning = prune.Pruning('unimportant', 0.5, 'taylor')
    scores = reader.compute_scores(model.weights, pruning, rows_1T)[UP]
    at = RNG(1).integers(0, scores.shape, (24, 3))

    def loss(index):
        up = params['layers']['mlp']['up'].at[tuple(index)].set(0.0)
        changed_params = params | {
            'layers': params['layers'] | {'mlp': params['layers']['mlp'] | {'up': up}}
        }
        logits_BTV, _ = observe(
            model.learner, model.weights.replace(params=changed_params), rows_1T
        )
        return next_token_loss(logits_BTV, jnp.asarray(rows_1T))

    indices = jnp.concatenate(
        [at, jnp.full((1, 3), 99)]
    )  # one beyond the end, which removes nothing
    *without, whole = np.asarray(jax.jit(lambda x: jax.lax.map(loss, x))(indices), np.float64)
    changes, expected_changes = np.abs(np.subtract(without, whole)), scores[tuple(at.T)]
    assert (
        np.corrcoef(changes, expected_changes)[0, 1] > 0.9
        and 0.8 < np.median(changes / expected_changes) < 1.25
    )


@pytest.mark.full
@pytest.mark.parametrize('score', [name for name, row in SCORES.items() if row.needs_general])
def test_dual_scores_are_means_over_rows(score):
    """Gradients of each row of the domain, importance by the general text. Catches the gradient of
    a batch, exchanged texts, a last batch with full weight, and a lost strength.
    """
    model, reader = read_model()

    def row_gradient(tokens_T):
        return named_leaves(gradients(model.learner, model.weights, tokens_T[None])[0])[UP]

    grads_B = jax.jit(lambda x: jax.lax.map(row_gradient, x))(TOKENS_BT)
    general_BT = RNG(1).integers(1, 16, (2, 8), dtype=np.int32)
    pruning = prune.Pruning('unimportant', 0.5, score, strength=1e3)
    scores = reader.compute_scores(model.weights, pruning, TOKENS_BT, general_BT)[UP]
    weights = np.asarray(named_leaves(model.weights.params)[UP], np.float64)
    importance = obs(weights, reader.compute_means(MOMENTS, model.weights, general_BT)[UP])
    row_scores = [
        SCORES[score].compute(
            weights, regularise(np.asarray(gradient, np.float64), importance, 1e3)
        )
        for gradient in grads_B
    ]
    np.testing.assert_allclose(scores, np.mean(row_scores, 0), rtol=1e-3)
    assert not np.allclose(
        scores, np.mean([SCORES[score].compute(weights, gradient) for gradient in grads_B], 0)
    )


def test_heads_share_one_sum():
    """Catches a share of each head, and squares of another head's inputs."""
    rng = RNG(0)
    weight, squares = rng.normal(size=(2, 3, 4, 5)).astype(np.float32), rng.uniform(1, 2, (2, 3, 4))
    squares[1, 2] = 1e6  # all that is important in layer 1 is behind the last head
    pruned = prune.prune_params({'w': OUT}, {'w': weight}, {'w': squares}, 'important', 0.25, rng)
    mask = pruned.params['w'] == 0
    np.testing.assert_array_equal(np.asarray(as_matrices(OUT, mask)).sum(-2), 3)
    assert mask[1, 2].sum() == 3 * 5 and not mask[1, :2].any()


def test_only_block_weights_are_pruned():
    """Catches an inverted mask, and pruned embeddings."""
    model = checkpoint({'model.activation': 'swiglu', 'model.n_kv_heads': 1})
    tokens_BT = RNG(0).integers(0, model.meta['vocab_size'], (3, 8), dtype=np.int32)
    pruned = prune.prune_checkpoint(model, tokens_BT, prune.Pruning('important', 0.25))
    before = named_leaves(model.weights.params)
    matrices = {'query', 'key', 'value', 'out', 'up', 'gate', 'down'}
    for path, leaf in pruned.params.items():
        if path.rpartition('/')[2] not in matrices:
            np.testing.assert_array_equal(leaf, before[path], path)
            continue
        spec = named_leaves(model.learner.description.specs)[path]
        weights, pruned_weights = (np.asarray(as_matrices(spec, x)) for x in (before[path], leaf))
        np.testing.assert_array_equal((pruned_weights == 0).sum(-2), weights.shape[-2] // 4, path)
        np.testing.assert_array_equal(
            pruned_weights[pruned_weights != 0], weights[pruned_weights != 0]
        )
    assert pruned.n_removed == pruned.n_weights // 4


@pytest.mark.full
def test_squares_average_over_all_rows():
    """Batches of different sizes give the same means. Catches a last, smaller batch with full
    weight.
    """
    model = checkpoint({'data.batch_size': 2})
    tokens_BT = RNG(0).integers(0, model.meta['vocab_size'], (5, 8), dtype=np.int32)
    expected = prune.ScoreReader(model.learner, 5).compute_means(SQUARES, model.weights, tokens_BT)
    for path, means in (
        prune.ScoreReader(model.learner, 2).compute_means(SQUARES, model.weights, tokens_BT).items()
    ):
        np.testing.assert_allclose(means, expected[path], rtol=1e-5)


def test_text_rows_are_read(tmp_path):
    model = dataclasses.replace(checkpoint({'data.seq_len': 4}), tokenizer=ByteTokenizer())
    (tmp_path / 'a.txt').write_text('abcdef')
    (tmp_path / 'b.txt').write_text('gh')
    bos = model.tokenizer.bos_id
    rows_BT = prune.read_text_rows(model, f'text:{tmp_path}/*.txt', '--text')
    np.testing.assert_array_equal(rows_BT, [[bos, *b'abc'], [*b'def', bos]])
    np.testing.assert_array_equal(
        prune.read_text_rows(model, f'text:{tmp_path}/b.txt', '--text'), [[bos, *b'gh']]
    )
    rows_BT = prune.read_text_rows(model, f'text:{tmp_path}/b.txt', '--text', 2)
    np.testing.assert_array_equal(rows_BT, [[bos, *b'g']])
    (tmp_path / 'a.jsonl').write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(
        ValueError, match=r'--text must be plain text, .*; got conversations, chat:'
    ):
        prune.read_text_rows(model, f'chat:{tmp_path}/a.jsonl', '--text')
    (tmp_path / 'none.txt').write_text('')
    with pytest.raises(ValueError, match='contains no text'):
        prune.read_text_rows(model, f'text:{tmp_path}/none.txt', '--text')


@pytest.mark.parametrize(
    ('remove', 'share', 'match'),
    [
        ('importent', 0.1, "Did you mean 'important'"),
        ('important', 0.0, 'above 0 and below 1, such as 0.1; got 0.0'),
        ('important', 1.0, 'above 0 and below 1, such as 0.1; got 1.0'),
    ],
)
def test_removing_nothing_or_all_is_refused(remove, share, match):
    with pytest.raises(ValueError, match=match):
        prune.Pruning(remove, share)


@pytest.mark.parametrize(
    ('changes', 'match'),
    [
        ({'score': 'duel'}, "Did you mean 'dual'"),
        ({'per': 'matrx'}, "Did you mean 'matrix'"),
        ({'strength': -1.0}, 'must be 0 or above; got -1.0'),
    ],
)
def test_unknown_scores_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        prune.Pruning('unimportant', 0.5, **changes)


def test_dual_score_needs_general_text():
    with pytest.raises(ValueError, match='add --general=SOURCE, or use --score=taylor'):
        prune.Pruning('unimportant', 0.5, 'dual').check_general(None)
    with pytest.raises(
        ValueError, match='leave out --general=x, or use one of these scores: dual, dual_publ'
    ):
        prune.Pruning('unimportant', 0.5, 'obs').check_general('x')
    prune.Pruning('unimportant', 0.5, 'dual').check_general('x')


def test_share_below_one_input_is_refused():
    with pytest.raises(ValueError, match=r'at least 0\.125, .* of 8 inputs .* got 0\.1'):
        largest_per_output(np.ones((8, 2)), 0.1)


def test_reparametrisation_is_refused():
    model = checkpoint({'model.reparam': 'weight_norm'}, weights=Weights({}, (), {}))
    with pytest.raises(ValueError, match='fold --to=none'):
        prune.prune_checkpoint(model, np.zeros((1, 8), np.int32), prune.Pruning('important', 0.25))


@pytest.mark.full
@pytest.mark.parametrize('score', [prune.Pruning.score, 'dual'])
def test_prune_command(tmp_path, capsys, score):
    model = checkpoint({})
    meta = {'vocab_size': model.meta['vocab_size'], 'data': None}
    write_workdir(tmp_path / 'run', model.recipe, model.weights, ByteTokenizer(), 3, meta)
    (tmp_path / 'a.txt').write_text('\x01\x02\x03\x04\x05\x06\x07\x08\x09')
    source = f'text:{tmp_path}/a.txt'
    options = {'checkpoint': str(tmp_path / 'run'), 'out': str(tmp_path / 'out'), 'seed': 0}
    options |= {'remove': 'important', 'share': 0.25, 'text': source, 'score': score, 'per': None}
    options |= {'general': source if score == 'dual' else None, 'strength': prune.Pruning.strength}
    convert.run(['prune'], options)
    assert 'set 1,024 of 4,096 weights of the blocks to 0' in capsys.readouterr().out
    zeros = sum(
        (x == 0).sum() for x in named_leaves(load(tmp_path / 'out').weights.params).values()
    )
    assert zeros == 1024
