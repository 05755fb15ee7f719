"""Scores of packed rows. Reference: each row's logits. Equivalence: one device and eight."""

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


def build_checkpoint(n_devices: int = 1) -> Checkpoint:
    config = tiny_config(CHANGES)
    mesh = make_mesh(MeshConfig(data=n_devices), jax.devices()[:n_devices])
    weights = initial_state(config).weights
    learner, hyper = tiny_learner(config), make_hyper(config)
    return Checkpoint(Path('x'), config, 1, {}, learner, mesh, hyper, weights, None)


def random_rows(lengths) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def test_packed_scores_equal_single_rows():
    checkpoint, rows = build_checkpoint(), random_rows([5, 33, 1, 2, 17, 5, 9, 30, 12])
    scores = Scorer(checkpoint)(rows)
    assert [len(row_scores['log_p']) for row_scores in scores] == [len(row) - 1 for row in rows]
    for row, row_scores in zip(rows, scores, strict=True):
        padded = np.array([row + [0] * (33 - len(row))])  # one program; no token sees a later one
        log_p = jax.nn.log_softmax(checkpoint.logits(padded)[0])[: len(row) - 1]
        following = np.array(row[1:], int)
        expected = np.take_along_axis(np.array(log_p), following[:, None], 1)[:, 0]
        np.testing.assert_allclose(row_scores['log_p'], expected, rtol=1e-5, atol=1e-6)
        likeliest = np.argmax(log_p, -1) == following
        np.testing.assert_array_equal(row_scores['is_likeliest'], likeliest)


def test_eight_devices_score_like_one():
    rows = random_rows([5, 33, 17, 20])
    for on_one, on_eight in zip(
        Scorer(build_checkpoint())(rows), Scorer(build_checkpoint(8))(rows), strict=True
    ):
        np.testing.assert_allclose(on_eight['log_p'], on_one['log_p'], rtol=1e-5, atol=1e-6)


def test_unscorable_rows_are_refused():
    score = Scorer(build_checkpoint())
    assert score([]) == []
    for rows in ([[1] * 34], [[1, 2], []]):
        with pytest.raises(ValueError, match='each scored row must have 1 to 33 tokens'):
            score(rows)
