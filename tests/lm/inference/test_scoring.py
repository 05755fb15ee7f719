"""Scores of packed rows. Reference: each row's own logits; equivalence: one device and eight."""

from pathlib import Path

import jax
import numpy as np
import pytest

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh
from lm.inference.load import Checkpoint
from lm.inference.scoring import Scorer
from lm.training.state import make_hyper
from tests.helpers import VOCAB, initial_state, tiny_config, tiny_learner

CHANGES = {'data.seq_len': 32, 'loss.chunk': 64, 'data.mask_documents': False}


def a_checkpoint(n_devices: int = 1) -> Checkpoint:
    config = tiny_config(CHANGES)
    mesh = make_mesh(MeshConfig(data=n_devices), jax.devices()[:n_devices])
    weights = initial_state(config).weights
    learner, hyper = tiny_learner(config), make_hyper(config)
    return Checkpoint(Path('x'), config, 1, {}, learner, mesh, hyper, weights, None)


def some_rows(lengths) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def test_packed_rows_have_the_scores_of_each_alone():
    checkpoint, rows = a_checkpoint(), some_rows([5, 33, 1, 2, 17, 5, 9, 30, 12])
    scores = Scorer(checkpoint)(rows)
    assert [len(own['log_p']) for own in scores] == [len(row) - 1 for row in rows]
    for row, own in zip(rows, scores, strict=True):
        padded = np.array([row + [0] * (33 - len(row))])  # one program; no token sees a later one
        log_p = jax.nn.log_softmax(checkpoint.logits(padded)[0])[: len(row) - 1]
        following = np.array(row[1:], int)
        wanted = np.take_along_axis(np.array(log_p), following[:, None], 1)[:, 0]
        np.testing.assert_allclose(own['log_p'], wanted, rtol=1e-5, atol=1e-6)
        likeliest = np.argmax(log_p, -1) == following
        np.testing.assert_array_equal(own['is_likeliest'], likeliest)


def test_eight_devices_score_as_one():
    rows = some_rows([5, 33, 17, 20])
    for one, eight in zip(Scorer(a_checkpoint())(rows), Scorer(a_checkpoint(8))(rows), strict=True):
        np.testing.assert_allclose(eight['log_p'], one['log_p'], rtol=1e-5, atol=1e-6)


def test_rows_that_cannot_be_scored_are_refused():
    score = Scorer(a_checkpoint())
    assert score([]) == []
    for rows in ([[1] * 34], [[1, 2], []]):
        with pytest.raises(ValueError, match='a row that is scored has 1 to 33 tokens'):
            score(rows)
