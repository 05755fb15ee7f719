"""Influence of training documents: scores from errors and gradients, without a run trained anew."""

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
from lm.model.transformer import EMBEDDING, SHIFTS
from lm.record.checkpoint import list_steps
from lm.run.tables import schedule_fractions
from lm.training.state import Learner, Weights
from lm.training.step import text_weights
from modules.numerics import DTYPES
from modules.options import Option

GROUP_ROWS = 16  # documents of a program, one after another: it holds one gradient at a time
HOST_BYTES = 1 << 30  # of gradients in embeddings: documents beyond are done in a further pass
TEXT = 80  # characters of a document that are shown
TABLE_ROWS = 10  # documents of a table
SCORES = ('loss', 'el2n', 'vog', 'tracin_self', 'tracin_validation')

DocumentRows = dict[str, np.ndarray]  # tokens, segments [N, T + 1]: a document each


def influence(
    checkpoint: Checkpoint,
    *,
    documents: Annotated[int, Option('training documents, at equal distances', 2)] = 64,
    checkpoints: Annotated[int, Option('steps of the run, up to this one', 1)] = 5,
    validation: Annotated[int, Option('validation documents, at equal distances', 1)] = 64,
) -> SuiteResult:
    """Scores of training documents by which data are chosen: EL2N, VoG and TracIn; means and ranks.

    A document is read from its beginning, up to data.seq_len tokens. el2n: the mean over tokens of
    ||softmax - onehot||, at this checkpoint (arXiv:2107.07075). vog: the variance, over checkpoints
    of the run, of the gradient of the sum of the logits of the true tokens in the embeddings, the
    mean over tokens and features (arXiv:2008.11600, for language arXiv:2311.16298); in `items` also
    less its mean, over its deviation. tracin_self: sum over checkpoints of eta ||gradient||^2 of
    the mean loss in all weights, eta being the learning rate at the checkpoint; tracin_validation:
    with the mean gradient of validation documents in place of one of the two (arXiv:2002.08484).
    spearman_A_B are rank correlations. With one checkpoint there is no vog.
    """
    data = open_data(checkpoint)
    there = [step for step in list_steps(checkpoint.path.parent) if step <= checkpoint.step]
    steps = [there[i] for i in spaced_indices(len(there), checkpoints)]
    named = select_documents(data.train, documents)
    rows = pad_documents(checkpoint, [tokens for _, tokens in named])
    held_out = pad_documents(
        checkpoint, [tokens for _, tokens in select_documents(data.validation, validation)]
    )
    scores = score_documents(checkpoint, steps, rows, held_out)
    if len(steps) < 2:
        del scores['vog']
    numbers = {'checkpoints': len(steps), 'documents': len(named)}
    numbers |= {name: float(values.mean()) for name, values in scores.items()}
    for a, b in itertools.combinations(scores, 2):
        rank = scipy.stats.spearmanr(scores[a], scores[b]).statistic
        if np.isfinite(rank):  # it is not where all are equal
            numbers[f'spearman_{a}_{b}'] = float(rank)
    decode = checkpoint.tokenizer.decode
    items = {
        'item': [name for name, _ in named],
        **{name: values.tolist() for name, values in scores.items()},
        **({'vog_normalised': normalise(scores['vog']).tolist()} if 'vog' in scores else {}),
        'tokens': [len(tokens) for _, tokens in named],
        'text': [' '.join(decode(own[: 4 * TEXT].tolist()).split())[:TEXT] for _, own in named],
    }
    return SuiteResult(numbers, items, {'Documents of most self-influence': top_documents(items)})


def spaced_indices(count: int, max_count: int) -> list[int]:
    """Returns up to `most` of the numbers 0 to count - 1 at equal distances, the last included."""
    max_count = min(count, max_count)
    return [round((i + 1) * count / max_count) - 1 for i in range(max_count)]


def select_documents(rows: Any, max_count: int) -> list[tuple[str, np.ndarray]]:
    """Returns up to `most` documents of a split at equal distances, as (name, tokens)."""
    sources = split_by_source(rows)
    every = [(name, i) for name, own in sources.items() for i in range(own.n_documents)]
    chosen = [every[i] for i in spaced_indices(len(every), max_count)]
    return [(f'{name} {i}'.strip(), sources[name].document(i)) for name, i in chosen]


def pad_documents(checkpoint: Checkpoint, documents: Sequence[np.ndarray]) -> DocumentRows:
    """Returns documents as rows of one length, BOS before them, cut after data.seq_len tokens."""
    longest = checkpoint.recipe.data.seq_len
    width = min(longest, next_power_2(max(2, *(len(tokens) for tokens in documents))))
    tokens, segments = np.zeros((2, len(documents), width + 1), np.int32)
    for i, own in enumerate(documents):
        own = [checkpoint.tokenizer.bos_id, *own[:width].tolist()]
        tokens[i, : len(own)], segments[i, : len(own)] = own, 1
    return {'tokens': tokens, 'segments': segments}


def score_documents(
    checkpoint: Checkpoint, steps: Sequence[int], rows: DocumentRows, held_out: DocumentRows
) -> dict[str, np.ndarray]:
    """Returns SCORES [N] of rows, from the checkpoints of `steps`, the last of which is this one.

    Gradients in embeddings are kept as sums over checkpoints, for as many rows at a time as
    HOST_BYTES has room for; the weights are read again for each such pass.
    """
    learner = checkpoint.learner
    width = rows['tokens'].shape[1] - 1
    each = 2 * 4 * width * learner.recipe.stream_width
    size = max(GROUP_ROWS, HOST_BYTES // each)
    rates = checkpoint.recipe.optim.lr * schedule_fractions(checkpoint.recipe, np.maximum(steps, 1))
    of_rows, mean_gradient = compile_programs(checkpoint)
    parts = []
    for start in range(0, len(rows['tokens']), size):
        part = {name: x[start : start + size] for name, x in rows.items()}
        found, variance = {}, RunningVariance()
        traced = np.zeros((2, len(part['tokens'])))
        for step, rate in zip(steps, rates, strict=True):
            own = step == checkpoint.step
            weights = checkpoint.weights if own else load_weights(checkpoint, step)
            direction = validation_gradient(mean_gradient, weights, held_out)
            results = [of_rows(weights, direction, group) for group in split_groups(part)]
            found = {k: np.concatenate([r[k] for r in jax.device_get(results)]) for k in results[0]}
            found = {name: values[: len(part['tokens'])] for name, values in found.items()}
            variance.add(found.pop('embedding_gradient'))
            traced += rate * np.array([found.pop('squared_norm'), found.pop('along')])
        counts_N = found.pop('targets')
        vog_N = variance.value().sum((1, 2)) / (counts_N * learner.recipe.stream_width)
        tracin = {'tracin_self': traced[0], 'tracin_validation': traced[1]}
        parts.append(found | {'vog': vog_N} | tracin)
    return {name: np.concatenate([part[name] for part in parts]) for name in SCORES}


class RunningVariance:
    """The variance of arrays that come one after another, without keeping them (Welford)."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        self.count += 1
        apart = values - self.mean
        self.mean = self.mean + apart / self.count
        self.squares = self.squares + apart * (values - self.mean)

    def value(self) -> np.ndarray:
        """Returns the mean squared distance from the mean."""
        return self.squares / self.count


def split_groups(rows: DocumentRows) -> Iterator[DocumentRows]:
    """Yields AT_ONCE rows at a time; the last ones are filled up with padding."""
    for start in range(0, len(rows['tokens']), GROUP_ROWS):
        part = {name: x[start : start + GROUP_ROWS] for name, x in rows.items()}
        missing = GROUP_ROWS - len(part['tokens'])
        yield {name: np.pad(x, ((0, missing), (0, 0))) for name, x in part.items()}


def compile_programs(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Returns jitted (weights, direction, rows) -> `of_document` of each row, and (weights, rows)
    -> the sum of the rows' gradients.
    """
    learner, mesh = checkpoint.learner, checkpoint.mesh
    weights, all_of_it = state_shardings(learner, mesh).weights, replicated_sharding(mesh)

    def of_rows(weights, direction, rows):
        one = functools.partial(score_document, learner, weights, direction)
        return jax.lax.map(one, rows)

    def summed(weights, rows):
        def add(total, row):
            gradient, _ = compute_document_gradients(learner, weights, row)
            return jax.tree.map(jnp.add, total, gradient), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights.params), rows)[0]

    return (
        jax.jit(
            trace_on_mesh(mesh, of_rows),
            in_shardings=(weights, weights.params, all_of_it),
            out_shardings=all_of_it,
        ),
        jax.jit(
            trace_on_mesh(mesh, summed),
            in_shardings=(weights, all_of_it),
            out_shardings=weights.params,
        ),
    )


def validation_gradient(sum_gradients: Any, weights: Weights, rows: DocumentRows) -> Any:
    """Returns the mean over rows of the gradient of each; rows of padding have none."""
    parts = [sum_gradients(weights, group) for group in split_groups(rows)]
    total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    return jax.tree.map(lambda x: x / len(rows['tokens']), total)


def score_document(
    learner: Learner, weights: Weights, direction: Any, row: DocumentRows
) -> dict[str, Any]:
    """Returns what the scores of one row are made of: its own errors and gradients."""
    gradient, seen = compute_document_gradients(learner, weights, row)

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

    return seen | {'squared_norm': dot(gradient, gradient), 'along': dot(gradient, direction)}


def compute_document_gradients(
    learner: Learner, weights: Weights, row: DocumentRows
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns (the gradient of the mean loss of a row [T + 1] in the stored weights, {`loss`,
    `el2n`, `targets`, and `embedding_gradient` [T, D], that of the sum of the true tokens' logits
    in the stream that enters the first block}). Padding takes no part.
    """
    batch = {name: x[None] for name, x in row.items()}
    tokens_1T, read_1T = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    weights_T = text_weights(batch, learner.bos_id)[0]
    count = jnp.sum(weights_T)

    def forward(params, shift_TD):
        variables = learner.variables(weights.replace(params=params))
        variables = variables | {SHIFTS: {EMBEDDING: shift_TD[None]}}
        given = (tokens_1T, read_1T, read_1T > 0)
        x_1TD, readout = learner.model.apply(variables, *given, method='activations')
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
    (loss, _), pull, el2n = jax.vjp(forward, weights.params, zeros_TD, has_aux=True)
    one, none = jnp.ones_like(loss), jnp.zeros_like(loss)
    gradient, _ = pull((one, none))
    _, in_embedding_TD = pull((none, one))
    seen = {'loss': loss, 'el2n': el2n, 'targets': count}
    return gradient, seen | {'embedding_gradient': in_embedding_TD.astype(jnp.float32)}


def compute_error_norms(logits_TV: jax.Array, losses_T: jax.Array) -> jax.Array:
    """Returns ||softmax - onehot||_2 of each token: sqrt(sum p^2 - 2 p(true) + 1)."""
    squares_T = jnp.sum(jax.nn.softmax(logits_TV) ** 2, -1)
    return jnp.sqrt(jnp.maximum(squares_T - 2 * jnp.exp(-losses_T) + 1, 0.0))


def normalise(values: np.ndarray) -> np.ndarray:
    """Returns (values - mean) / deviation over all documents; 0 where all are equal."""
    deviation = values.std()
    return (values - values.mean()) / (deviation if deviation > 0 else 1.0)


def top_documents(columns: dict[str, list[Any]]) -> Table:
    """Returns the documents whose self-influence is the largest."""
    order = np.argsort(columns['tracin_self'])[::-1][:TABLE_ROWS]
    return Table({name: [values[i] for i in order] for name, values in columns.items()})
