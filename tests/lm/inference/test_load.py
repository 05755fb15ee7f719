"""Where a checkpoint is looked for, and what it computes once it is loaded."""

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


def test_a_sweep_names_its_cells_with_checkpoints(tmp_path):
    """The first few, and how to choose one."""
    (tmp_path / SWEEP).write_text('{}')
    for cell in 'edcba':
        (tmp_path / cell / FOLDER / '3').mkdir(parents=True)
    (tmp_path / 'empty' / FOLDER).mkdir(parents=True)
    with pytest.raises(ValueError) as error:
        find_checkpoint(tmp_path)
    said = str(error.value)
    assert f'{tmp_path} is a sweep; give the workdir of one of its 5 cells' in said
    assert f'such as {tmp_path}/a, {tmp_path}/b, {tmp_path}/c. ' in said
    assert f'python -m eval.runs --workdir={tmp_path}' in said
    assert find_checkpoint(tmp_path / 'a') == (tmp_path / 'a' / FOLDER, 3)


@pytest.mark.full
def test_what_a_checkpoint_computes_is_of_its_weights():
    """The methods give what the functions of `lm.inference.probes` give, which have own tests."""
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


def test_text_is_encoded_as_a_document_begins():
    tokenizer = ByteTokenizer()
    checkpoint = Checkpoint(Path('x'), None, 1, {}, None, None, {}, None, tokenizer)
    assert checkpoint.encode('ab').tolist() == [[tokenizer.bos_id, *tokenizer.encode('ab')]]
