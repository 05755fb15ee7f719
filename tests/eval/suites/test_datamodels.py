"""Reference: datamodels of ridge regression with known truth, and KLoM against scipy.

Matching must end at the model that is trained without the documents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special, stats

from eval.suites.datamodels import fit_datamodel, klom, margins, match_targets, predict_without

DOCUMENTS, MODELS, DECAY = 12, 60, 0.5
FORGOTTEN = np.array([1, 4, 5])


def _ridge(x_NI, y_N, kept_N):
    """Returns the weights of ridge regression on the included documents."""
    x_NI, y_N = x_NI[kept_N], y_N[kept_N]
    return np.linalg.solve(x_NI.T @ x_NI + DECAY * np.eye(x_NI.shape[1]), x_NI.T @ y_N)


@pytest.fixture(scope='module')
def linear():
    """Orthogonal documents: x_i . x_j = 0, so that the weights are a sum over documents and the
    effect of i on j is x_j . x_i y_i / (|x_i|^2 + DECAY). Outputs are on other inputs.
    """
    rng = np.random.default_rng(0)
    turned = np.linalg.qr(rng.normal(size=(DOCUMENTS, DOCUMENTS)))[0]
    x_NI = turned * rng.uniform(0.5, 2, (DOCUMENTS, 1))
    y_N, asked_MI = rng.normal(size=DOCUMENTS), rng.normal(size=(20, DOCUMENTS))
    kept_RN = rng.random((MODELS, DOCUMENTS)) < 0.5
    weights_RI = np.stack([_ridge(x_NI, y_N, kept_N) for kept_N in kept_RN])
    return x_NI, y_N, asked_MI, kept_RN, weights_RI @ asked_MI.T


def test_ridge_datamodel_matches_closed_form(linear):
    """One number per input, and two: outputs may have any shape. A ridge shrinks effects."""
    x_NI, y_N, asked_MI, kept_RN, outputs_RM = linear
    effects_NM = (x_NI @ asked_MI.T) * (y_N / (np.sum(x_NI**2, 1) + DECAY))[:, None]
    datamodel = fit_datamodel(kept_RN, outputs_RM)
    np.testing.assert_allclose(datamodel.effects, effects_NM, atol=1e-10)
    np.testing.assert_allclose(datamodel.constant, 0, atol=1e-10)
    shifted = fit_datamodel(kept_RN, np.stack([outputs_RM, 3 - outputs_RM], -1))
    np.testing.assert_allclose(shifted.effects[..., 1], -effects_NM, atol=1e-10)
    np.testing.assert_allclose(shifted.constant[:, 1], 3, atol=1e-10)


def test_ridge_penalises_only_effects(linear):
    """The gradient of the penalised sum of squares vanishes, and a large constant has no
    influence.
    """
    *_, kept_RN, outputs_RM = linear
    datamodel = fit_datamodel(kept_RN, outputs_RM + 50, ridge=7.0)
    left_RM = outputs_RM + 50 - datamodel.constant - kept_RN @ datamodel.effects
    np.testing.assert_allclose(kept_RN.T @ left_RM, 7 * datamodel.effects, atol=1e-9)
    np.testing.assert_allclose(left_RM.sum(0), 0, atol=1e-9)


def test_indistinguishable_documents_are_refused(linear):
    *_, kept_RN, outputs_RM = linear
    with pytest.raises(ValueError, match='10 models distinguish only 9 of 12 documents'):
        fit_datamodel(kept_RN[:10], outputs_RM[:10])
    datamodel = fit_datamodel(kept_RN[:10], outputs_RM[:10], ridge=1e-3)
    assert np.isfinite(datamodel.effects).all()


def test_matching_ends_at_retrained_model(linear):
    """Models with other starts: their differences are not forgotten, and are part of the
    targets.
    """
    x_NI, y_N, asked_MI, kept_RN, outputs_RM = linear
    datamodel = fit_datamodel(kept_RN, outputs_RM)
    start = np.random.default_rng(1).normal(size=(2, DOCUMENTS))
    full_RI = _ridge(x_NI, y_N, np.ones(DOCUMENTS, bool)) + start
    is_retained = ~np.isin(np.arange(DOCUMENTS), FORGOTTEN)
    wanted_RI = _ridge(x_NI, y_N, is_retained) + start
    targets_RM = predict_without(full_RI @ asked_MI.T, datamodel, FORGOTTEN)
    np.testing.assert_allclose(targets_RM, wanted_RI @ asked_MI.T, atol=1e-9)

    @jax.jit
    def run_matching(w_I, targets_M):
        return match_targets(lambda w_I: asked_MI @ w_I, w_I, targets_M, optax.sgd(0.2), 3000)

    for full_I, targets_M, wanted_I in zip(full_RI, targets_RM, wanted_RI, strict=True):
        found_I = run_matching(jnp.float32(full_I), jnp.float32(targets_M))
        np.testing.assert_allclose(found_I, wanted_I, atol=2e-2)


def test_margins_are_log_odds():
    logits, labels = np.random.default_rng(0).normal(0, 3, (2, 5, 4)), np.array([0, 3, 1, 2, 2])
    p = np.take_along_axis(special.softmax(logits, -1), labels[None, :, None], -1)[..., 0]
    computed = jax.jit(margins)(jnp.float32(logits), jnp.int32(labels))
    np.testing.assert_allclose(computed, np.log(p / (1 - p)), rtol=1e-4, atol=1e-5)


def test_klom_matches_histogram_divergence():
    """Reference: scipy, by definition, with different numbers of models."""
    rng = np.random.default_rng(0)
    unlearned, retrained = rng.normal(0.5, 1, (80, 3)), rng.normal(0, [1, 2, 0.1], (100, 3))
    divergences = klom(unlearned, retrained)
    for n in range(3):
        all_margins = np.concatenate([unlearned[:, n], retrained[:, n]])
        edges = np.linspace(all_margins.min(), all_margins.max(), 21)
        p, q = (np.histogram(x[:, n], edges)[0] / len(x) for x in (unlearned, retrained))
        expected = stats.entropy(p, np.where(p > 0, np.maximum(q, 1e-5), q))
        np.testing.assert_allclose(divergences[n], expected, rtol=1e-12)


def test_klom_on_known_margins():
    """Distant, equal and two-valued models, and margins beyond the clip. The order of arguments
    matters.
    """
    two, low = np.repeat([[0.0], [1.0]], [30, 10], 0), np.zeros((40, 1))
    half = np.repeat([[0.0], [1.0]], 20, 0)
    expected = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    np.testing.assert_allclose(klom(two, half), expected)
    np.testing.assert_allclose(klom(low, half), np.log(2))
    np.testing.assert_allclose(klom(half, low), np.log(0.5) + np.log(1e5) / 2, atol=1e-4)
    np.testing.assert_allclose(klom(low + 1, low), np.log(1e5), atol=1e-4)
    assert klom(low, low) == 0 and klom(low + 200, low + 300) == 0
    with pytest.raises(ValueError, match=r'\(40, 1\).*\(40, 2\)'):
        klom(low, np.zeros((40, 2)))
