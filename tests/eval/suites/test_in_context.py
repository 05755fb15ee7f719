"""Regression in context. Reference: algorithms by the plain formula, and a model by hand."""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.data import regression

suite = importlib.import_module('eval.suites.in_context')  # the package has the function so
PLANE = regression.REGRESSIONS['linear_regression']
DRAWN = PLANE.sample_tasks(np.random.default_rng(7), 40)


@functools.cache
def predict_drawn():
    rates = suite.best_rates(DRAWN)
    return suite.predict_algorithms(suite.build_context(DRAWN), rates, 1 / 2), rates


def test_algorithms_match_plain_formulas():
    predictions, rates = predict_drawn()
    for n, k in ((0, 0), (3, 1), (5, 2), (17, 41)):
        x, y, query = DRAWN.x_NPD[n, :k], DRAWN.y_NP[n, :k], DRAWN.x_NPD[n, k]
        least_squares = np.linalg.lstsq(x, y)[0] @ query
        assert predictions[suite.LEAST_SQUARES][n, k] == pytest.approx(least_squares, abs=1e-9)
        gradient = -sum(y_i * x_i for x_i, y_i in zip(x, y, strict=True)) / max(k, 1)
        step = np.sum(-rates[k] * gradient * query)
        assert predictions[suite.GD1][n, k] == pytest.approx(step, abs=1e-12)
        # The posterior of w: precisions add.
        noise = 0.1**2 + (4 / 94) ** 2 / 12
        precision = np.eye(2) / (1 / 2) + x.T @ x / noise
        posterior = np.linalg.inv(precision) @ (x.T @ y / noise)
        assert predictions[suite.RIDGE][n, k] == pytest.approx(posterior @ query, abs=1e-9)
        assert predictions[suite.ZERO][n, k] == 0


def test_gd_learning_rate_is_optimal():
    predictions, rates = predict_drawn()

    def errors(factor):
        return np.mean((factor * predictions[suite.GD1] - DRAWN.clean_NP) ** 2, 0)[1:]

    assert (errors(1) < errors(0.99)).all() and (errors(1) < errors(1.01)).all()
    assert rates[-1] == pytest.approx(3, rel=0.2)  # 1 / E[x^2]: the inverse of the curvature


def test_ridge_has_the_smallest_error():
    """With many pairs the prior matters little, and least squares is as good up to chance."""
    fresh_tasks = PLANE.sample_tasks(np.random.default_rng(8), 4000)
    predictions = suite.predict_algorithms(
        suite.build_context(fresh_tasks), suite.best_rates(fresh_tasks), 1 / 2
    )
    error = {
        name: np.mean((values - fresh_tasks.clean_NP) ** 2, 0)
        for name, values in predictions.items()
    }
    ridge = error[suite.RIDGE]
    assert all((ridge[1:] < error[name][1:]).all() for name in (suite.ZERO, suite.GD1))
    assert (ridge[1:10] < error[suite.LEAST_SQUARES][1:10]).all()
    assert error[suite.ZERO].mean() == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.full
def test_value_averages_only_numbers():
    """Half of the probability is on tokens that are not numbers; the rest is on the smallest and
    the largest number, 1 to 3.
    """
    logits = np.full((1, 1, 258), -1e9, np.float32)
    logits[..., [0, ord(' '), ord('~')]] = np.log([0.5, 0.125, 0.375])
    statistics = jax.device_get(suite.expected_value(jnp.asarray(logits), jnp.zeros((1, 1), int)))
    assert statistics['is_number'][0, 0] == pytest.approx(0.5)
    assert statistics['value'][0, 0] == pytest.approx(-2 * 0.25 + 2 * 0.75)
    assert statistics['log_p'][0, 0] == pytest.approx(np.log(0.5))


def test_posterior_matches_grid():
    """Reference: a sum over w in one dimension. Without pairs only the prior determines y."""
    line = regression.REGRESSIONS['linear_regression_1d'].sample_tasks(np.random.default_rng(3), 5)
    nats = suite.posterior_nats(line, 1.0)
    w_G = np.linspace(-6, 6, 40_001)
    variance = 0.1**2 + (4 / 94) ** 2 / 12
    for n, k in ((0, 0), (1, 1), (2, 6)):
        x_P, y_P = line.x_NPD[n, :, 0], line.y_NP[n]
        squares_GP = (y_P - w_G[:, None] * x_P) ** 2 / variance
        logs_G = -(w_G**2) / 2 - squares_GP[:, :k].sum(1) / 2
        posterior_G = np.exp(logs_G - logs_G.max())
        density_G = np.exp(-squares_GP[:, k] / 2) / np.sqrt(2 * np.pi * variance)
        likelihood = np.sum(posterior_G * density_G) / posterior_G.sum() * (4 / 94)
        assert nats[n, k] == pytest.approx(-np.log(likelihood), abs=1e-4)


class LeastSquaresScorer:
    """A scorer of a model that predicts least squares from the tokens that it has read."""

    max_length = 100

    def __init__(self, checkpoint, statistic):
        assert statistic is suite.expected_value

    def __call__(self, rows):
        ones = [np.ones(len(row) - 1) for row in rows]
        values = [self.read(row[1:]) for row in rows]
        return [{'value': x, 'is_number': y, 'log_p': y} for x, y in zip(values, ones, strict=True)]

    def read(self, text):
        """The token at place i is predicted from the tokens before it: y from its x."""
        numbers = regression.VALUES[np.array(text) - 32]
        predictions = np.full(len(text), np.nan)
        for k in range(len(text) // 3):
            pairs = numbers[: 3 * k].reshape(-1, 3)
            predictions[3 * k + 2] = (
                np.linalg.lstsq(pairs[:, :2], pairs[:, 2])[0] @ numbers[3 * k :][:2]
            )
        return predictions


def checkpoint(**changes):
    fields = {
        'source': 'synthetic:linear_regression',
        'tokenizer': 'byte',
        'mixture': None,
        'validation_source': '',
    } | changes
    recipe = types.SimpleNamespace(data=types.SimpleNamespace(**fields))
    return types.SimpleNamespace(
        recipe=recipe, path='runs/a', tokenizer=types.SimpleNamespace(bos_id=256)
    )


def test_least_squares_model_is_recognised(monkeypatch):
    """Catches a prediction read one token too early or late, and pairs truncated in the wrong
    place.
    """
    monkeypatch.setattr(suite, 'Scorer', LeastSquaresScorer)
    suite_result = suite.in_context(checkpoint(), tasks=20)
    numbers = suite_result.numbers
    assert numbers['pairs'] == 32  # of 33 in 99 tokens, the last is asked
    assert numbers['distance_least_squares'] == pytest.approx(0, abs=1e-12)
    assert numbers['correlation_least_squares'] == pytest.approx(1)
    assert numbers['error_model'] == pytest.approx(numbers['error_least_squares'])
    assert 0 < numbers['error_model'] < numbers['error_gd1'] < numbers['error_zero']
    assert np.mean(suite_result.items['squared error']) == pytest.approx(numbers['error_model'])
    table = suite_result.tables['Squared error by pairs in the context']
    assert len(table.columns['pairs']) == 33 * 5
    assert {table.x, table.y, table.by} == set(table.columns)


@pytest.mark.parametrize(
    'changes',
    [
        {'source': 'python'},
        {'source': 'synthetic:markov'},
        {'tokenizer': 'bpe:512'},
        {'mixture': "{'a': 1}"},
    ],
)
def test_other_data_is_refused(changes):
    with pytest.raises(ValueError, match=r'linear_regression_5d with data\.tokenizer=byte'):
        suite.in_context(checkpoint(**changes))
