"""Prunes checkpoints: sets a share of the weights of their blocks to 0, by scores on a text."""

import codecs
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.convert.merge import check_stored_as_used, flat_params
from eval.convert.scores import (
    GRADIENTS,
    MOMENTS,
    PER,
    REMOVE,
    SCORES,
    SQUARES,
    STRENGTH,
    regularise,
)
from eval.load import Checkpoint
from lm.data.sources import open_source
from lm.inference.probes import (
    gradients,
    input_moments,
    input_squares,
    next_token_loss,
    observe,
)
from lm.training.state import Learner, Weights
from modules.choices import choose
from modules.params import ParamSpec, as_matrices, from_matrices, named_leaves


@dataclasses.dataclass(frozen=True)
class PrunedModel:
    """A model, or its parameters, without some weights.

    n_removed: weights that were set to 0, of the n_weights in its matrices.
    """

    params: Mapping[str, Any]
    n_removed: int
    n_weights: int


@dataclasses.dataclass(frozen=True)
class Pruning:
    """The weights to remove and their scores. Raises ValueError for an unknown choice.

    Args:
      remove: a row of REMOVE.
      share: of the inputs of every output, or of the weights of a matrix; above 0 and below 1.
      score: a row of SCORES.
      per: a row of PER; None: the default of the score.
      strength: of the general importance in the gradients of a dual score.
      seed: of the row `random`.
    """

    remove: str
    share: float
    score: str = 'wanda'
    per: str | None = None
    strength: float = STRENGTH
    seed: int = 0

    def __post_init__(self):
        choose(REMOVE, self.remove, '--remove')
        choose(SCORES, self.score, '--score')
        if self.per is not None:
            choose(PER, self.per, '--per')
        if not 0 < self.share < 1:
            raise ValueError(f'--share must be above 0 and below 1, such as 0.1; got {self.share}')
        if not 0 <= self.strength < np.inf:
            raise ValueError(f'--strength must be 0 or above; got {self.strength}')

    def check_general(self, source: str | None) -> None:
        """Raises ValueError if --general is missing for a score that needs it, or is not read.

        source: the flag --general.
        """
        if SCORES[self.score].needs_general and not source:
            raise ValueError(
                f'--score={self.score} also needs a general text: add --general=SOURCE, or use '
                '--score=taylor'
            )
        if source and not SCORES[self.score].needs_general:
            dual = ', '.join(name for name, row in SCORES.items() if row.needs_general)
            raise ValueError(
                f'--score={self.score} reads only --text: leave out --general={source}, or use '
                f'one of these scores: {dual}'
            )


def prune_checkpoint(
    checkpoint: Checkpoint,
    tokens_BT: np.ndarray,
    pruning: Pruning,
    general_BT: np.ndarray | None = None,
) -> PrunedModel:
    """Returns a model without a share of the weights of all matrices of its blocks.

    All masks are computed once, on the unpruned model, and the remaining weights do not compensate.
    Embeddings, readout, norms and biases stay. The code of Antidote (arXiv:2408.09600) prunes the
    factors of LoRA, or queries, keys and values if all weights were fine-tuned, and the code of
    D-Pruner (arXiv:2405.06275) trains while it accumulates scores. Here every matrix that
    multiplies activations within a block is pruned.

    Args:
      checkpoint: a loaded checkpoint.
      tokens_BT: the text for the scores, a document per row.
      pruning: the weights to remove.
      general_BT: the general text of a dual score.

    Raises:
      ValueError: for a share that removes no weight of a matrix, and for a model with a
        reparametrisation.
    """
    check_stored_as_used(checkpoint, 'pruned')
    reader = ScoreReader(checkpoint.learner, checkpoint.recipe.microbatch_size)
    scores = reader.compute_scores(checkpoint.weights, pruning, tokens_BT, general_BT)
    rng = np.random.default_rng(pruning.seed)
    return remove_weights(reader.specs, flat_params(checkpoint), scores, pruning, rng)


def remove_weights(
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, np.ndarray],
    scores: Mapping[str, np.ndarray],
    pruning: Pruning,
    rng: np.random.Generator,
) -> PrunedModel:
    """Returns the parameters with the masked weights set to 0.

    Args:
      specs: of the parameters, by path.
      params: by path.
      scores: of the parameters that are pruned, as matrices [..., I, O], by path.
      pruning: the weights to remove.
      rng: of the row `random`.
    """
    make_mask = PER[pruning.per or SCORES[pruning.score].per]
    pruned_params, n_removed, n_weights = dict(params), 0, 0
    for path, scores_IO in scores.items():
        weight = np.asarray(params[path])
        mask_IO: Any = make_mask(REMOVE[pruning.remove](scores_IO, rng), pruning.share)
        mask = np.asarray(from_matrices(specs[path], mask_IO, weight.shape))
        pruned_params[path] = np.where(mask, np.zeros_like(weight), weight)
        n_removed, n_weights = n_removed + int(mask.sum()), n_weights + mask.size
    return PrunedModel(pruned_params, n_removed, n_weights)


def prune_params(
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, np.ndarray],
    squares: Mapping[str, np.ndarray],
    remove: str,
    share: float,
    rng: np.random.Generator,
) -> PrunedModel:
    """Returns parameters without a share of the inputs of every output, by the score `wanda`.

    Args:
      specs: of the parameters, by path.
      params: by path.
      squares: mean squares of inputs (`lm.inference.probes.input_squares`), by path.
      remove: a row of REMOVE.
      share: of the inputs.
      rng: of the row `random`.
    """
    scores = matrix_scores('wanda', specs, params, squares)
    return remove_weights(specs, params, scores, Pruning(remove, share, 'wanda', per='output'), rng)


class ScoreReader:
    """Computes scores on texts with the model of a learner, `rows` rows at a time.

    Reuse the object for other weights: its programs are compiled once.
    """

    def __init__(self, learner: Learner, rows: int):
        self.specs = named_leaves(learner.description.specs)
        self._rows = rows
        self._squares = functools.partial(input_squares, learner)
        programs = {SQUARES: self._squares, MOMENTS: functools.partial(input_moments, learner)}
        self._means = {name: jax.jit(program) for name, program in programs.items()}
        self._loss = jax.jit(functools.partial(row_loss, learner))
        gradient_scores = {row.compute for row in SCORES.values() if row.statistic == GRADIENTS}
        self._of_gradients = {
            score: jax.jit(functools.partial(average_over_rows, learner, score))
            for score in gradient_scores
        }

    def compute_scores(
        self,
        weights: Weights,
        pruning: Pruning,
        tokens_BT: np.ndarray,
        general_BT: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the scores of every matrix of the blocks, as matrices [..., I, O], by path.

        Args:
          weights: of the model.
          pruning: names the score.
          tokens_BT: the text for the scores.
          general_BT: the general text of a dual score.
        """
        row, params = SCORES[pruning.score], named_leaves(jax.device_get(weights.params))
        if row.statistic != GRADIENTS:
            means = self.compute_means(row.statistic, weights, tokens_BT)
            return matrix_scores(pruning.score, self.specs, params, means)
        general = {
            path: np.zeros_like(params[path]) for path in self.list_matrices(weights, tokens_BT)
        }
        if row.needs_general:
            assert general_BT is not None  # `Pruning.check_general`
            moments = self.compute_means(MOMENTS, weights, general_BT)
            general = {
                path: from_matrices(self.specs[path], scores_IO, params[path].shape)
                for path, scores_IO in matrix_scores('obs', self.specs, params, moments).items()
            }
        program = self._of_gradients[row.compute]
        mean_scores = self._mean(
            lambda rows_BT: program(weights, general, pruning.strength, rows_BT), tokens_BT
        )
        return {
            path: np.asarray(as_matrices(self.specs[path], x)) for path, x in mean_scores.items()
        }

    def list_matrices(self, weights: Weights, tokens_BT: np.ndarray | None = None) -> list[str]:
        """Returns the paths of the matrices that multiply activations in the blocks.

        Args:
          weights: of the model.
          tokens_BT: a text; None: none is read.
        """
        rows_BT = np.zeros((1, 2), np.int32) if tokens_BT is None else tokens_BT[:1]
        return list(jax.eval_shape(self._squares, weights, rows_BT))  # traces, but does not run

    def compute_means(
        self, statistic: str, weights: Weights, tokens_BT: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns means of the inputs' squares or moments over all tokens, by parameter path.

        Args:
          statistic: SQUARES or MOMENTS.
          weights: of the model.
          tokens_BT: the text.
        """
        return self._mean(lambda rows_BT: self._means[statistic](weights, rows_BT), tokens_BT)

    def compute_loss(self, weights: Weights, tokens_BT: np.ndarray) -> float:
        """Returns the mean loss of a text, in nats per token.

        Args:
          weights: of the model.
          tokens_BT: the text.
        """
        losses = self._mean(lambda rows_BT: {'loss': self._loss(weights, rows_BT)}, tokens_BT)
        return float(losses['loss'])

    def _mean(self, compute: Callable, tokens_BT: np.ndarray) -> dict[str, Any]:
        means = {}
        for start in range(0, len(tokens_BT), self._rows):
            rows_BT = tokens_BT[start : start + self._rows]
            # The last group may be smaller, and weighs less.
            share = len(rows_BT) / len(tokens_BT)
            for path, mean in jax.device_get(compute(rows_BT)).items():
                means[path] = means.get(path, 0.0) + share * np.asarray(mean, np.float64)
        return means


def matrix_scores(
    score: str,
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, Any],
    means: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns the scores, as matrices [..., I, O], of parameters, by path.

    Args:
      score: a row of SCORES that reads SQUARES or MOMENTS.
      specs: of the parameters, by path.
      params: by path.
      means: of the inputs' squares or moments, by path.
    """
    row, scores = SCORES[score], {}
    for path, mean in means.items():
        matrices_IO = np.asarray(as_matrices(specs[path], params[path]))
        input_shape = matrices_IO.shape[:-1]
        shape = input_shape if row.statistic == SQUARES else (*input_shape, input_shape[-1])
        scores[path] = row.compute(matrices_IO, np.reshape(mean, shape))
    return scores


def row_loss(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> jax.Array:
    """Returns the mean loss of rows of tokens, in nats per token.

    Args:
      learner: of the model.
      weights: of the model.
      tokens_BT: the rows.
    """
    return next_token_loss(observe(learner, weights, tokens_BT)[0], tokens_BT)


def average_over_rows(
    learner: Learner,
    score: Callable,
    weights: Weights,
    general: Mapping[str, jax.Array],
    strength: jax.Array,
    tokens_BT: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the mean of gradient scores over rows, by path, shaped like the parameters.

    Args:
      learner: of the model.
      score: maps (weights, gradients of the loss of a row) to scores.
      weights: of the model.
      general: importance for the general text, by path; 0 for none.
      strength: of the general importance.
      tokens_BT: the rows.
    """
    params = named_leaves(weights.params)

    def add(total, tokens_T):
        row_gradients, _ = gradients(learner, weights, tokens_T[None])
        grads = named_leaves(row_gradients)
        row_scores = {
            path: score(params[path], regularise(grads[path], importance, strength))
            for path, importance in general.items()
        }
        return jax.tree.map(jnp.add, total, row_scores), None

    zeros = {path: jnp.zeros_like(params[path]) for path in general}
    # A scan, as scores are not linear in gradients: each row needs a separate backward pass.
    total, _ = jax.lax.scan(add, zeros, tokens_BT)
    return jax.tree.map(lambda x: x / len(tokens_BT), total)


def read_text_rows(
    checkpoint: Checkpoint, source: str, flag: str, max_length: int | None = None
) -> np.ndarray:
    """Returns the tokens [B, T] of the documents of a `data.source`, in rows of data.seq_len,
    or of `max_length` if that is shorter.

    Each document follows BOS. The tokens after the last full row are dropped; a text shorter than a
    row is a single row.

    Args:
      checkpoint: gives the tokenizer and the length.
      source: of the text.
      flag: names the source in errors.
      max_length: the most tokens of a row; None: data.seq_len.

    Raises:
      ValueError: for a source that cannot be read, or holds conversations or no text.
    """
    fields, tokenizer, tokens = checkpoint.recipe.data, checkpoint.tokenizer, []
    opened = open_source(source, fields.text_field)
    if opened.is_chat:
        raise ValueError(
            f'{flag} must be plain text, such as text:GLOB; got conversations, {source}'
        )
    for _, parts in opened.documents():
        text = ''.join(codecs.iterdecode(parts or (), 'utf-8', 'replace'))
        tokens += [tokenizer.bos_id, *tokenizer.encode(text)] if text else []
    if len(tokens) < 2:
        raise ValueError(f'{flag}={source} contains no text')
    length = min(fields.seq_len, max_length or fields.seq_len, len(tokens))
    n_rows = len(tokens) // length
    return np.array(tokens[: n_rows * length], np.int32).reshape(n_rows, length)


def to_weights(checkpoint: Checkpoint, params: Mapping[str, Any]) -> Weights:
    """Returns the weights of a checkpoint with other parameters, given by path."""
    stats = jax.device_get(checkpoint.weights.stats)
    return Weights(unflatten_dict(dict(params), sep='/'), (), stats)
