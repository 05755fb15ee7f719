"""Reference: slopes of singular values that follow the paper's law, and the traced decay rule
against the rules of the project. Property: the text has the stated transitions.
"""

import jax
import numpy as np
import pytest

from eval.claims import lab
from eval.claims.measures import spectra
from eval.claims.measures.spectra import RULES, SIGMA, VOCAB, WIDTHS, sigma_over_gamma, with_rule
from eval.claims.measures.starts import BOS
from eval.coordinates import resize_recipe
from lm.training.state import Learner
from modules.scaling import DECAY_RULES
from modules.scaling.decay import DecayInputs
from modules.scaling.parametrization import Growth


def test_text_follows_chain():
    batch = spectra.draw_text(jax.random.key(3))
    tokens_BT = np.asarray(batch['tokens'])
    assert tokens_BT.shape == (spectra.ROWS, spectra.LENGTH + 1)
    assert tokens_BT.min() > BOS and tokens_BT.max() < VOCAB
    choice = (tokens_BT[:, 1:] - 1 - spectra.MULTIPLIER * (tokens_BT[:, :-1] - 1)) % (VOCAB - 1)
    assert set(np.unique(choice)) == set(range(spectra.CHOICES))


def test_traced_rule_matches_named_rule():
    learner = Learner(lab.read_recipe({}), None, BOS, None)
    decay = DecayInputs(0.1, 0.02, 0.5, 100, Growth(fan_in=4.0), factor=4.0)
    by_index = [
        jax.jit(lambda number: with_rule(learner, number).recipe.decay.row(decay))(number)
        for number in range(len(RULES))
    ]
    expected = [float(DECAY_RULES[name](decay)) for name in RULES]
    np.testing.assert_allclose(by_index, expected, rtol=1e-6)
    np.testing.assert_allclose(
        by_index, [0.001 * 4.0**power for power in RULES.values()], rtol=1e-6
    )


def test_slopes_match_law(monkeypatch):
    """s = sqrt(rate / decay) width^0.75 with the rates of muP and each rule's decay."""

    def law(width, cases, is_noise):
        factor = width / WIDTHS[0]
        return (
            np.array(
                [
                    [
                        0.5 * np.log(ratio / factor ** (1 + RULES[rule]))
                        + (0.5 if is_noise else 0.75) * np.log(width)
                        + seed
                    ]
                    for rule, ratio in cases
                    for seed in [0.0]
                ]
            )
            + np.arange(5) / 7
        )  # seeds may differ in size

    monkeypatch.setattr(spectra, 'mean_logs', law)
    slopes = np.mean(list(spectra.decayed_norms.function()), 1)
    np.testing.assert_allclose(slopes, [0.25, 0.0, -0.25, 0.5, -0.25, 0.5], atol=1e-9)


def test_ratios_are_reduced_by_seed(monkeypatch):
    ratios_CSN = np.array([[[1.0, 1.2, 0.8], [1.0, 1.4, 0.9]], *(2 * [np.ones((2, 3))])])
    monkeypatch.setattr(spectra, 'sigma_over_gamma', lambda recipe, steps: ratios_CSN)
    estimates = spectra.reparametrised_norms.compute()
    values = [estimates[f'{name}_norm_over_gamma'].value for name in ('mean', 'largest', 'least')]
    np.testing.assert_allclose(values, [1.05, 1.3, 0.85])


@pytest.mark.full
def test_used_norms_are_at_least_gamma():
    """One power iteration finds at most sigma, so that used matrices have at least gamma."""
    once_SN, never_SN, often_SN = sigma_over_gamma(
        resize_recipe(lab.read_recipe(SIGMA), 'width', 32), steps=2, seeds=[8]
    )
    assert once_SN.shape == (1, 2 * 2 * 6)  # steps, layers, matrices
    assert np.all(once_SN > 1 - 1e-4) and np.all(once_SN < 1.1)
    assert often_SN.mean() < once_SN.mean() < never_SN.mean()


@pytest.mark.full
def test_more_decay_gives_smaller_matrices(monkeypatch):
    monkeypatch.setattr(spectra, 'DECAY_TIMES', 0.5)
    logs_CS = spectra.mean_logs(64, [('constant', 1.0), ('constant', 4.0)], seeds=[8])
    assert logs_CS[1, 0] > logs_CS[0, 0] + 0.1
