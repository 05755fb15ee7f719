"""Influence of training documents: scores from errors and gradients, without training again."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult, Table
from lm.config.mixture import split_by_source
from lm.devices.mesh import replicated_sharding, trace_on_mesh
from lm.devices.shardings import state_shardings
from lm.inference.load import load_weights
from lm.inference.scoring import next_power_2
from lm.model.block import EMBEDDING
from lm.record.checkpoint import list_steps
from lm.run.tables import schedule_fractions
from lm.training.state import Learner, Weights
from lm.training.step import text_weights
from modules.interventions import SHIFTS
from modules.numerics import DTYPES
from modules.options import Option

GROUP_ROWS = 16  # documents of a program, one after another: it holds one gradient at a time
HOST_BYTES = 1 << 30  # of gradients in embeddings: further documents need a further pass
TEXT = 80  # characters of a document in the table
TABLE_ROWS = 10  # documents of a table
SCORES = ('loss', 'el2n', 'vog', 'tracin_self', 'tracin_validation')

DocumentRows = dict[str, np.ndarray]  # tokens, segments [N, T + 1]: a document in each row


def influence(
    checkpoint: Checkpoint,
    *,
    documents: Annotated[int, Option('number of training documents, evenly spaced', 2)] = 64,
    checkpoints: Annotated[
        int, Option('checkpoints of the run up to this step, evenly spaced', 1)
    ] = 5,
    validation: Annotated[int, Option('number of validation documents, evenly spaced', 1)] = 64,
) -> SuiteResult:
    """Scores training documents for data selection.

    The scores are EL2N, VoG and TracIn. Each document is read from its beginning, up to
    data.seq_len tokens. el2n: the mean over tokens of ||softmax - onehot||, at this checkpoint
    (arXiv:2107.07075). vog: the variance over checkpoints of the gradient, in the embeddings, of
    the sum of the logits of the true tokens, averaged over tokens and features (arXiv:2008.11600,
    for language arXiv:2311.16298). It needs two checkpoints. `items` also has vog normalised to
    mean 0 and deviation 1. tracin_self: the sum over checkpoints of eta ||g||^2, with g the
    gradient of the document's mean loss in all weights, and eta the learning rate at the
    checkpoint. tracin_validation: the sum of eta g.v, with v the mean gradient of validation
    documents (arXiv:2002.08484). The numbers are the means of the scores and their rank
    correlations, spearman_A_B.

    Args:
      checkpoint: a loaded checkpoint.
      documents: number of training documents.
      checkpoints: number of checkpoints, up to this one.
      validation: number of validation documents.
    """
    dataset = open_data(checkpoint)
    available_steps = [
        step for step in list_steps(checkpoint.path.parent) if step <= checkpoint.step
    ]
    steps = [available_steps[i] for i in spaced_indices(len(available_steps), checkpoints)]
    named_tokens = select_documents(dataset.train, documents)
    rows = pad_documents(checkpoint, [tokens for _, tokens in named_tokens])
    held_out = pad_documents(
        checkpoint, [tokens for _, tokens in select_documents(dataset.validation, validation)]
    )
    scores = score_documents(checkpoint, steps, rows, held_out)
    if len(steps) < 2:
        del scores['vog']
    numbers: dict[str, float] = {'checkpoints': len(steps), 'documents': len(named_tokens)}
    numbers |= {name: float(values.mean()) for name, values in scores.items()}
    for a, b in itertools.combinations(scores, 2):
        rank = scipy.stats.spearmanr(scores[a], scores[b]).statistic
        if np.isfinite(rank):  # nan if all scores are equal
            numbers[f'spearman_{a}_{b}'] = float(rank)
    decode = checkpoint.tokenizer.decode
    columns = {
        'item': [name for name, _ in named_tokens],
        **{name: values.tolist() for name, values in scores.items()},
        **({'vog_normalised': normalise(scores['vog']).tolist()} if 'vog' in scores else {}),
        'tokens': [len(tokens) for _, tokens in named_tokens],
        'text': [
            ' '.join(decode(tokens[: 4 * TEXT].tolist()).split())[:TEXT]
            for _, tokens in named_tokens
        ],
    }
    return SuiteResult(
        numbers, columns, {'Documents of most self-influence': top_documents(columns)}
    )


def spaced_indices(count: int, max_count: int) -> list[int]:
    """Returns up to `max_count` of the numbers 0 to count - 1 at equal distances, with the last."""
    max_count = min(count, max_count)
    return [round((i + 1) * count / max_count) - 1 for i in range(max_count)]


def select_documents(rows: Any, max_count: int) -> list[tuple[str, np.ndarray]]:
    """Returns up to `max_count` documents of a split at equal distances, as (name, tokens)."""
    sources = split_by_source(rows)
    all_documents = [
        (name, i) for name, source_rows in sources.items() for i in range(source_rows.n_documents)
    ]
    chosen = [all_documents[i] for i in spaced_indices(len(all_documents), max_count)]
    return [(f'{name} {i}'.strip(), sources[name].document(i)) for name, i in chosen]


def pad_documents(checkpoint: Checkpoint, documents: Sequence[np.ndarray]) -> DocumentRows:
    """Returns documents as padded rows, with BOS first, truncated after data.seq_len tokens."""
    max_length = checkpoint.recipe.data.seq_len
    width = min(max_length, next_power_2(max(2, *(len(tokens) for tokens in documents))))
    tokens, segments = np.zeros((2, len(documents), width + 1), np.int32)
    for i, row_tokens in enumerate(documents):
        row_tokens = [checkpoint.tokenizer.bos_id, *row_tokens[:width].tolist()]
        tokens[i, : len(row_tokens)], segments[i, : len(row_tokens)] = row_tokens, 1
    return {'tokens': tokens, 'segments': segments}


def score_documents(
    checkpoint: Checkpoint, steps: Sequence[int], rows: DocumentRows, held_out: DocumentRows
) -> dict[str, np.ndarray]:
    """Returns SCORES [N] of rows.

    Gradients in embeddings are accumulated over checkpoints, for the rows that fit in HOST_BYTES.
    Further rows need another pass, which reads all weights again.

    Args:
      checkpoint: a loaded checkpoint.
      steps: of the checkpoints; the last is this checkpoint.
      rows: the documents.
      held_out: validation documents.
    """
    learner = checkpoint.learner
    width = rows['tokens'].shape[1] - 1
    # Two float32 numbers per element: the running mean and squares.
    row_bytes = 2 * 4 * width * learner.recipe.stream_width
    size = max(GROUP_ROWS, HOST_BYTES // row_bytes)
    rates = checkpoint.recipe.optim.lr * schedule_fractions(checkpoint.recipe, np.maximum(steps, 1))
    score_rows, sum_gradients = compile_programs(checkpoint)
    parts = []
    for start in range(0, len(rows['tokens']), size):
        part = {name: x[start : start + size] for name, x in rows.items()}
        group_scores, variance = {}, RunningVariance()
        tracin_2N = np.zeros((2, len(part['tokens'])))
        for step, rate in zip(steps, rates, strict=True):
            is_last = step == checkpoint.step
            weights = checkpoint.weights if is_last else load_weights(checkpoint, step)
            direction = validation_gradient(sum_gradients, weights, held_out)
            outputs_by_group = [
                score_rows(weights, direction, group) for group in split_groups(part)
            ]
            group_scores = {
                k: np.concatenate([r[k] for r in jax.device_get(outputs_by_group)])
                for k in outputs_by_group[0]
            }
            group_scores = {
                # Without the padding of the last group.
                name: values[: len(part['tokens'])]
                for name, values in group_scores.items()
            }
            variance.add(group_scores.pop('embedding_gradient'))
            tracin_2N += rate * np.array(
                [group_scores.pop('squared_norm'), group_scores.pop('along')]
            )
        # The remaining scores are from the last step, which is this checkpoint.
        counts_N = group_scores.pop('targets')
        vog_N = variance.value().sum((1, 2)) / (counts_N * learner.recipe.stream_width)
        tracin = {'tracin_self': tracin_2N[0], 'tracin_validation': tracin_2N[1]}
        parts.append(group_scores | {'vog': vog_N} | tracin)
    return {name: np.concatenate([part[name] for part in parts]) for name in SCORES}


class RunningVariance:
    """The variance of arrays that arrive in sequence, without storing them (Welford)."""

    def __init__(self):
        self.count = 0
        self.mean: Any = 0.0  # arrays after the first `add`
        self.squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        """Adds an array."""
        self.count += 1
        difference = values - self.mean
        self.mean = self.mean + difference / self.count
        self.squares = self.squares + difference * (values - self.mean)

    def value(self) -> np.ndarray:
        """Returns the mean squared distance from the mean."""
        return self.squares / self.count


def split_groups(rows: DocumentRows) -> Iterator[DocumentRows]:
    """Yields GROUP_ROWS rows at a time; the last group is padded."""
    for start in range(0, len(rows['tokens']), GROUP_ROWS):
        part = {name: x[start : start + GROUP_ROWS] for name, x in rows.items()}
        missing = GROUP_ROWS - len(part['tokens'])
        yield {name: np.pad(x, ((0, missing), (0, 0))) for name, x in part.items()}


def compile_programs(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Returns two jitted functions of rows.

    The first maps (weights, direction, rows) to `score_document` of each row, the second maps
    (weights, rows) to the sum of the rows' gradients.
    """
    learner, mesh = checkpoint.learner, checkpoint.mesh
    weights, replicated = state_shardings(learner, mesh).weights, replicated_sharding(mesh)

    def score_rows(weights, direction, rows):
        score_row = functools.partial(score_document, learner, weights, direction)
        return jax.lax.map(score_row, rows)

    def sum_gradients(weights, rows):
        def add(total, row):
            gradient, _ = compute_document_gradients(learner, weights, row)
            return jax.tree.map(jnp.add, total, gradient), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights.params), rows)[0]

    return (
        jax.jit(
            trace_on_mesh(mesh, score_rows),
            in_shardings=(weights, weights.params, replicated),
            out_shardings=replicated,
        ),
        jax.jit(
            trace_on_mesh(mesh, sum_gradients),
            in_shardings=(weights, replicated),
            out_shardings=weights.params,
        ),
    )


def validation_gradient(sum_gradients: Any, weights: Weights, rows: DocumentRows) -> Any:
    """Returns the mean gradient over rows. Rows of padding have a gradient of 0.

    Args:
      sum_gradients: from `compile_programs`.
      weights: of the model.
      rows: of validation documents.
    """
    parts = [sum_gradients(weights, group) for group in split_groups(rows)]
    total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    return jax.tree.map(lambda x: x / len(rows['tokens']), total)


def score_document(
    learner: Learner, weights: Weights, direction: Any, row: dict[str, jax.Array]
) -> dict[str, Any]:
    """Returns the errors and gradients that determine the scores of a row.

    Args:
      learner: of the model.
      weights: of the model.
      direction: the mean gradient of validation documents.
      row: [T + 1].
    """
    gradient, statistics = compute_document_gradients(learner, weights, row)

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

    return statistics | {'squared_norm': dot(gradient, gradient), 'along': dot(gradient, direction)}


def compute_document_gradients(
    learner: Learner, weights: Weights, row: dict[str, jax.Array]
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns the gradients of a row. Padding takes no part.

    Args:
      learner: of the model.
      weights: of the model.
      row: [T + 1].

    Returns:
      (the gradient of the mean loss in the stored weights, statistics). Statistics are `loss`,
        `el2n`, `targets`, and `embedding_gradient` [T, D], the gradient of the sum of the true
        tokens' logits in the stream that enters the first block.
    """
    batch = {name: x[None] for name, x in row.items()}
    tokens_1T, segments_1T = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    weights_T = text_weights(batch, learner.bos_id)[0]
    count = jnp.sum(weights_T)

    def forward(params, shift_TD):
        variables = learner.variables(weights.replace(params=params))
        variables = variables | {SHIFTS: {EMBEDDING: shift_TD[None]}}
        inputs = (tokens_1T, segments_1T, segments_1T > 0)
        activations: Any = learner.model.apply(variables, *inputs, method='activations')
        x_1TD, readout = activations
        logits_TV = readout(x_1TD)[0].astype(jnp.float32)
        true_T = jnp.take_along_axis(logits_TV, batch['tokens'][0, 1:, None], -1)[:, 0]
        losses_T = jax.nn.logsumexp(logits_TV, -1) - true_T
        loss = jnp.sum(weights_T * losses_T) / jnp.maximum(count, 1.0)
        el2n = jnp.sum(weights_T * compute_error_norms(logits_TV, losses_T)) / jnp.maximum(
            count, 1.0
        )
        return (loss, jnp.sum(weights_T * true_T)), el2n

    width, dtype = learner.recipe.stream_width, DTYPES[learner.recipe.model.dtype]
    zeros_TD = jnp.zeros((tokens_1T.shape[1], width), dtype)
    # A single linearisation gives both gradients: of the mean loss, and of the logits.
    (loss, _), vjp, el2n = jax.vjp(forward, weights.params, zeros_TD, has_aux=True)
    unit, zero = jnp.ones_like(loss), jnp.zeros_like(loss)
    gradient, _ = vjp((unit, zero))
    _, in_embedding_TD = vjp((zero, unit))
    statistics = {'loss': loss, 'el2n': el2n, 'targets': count}
    return gradient, statistics | {'embedding_gradient': in_embedding_TD.astype(jnp.float32)}


def compute_error_norms(logits_TV: jax.Array, losses_T: jax.Array) -> jax.Array:
    """Returns ||softmax - onehot||_2 of each token: sqrt(sum p^2 - 2 p(true) + 1)."""
    squares_T = jnp.sum(jax.nn.softmax(logits_TV) ** 2, -1)
    return jnp.sqrt(jnp.maximum(squares_T - 2 * jnp.exp(-losses_T) + 1, 0.0))


def normalise(values: np.ndarray) -> np.ndarray:
    """Returns (values - mean) / deviation over all documents; 0 if all are equal."""
    deviation = values.std()
    return (values - values.mean()) / (deviation if deviation > 0 else 1.0)


def top_documents(columns: dict[str, list[Any]]) -> Table:
    """Returns a table of the documents with the largest self-influence."""
    order = np.argsort(columns['tracin_self'])[::-1][:TABLE_ROWS]
    return Table({name: [values[i] for i in order] for name, values in columns.items()})
