"""Regression in context: predictions of a model from pairs alone, compared with algorithms."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.load import Checkpoint
from eval.suites.base import SuiteResult, Table
from lm.config.mixture import source_flag
from lm.data import regression
from lm.data.regression import REGRESSIONS, Regression, Tasks
from lm.inference.scoring import Scorer
from modules.options import Option

SOURCE, TOKENIZER = 'synthetic:', 'byte'
# Seeds that no document of the source uses: its seeds are single numbers.
FRESH_SEED, TUNING_SEED = (1, 2208), (1, 2212)
TUNING_TASKS = 4096
MODEL, ZERO, GD1, RIDGE, LEAST_SQUARES = (
    'the model',
    'zero',
    'one step of gradient descent',
    'ridge',
    'least squares',
)
POSTERIOR = 'the posterior'
# Suffixes of the numbers.
SHORT = {MODEL: 'model', ZERO: 'zero', GD1: 'gd1', RIDGE: 'ridge', LEAST_SQUARES: 'least_squares'}


class PairContext(NamedTuple):
    """N tasks, with P - 1 known pairs and a further x for each P: sums over the pairs.

    xx_NPDD and xy_NPD: sums of x x and x y over the pairs before each; x_NPD: the query.
    """

    xx_NPDD: np.ndarray
    xy_NPD: np.ndarray
    x_NPD: np.ndarray


def in_context(
    checkpoint: Checkpoint,
    *,
    tasks: Annotated[int, Option('number of new regression tasks', 2)] = 512,
) -> SuiteResult:
    """Measures how well a model regresses on pairs in its context.

    A model trained on synthetic:linear_regression reads new tasks x1 y1 x2 y2 ... (Garg et al.
    2022, arXiv:2208.01066). After k pairs, the mean of its prediction for y is compared with w x
    without noise, and with the predictions of these algorithms from the same pairs: 0 (zero); least
    squares; ridge, which is the posterior mean and has the smallest possible error; and one step of
    gradient descent from w = 0, at the best learning rate for each k (von Oswald et al. 2023,
    arXiv:2212.07677). All numbers are at the largest k, `pairs`: error_NAME, distance_NAME (the
    mean squared difference between the model and an algorithm), correlation_NAME, and the nats of y
    itself (nats_model, nats_posterior). The tables have each k.

    Args:
      checkpoint: a loaded checkpoint.
      tasks: number of new regression tasks.
    """
    regression_task = find_regression(checkpoint)
    scorer = Scorer(checkpoint, expected_value)
    n_pairs = min(regression_task.n_pairs, (scorer.max_length - 1) // regression_task.pair_bytes)
    if n_pairs < 2:
        raise ValueError(
            f'in_context needs room for at least two pairs of {regression_task.pair_bytes} tokens; '
            f'the model reads data.seq_len={scorer.max_length - 1} tokens. Train it on longer '
            'rows.'
        )
    fresh_tasks = regression_task.sample_tasks(np.random.default_rng(FRESH_SEED), tasks)
    fresh_tasks = Tasks(*(part[:, :n_pairs] for part in fresh_tasks))
    bos = checkpoint.tokenizer.bos_id
    rows = [[bos, *text.tolist()] for text in regression.encode_tasks(fresh_tasks)]
    # Scores begin at the second token, so that this is the index of y in each pair.
    y_positions = np.arange(n_pairs) * regression_task.pair_bytes + regression_task.dim
    row_scores = scorer(rows)
    rates_P = best_rates(
        regression_task.sample_tasks(np.random.default_rng(TUNING_SEED), TUNING_TASKS)
    )
    predictions = {
        MODEL: np.array([scores['value'][y_positions] for scores in row_scores]),
        **predict_algorithms(
            build_context(fresh_tasks), rates_P[:n_pairs], regression_task.w_variance
        ),
    }
    comparison = compare_predictions(predictions, fresh_tasks.clean_NP)
    nats = {
        MODEL: -np.mean([scores['log_p'][y_positions] for scores in row_scores], 0),
        POSTERIOR: posterior_nats(fresh_tasks, regression_task.w_variance).mean(0),
    }
    is_number = float(np.mean([scores['is_number'][y_positions[-1]] for scores in row_scores]))
    numbers = {'is_number': is_number, 'nats_model': float(nats[MODEL][-1])}
    numbers |= {'nats_posterior': float(nats[POSTERIOR][-1])}
    table = {'Nats of y by pairs in the context': pairs_table(nats, 'nats')}
    return SuiteResult(
        dict(comparison.numbers) | numbers, comparison.items, dict(comparison.tables) | table
    )


def find_regression(checkpoint: Checkpoint) -> Regression:
    """Returns the tasks that a checkpoint was trained on. Raises ValueError for other data."""
    fields = checkpoint.recipe.data
    name = fields.source.removeprefix(SOURCE)
    if fields.mixture is None and fields.tokenizer == TOKENIZER and name in REGRESSIONS:
        return REGRESSIONS[name]
    raise ValueError(
        '--suite=in_context needs a model that was trained on '
        f'data.source={SOURCE}{"|".join(REGRESSIONS)} with data.tokenizer={TOKENIZER}. '
        f'{checkpoint.path} was trained on {source_flag(fields)} with data.tokenizer='
        f'{fields.tokenizer}.'
    )


def expected_value(logits_BCV: jax.Array, next_BC: jax.Array) -> dict[str, jax.Array]:
    """Returns statistics of the next number, [B, C] each.

    `value` is its mean, given that it is a number; `is_number` is the probability of that; `log_p`
    is the log probability of the next token.
    """
    first, stop = regression.FIRST, regression.FIRST + regression.LEVELS
    log_p_BCV = jax.nn.log_softmax(logits_BCV)
    log_p_BCW = log_p_BCV[..., first:stop]
    value_BC = jax.nn.softmax(log_p_BCW) @ jnp.asarray(regression.VALUES, jnp.float32)
    log_p_BC = jnp.take_along_axis(log_p_BCV, next_BC[..., None], -1)[..., 0]
    is_number_BC = jnp.exp(jax.nn.logsumexp(log_p_BCW, -1))
    return {'value': value_BC, 'is_number': is_number_BC, 'log_p': log_p_BC}


def build_context(tasks: Tasks) -> PairContext:
    """Returns the sums over the pairs before each y."""
    x_NPD, y_NP = tasks.x_NPD, tasks.y_NP

    def exclusive_sum(terms):
        return np.cumsum(terms, 1) - terms

    xx_NPDD = exclusive_sum(np.einsum('npd,npe->npde', x_NPD, x_NPD))
    return PairContext(xx_NPDD, exclusive_sum(x_NPD * y_NP[..., None]), x_NPD)


def predict_gradient_step(context: PairContext) -> np.ndarray:
    """Returns the predictions of a gradient step from w = 0 at a learning rate of 1, [N, P].

    The loss is 1 / (2 k) sum_i (w x_i - y_i)^2, with gradient -1/k sum_i y_i x_i at 0; without a
    pair it is 0.
    """
    k_P = np.maximum(np.arange(context.x_NPD.shape[1]), 1)
    return np.einsum('npd,npd->np', context.xy_NPD, context.x_NPD) / k_P


def best_rates(tasks: Tasks) -> np.ndarray:
    """Returns the learning rate with the smallest squared error over tasks, for each k [P]."""
    # Without a pair the step is 0, and the rate does not matter.
    step_NP = predict_gradient_step(build_context(tasks))
    return (step_NP * tasks.clean_NP).sum(0) / np.maximum((step_NP**2).sum(0), 1e-30)


def predict_algorithms(
    context: PairContext, rates_P: np.ndarray, w_variance: float
) -> dict[str, np.ndarray]:
    """Returns the predictions of each algorithm from the pairs before, [N, P].

    ridge is (X'X + s^2 / v I)^-1 X'y with the variances s^2 of the noise and v of w: the posterior
    mean. If several w fit, least squares takes the shortest.

    Args:
      context: of the tasks.
      rates_P: of the gradient step, by the number of pairs.
      w_variance: v.
    """
    penalty = regression.NOISE_VARIANCE / w_variance * np.eye(context.x_NPD.shape[-1])
    ridge_NPD = np.linalg.solve(context.xx_NPDD + penalty, context.xy_NPD[..., None])[..., 0]
    inverse_NPDD = np.linalg.pinv(context.xx_NPDD, hermitian=True)
    least_NPD = np.einsum('npde,npe->npd', inverse_NPDD, context.xy_NPD)
    return {
        ZERO: np.zeros(context.x_NPD.shape[:2]),
        GD1: predict_gradient_step(context) * rates_P,
        RIDGE: np.einsum('npd,npd->np', ridge_NPD, context.x_NPD),
        LEAST_SQUARES: np.einsum('npd,npd->np', least_NPD, context.x_NPD),
    }


def posterior_nats(tasks: Tasks, w_variance: float) -> np.ndarray:
    """Returns -log p(y) [N, P] given the pairs before and x, under the true distribution of tasks.

    This is a normal distribution around the prediction of ridge, as a probability of y's level.
    """
    context, noise = build_context(tasks), regression.NOISE_VARIANCE
    precision = context.xx_NPDD / noise + np.eye(context.x_NPD.shape[-1]) / w_variance
    covariance = np.linalg.inv(precision)
    mean_NP = np.einsum('npd,npde,npe->np', context.x_NPD, covariance, context.xy_NPD) / noise
    variance_NP = noise + np.einsum('npd,npde,npe->np', context.x_NPD, covariance, context.x_NPD)
    squared_NP = (tasks.y_NP - mean_NP) ** 2 / variance_NP
    return (squared_NP + np.log(2 * np.pi * variance_NP)) / 2 - np.log(regression.SPACING)


def compare_predictions(predictions: dict[str, np.ndarray], clean_NP: np.ndarray) -> SuiteResult:
    """Returns the errors of all predictions, and the model's distance from each algorithm."""
    model_NP = predictions[MODEL]
    errors = {name: (values - clean_NP) ** 2 for name, values in predictions.items()}
    algorithms = {name: values for name, values in predictions.items() if name != MODEL}
    distances = {name: np.mean((model_NP - values) ** 2, 0) for name, values in algorithms.items()}
    correlations = {n: correlate(model_NP, values) for n, values in algorithms.items() if n != ZERO}
    last = clean_NP.shape[1] - 1
    numbers = {'pairs': last}
    numbers |= {f'error_{SHORT[n]}': float(e[:, last].mean()) for n, e in errors.items()}
    numbers |= {f'distance_{SHORT[n]}': float(d[last]) for n, d in distances.items()}
    numbers |= {f'correlation_{SHORT[n]}': float(r[last]) for n, r in correlations.items()}
    tables = {
        'Squared error by pairs in the context': pairs_table(
            {name: e.mean(0) for name, e in errors.items()}, 'squared error'
        ),
        'Mean squared difference from the model': pairs_table(distances, 'squared difference'),
        'Correlation with the model': pairs_table(correlations, 'correlation', first=1),
    }
    n = len(clean_NP)
    columns = {
        'item': [f'task {i}' for i in range(n)],
        'squared error': errors[MODEL][:, last].tolist(),
    }
    return SuiteResult(numbers, columns, tables)


def correlate(a_NP: np.ndarray, b_NP: np.ndarray) -> np.ndarray:
    """Returns Pearson's correlation over tasks by the number of pairs; 0 if either is constant."""
    a_NP, b_NP = a_NP - a_NP.mean(0), b_NP - b_NP.mean(0)
    scale_P = np.sqrt((a_NP**2).sum(0) * (b_NP**2).sum(0))
    return (a_NP * b_NP).sum(0) / np.where(scale_P > 0, scale_P, 1.0)


def pairs_table(values: dict[str, np.ndarray], quantity: str, first: int = 0) -> Table:
    """Returns a table of values by predictor and number of pairs.

    Args:
      values: [P], by predictor.
      quantity: the name of their column.
      first: the smallest number of pairs.
    """
    rows = [
        (n_pairs, value, name)
        for name, values_P in values.items()
        for n_pairs, value in enumerate(values_P[first:].tolist(), first)
    ]
    heads = ('pairs', quantity, 'prediction')
    return Table.from_rows(heads, rows, x='pairs', y=quantity, by='prediction')
