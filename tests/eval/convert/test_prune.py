"""Reference: scores and masks of matrices made by hand. Property: a share is exact for every
output. Contract: what cannot be pruned.
"""

import dataclasses

import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert import prune
from eval.convert.fold import write
from eval.convert.scores import REMOVE, largest_of_outputs, removed, wanda
from eval.load import load
from lm.data.tokenizers import ByteTokenizer
from lm.training.state import Weights
from modules.params import ParamSpec, as_matrices, named_leaves
from tests.eval.convert.test_commands import checkpoint

OUT = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
RNG = np.random.default_rng


def test_scores_and_masks_by_hand():
    """Catches rows for columns, a square for its root, and signs that count."""
    weights_IO, squares_I = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([4.0, 1.0])
    scores_IO = wanda(weights_IO, squares_I)
    np.testing.assert_array_equal(scores_IO, [[2, 4], [3, 0.5]])
    chosen = largest_of_outputs(scores_IO, 0.5)
    np.testing.assert_array_equal(chosen, [[False, True], [True, False]])
    np.testing.assert_array_equal(largest_of_outputs(-scores_IO, 0.5), ~chosen)


@pytest.mark.parametrize('remove', REMOVE)
@pytest.mark.parametrize(('share', 'n_inputs', 'n'), [(0.1, 64, 6), (0.29, 100, 29), (0.5, 7, 3)])
def test_a_share_is_exact_for_every_output(remove, share, n_inputs, n):
    """Weights of one size, too. Catches a threshold, that takes all ties, and 28 for 29 of 100."""
    rng = RNG(0)
    for weights_IO in (rng.normal(size=(3, n_inputs, 5)), np.ones((3, n_inputs, 5))):
        scores_IO = wanda(weights_IO, rng.uniform(1, 1, (3, n_inputs)))
        mask_IO = largest_of_outputs(REMOVE[remove](scores_IO, rng), share)
        np.testing.assert_array_equal(mask_IO.sum(-2), n)


def test_heads_are_inputs_of_one_sum():
    """Catches a share of each head, and squares of another head's inputs."""
    rng = RNG(0)
    weight, squares = rng.normal(size=(2, 3, 4, 5)).astype(np.float32), rng.uniform(1, 2, (2, 3, 4))
    squares[1, 2] = 1e6  # all that is important in layer 1 is behind the last head
    mask = removed(OUT, weight, squares, 'important', 0.25, rng)
    np.testing.assert_array_equal(np.asarray(as_matrices(OUT, mask)).sum(-2), 3)
    assert mask[1, 2].sum() == 3 * 5 and not mask[1, :2].any()


def test_a_model_loses_inputs_of_its_blocks_alone():
    """Catches a mask that is kept in place of what it leaves, and embeddings that are pruned."""
    one = checkpoint({'model.activation': 'swiglu', 'model.n_kv_heads': 1})
    tokens_BT = RNG(0).integers(0, one.meta['vocab_size'], (3, 8), dtype=np.int32)
    found = prune.prune_checkpoint(one, tokens_BT, 'important', 0.25, 0)
    before = named_leaves(one.weights.params)
    matrices = {'query', 'key', 'value', 'out', 'up', 'gate', 'down'}
    for path, leaf in found.params.items():
        if path.rpartition('/')[2] not in matrices:
            np.testing.assert_array_equal(leaf, before[path], path)
            continue
        spec = named_leaves(one.learner.described.specs)[path]
        old, new = (np.asarray(as_matrices(spec, x)) for x in (before[path], leaf))
        np.testing.assert_array_equal((new == 0).sum(-2), old.shape[-2] // 4, path)
        np.testing.assert_array_equal(new[new != 0], old[new != 0])
    assert found.n_removed == found.n_weights // 4


@pytest.mark.full
def test_squares_are_means_over_all_rows():
    """Batches of another number of rows give the same; catches the last, smaller one as a whole."""
    one = checkpoint({'data.batch_size': 2})
    tokens_BT = RNG(0).integers(0, one.meta['vocab_size'], (5, 8), dtype=np.int32)
    whole = dataclasses.replace(one, recipe=checkpoint({'data.batch_size': 5}).recipe)
    wanted = prune.mean_squares(whole, tokens_BT)
    for path, found in prune.mean_squares(one, tokens_BT).items():
        np.testing.assert_allclose(found, wanted[path], rtol=1e-5)


def test_text_is_cut_into_rows(tmp_path):
    one = dataclasses.replace(checkpoint({'data.seq_len': 4}), tokenizer=ByteTokenizer())
    (tmp_path / 'a.txt').write_text('abcdef')
    (tmp_path / 'b.txt').write_text('gh')
    bos = one.tokenizer.bos_id
    rows_BT = prune.rows_of_text(one, f'text:{tmp_path}/*.txt')
    np.testing.assert_array_equal(rows_BT, [[bos, *b'abc'], [*b'def', bos]])
    np.testing.assert_array_equal(
        prune.rows_of_text(one, f'text:{tmp_path}/b.txt'), [[bos, *b'gh']]
    )
    (tmp_path / 'none.txt').write_text('')
    with pytest.raises(ValueError, match='holds no text'):
        prune.rows_of_text(one, f'text:{tmp_path}/none.txt')


@pytest.mark.parametrize(
    ('remove', 'share', 'match'),
    [
        ('importent', 0.1, "Did you mean 'important'"),
        ('important', 0.0, 'above 0 and below 1, such as 0.1; got 0.0'),
        ('important', 1.0, 'above 0 and below 1, such as 0.1; got 1.0'),
    ],
)
def test_what_removes_nothing_or_all_is_refused(remove, share, match):
    with pytest.raises(ValueError, match=match):
        prune.check_asked(remove, share)


def test_a_share_of_no_input_is_refused():
    with pytest.raises(ValueError, match=r'0\.1 of the 8 inputs .* give 0\.125 or more'):
        largest_of_outputs(np.ones((8, 2)), 0.1)


def test_a_map_of_the_weights_is_refused():
    one = checkpoint({'model.reparam': 'weight_norm'}, weights=Weights({}, (), {}))
    with pytest.raises(ValueError, match='fold --to=none'):
        prune.prune_checkpoint(one, np.zeros((1, 8), np.int32), 'important', 0.25, 0)


@pytest.mark.full
def test_a_run_is_pruned_by_a_command(tmp_path, capsys):
    one = checkpoint({})
    meta = {'vocab_size': one.meta['vocab_size'], 'data': None}
    write(tmp_path / 'run', one.recipe, one.weights, ByteTokenizer(), 3, meta)
    (tmp_path / 'a.txt').write_text('\x01\x02\x03\x04\x05\x06\x07\x08\x09')
    options = {'checkpoint': str(tmp_path / 'run'), 'out': str(tmp_path / 'out'), 'seed': 0}
    options |= {'remove': 'important', 'share': 0.25, 'text': f'text:{tmp_path}/a.txt'}
    convert.run(['prune'], options)
    assert '1,024 of 4,096 weights of the blocks set to 0' in capsys.readouterr().out
    zeros = sum(
        (x == 0).sum() for x in named_leaves(load(tmp_path / 'out').weights.params).values()
    )
    assert zeros == 1024
