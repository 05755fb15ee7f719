"""Finding a checkpoint, and the methods of a loaded one."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lm.data.tokenizers import ByteTokenizer
from lm.inference.load import Checkpoint, find_checkpoint
from lm.inference.probes import next_token_loss
from lm.record.checkpoint import FOLDER
from lm.record.workdir import SWEEP
from lm.training.state import make_hyper
from tests.helpers import VOCAB, initial_state, tiny_batch, tiny_config, tiny_learner


def test_sweep_error_names_cells_with_checkpoints(tmp_path):
    """The error names the first few cells, and how to choose one."""
    (tmp_path / SWEEP).write_text('{}')
    for cell in 'edcba':
        (tmp_path / cell / FOLDER / '3').mkdir(parents=True)
    (tmp_path / 'empty' / FOLDER).mkdir(parents=True)
    with pytest.raises(ValueError) as error:
        find_checkpoint(tmp_path)
    message = str(error.value)
    assert f'{tmp_path} is a sweep. Give the workdir of one of its 5 cells' in message
    assert f'such as {tmp_path}/a, {tmp_path}/b, {tmp_path}/c. ' in message
    assert f'python -m eval.runs --workdir={tmp_path}' in message
    assert find_checkpoint(tmp_path / 'a') == (tmp_path / 'a' / FOLDER, 3)


@pytest.mark.full
def test_checkpoint_methods_match_probes():
    """The methods return the same as the functions of `lm.inference.probes`, which have their own
    tests.
    """
    config = tiny_config()
    weights, tokens = initial_state(config).weights, jnp.asarray(tiny_batch()['tokens'][:2, :-1])
    checkpoint = Checkpoint(
        Path('x'), config, 1, {}, tiny_learner(config), None, make_hyper(config), weights, None
    )
    logits = checkpoint.logits(tokens)
    assert logits.shape == (2, 8, VOCAB)
    np.testing.assert_array_equal(logits, checkpoint.observe(weights, tokens)[0])
    assert checkpoint.activations(tokens)['after_mlp'].shape == (2, 2, 8, 16)
    np.testing.assert_allclose(checkpoint.loss(tokens), next_token_loss(logits, tokens), rtol=1e-6)
    by_weight, by_activation = checkpoint.gradients(tokens)
    assert by_weight['embedding'].shape == weights.params['embedding'].shape
    assert by_activation.keys() == checkpoint.activations(tokens).keys()


def test_encode_begins_with_bos():
    tokenizer = ByteTokenizer()
    checkpoint = Checkpoint(Path('x'), None, 1, {}, None, None, {}, None, tokenizer)
    assert checkpoint.encode('ab').tolist() == [[tokenizer.bos_id, *tokenizer.encode('ab')]]
