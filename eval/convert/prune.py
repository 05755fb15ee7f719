"""Prunes checkpoints: sets a share of the weights of their blocks to 0, by what texts do with
them.
"""

import codecs
import dataclasses
import functools
from collections.abc import Callable, Mapping

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
from lm.inference.probes import gradients, input_moments, input_squares
from lm.training.state import Learner, Weights
from modules.choices import choose
from modules.params import ParamSpec, as_matrices, from_matrices, named_leaves


@dataclasses.dataclass(frozen=True)
class PrunedModel:
    """A model, or its parameters, without some weights. n_removed: how many were set to 0, of the
    n_weights that its matrices have.
    """

    params: Mapping[str, np.ndarray]
    n_removed: int
    n_weights: int


@dataclasses.dataclass(frozen=True)
class Pruning:
    """A request for what to remove, by which scores; ValueError for a choice that is none.

    Args:
      remove: a row of REMOVE.
      share: of the inputs of every output, or of the weights of a matrix; above 0 and below 1.
      score: a row of SCORES.
      per: a row of PER; None for that of the score.
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
        """Raises ValueError where a score that reads a general text has none, or another has one.
        source: as --general names it.
        """
        if SCORES[self.score].needs_general and not source:
            raise ValueError(
                f'--score={self.score} reads a general text too, whose importance its gradients '
                'have; add --general=SOURCE, or take --score=taylor'
            )
        if source and not SCORES[self.score].needs_general:
            dual = ', '.join(name for name, row in SCORES.items() if row.needs_general)
            raise ValueError(
                f'--score={self.score} reads --text alone; leave --general={source} out, or take '
                f'one of {dual}'
            )


def prune_checkpoint(
    checkpoint: Checkpoint,
    tokens_BT: np.ndarray,
    pruning: Pruning,
    general_BT: np.ndarray | None = None,
) -> PrunedModel:
    """Returns a model without a share of the weights of all matrices of its blocks.

    All masks are of the model as it was, once, and no weight makes up for those removed.
    Embeddings, readout, norms and biases stay. The code of Antidote (arXiv:2408.09600) prunes the
    factors of LoRA, or queries, keys and values where all weights were fine-tuned, and that of
    D-Pruner (arXiv:2405.06275) trains while it adds up scores; here it is every matrix that
    multiplies activations within a block, as it is.

    Args:
      checkpoint: as `load` gives it.
      tokens_BT: the text that the scores are of, each row one document.
      asked: what is removed.
      general_BT: the general text of a score that reads two.

    Raises:
      ValueError: for a share that removes nothing of a matrix, and for a model with a
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
    """Returns parameters without what masks choose of each that has `scores`, as matrices [..., I,
    O]. All are by path. rng: of the row `random`.
    """
    masked = PER[pruning.per or SCORES[pruning.score].per]
    left, n_removed, n_weights = dict(params), 0, 0
    for path, own_IO in scores.items():
        weight = np.asarray(params[path])
        mask_IO = masked(REMOVE[pruning.remove](own_IO, rng), pruning.share)
        mask = np.asarray(from_matrices(specs[path], mask_IO, weight.shape))
        left[path] = np.where(mask, np.zeros_like(weight), weight)
        n_removed, n_weights = n_removed + int(mask.sum()), n_weights + mask.size
    return PrunedModel(left, n_removed, n_weights)


def prune_params(
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, np.ndarray],
    squares: Mapping[str, np.ndarray],
    remove: str,
    share: float,
    rng: np.random.Generator,
) -> PrunedModel:
    """Returns parameters without a share of the inputs of every output, by `wanda` of the
    `squares` of inputs (`lm.inference.probes.input_squares`). All are by path.
    """
    scores = matrix_scores('wanda', specs, params, squares)
    return remove_weights(specs, params, scores, Pruning(remove, share, 'wanda', per='output'), rng)


class ScoreReader:
    """The model of a learner, which reads texts for scores, some rows at a time. One that is kept
    for other weights compiles nothing again.
    """

    def __init__(self, learner: Learner, rows: int):
        self.specs = named_leaves(learner.description.specs)
        self._rows = rows
        self._squares = functools.partial(input_squares, learner)
        programs = {SQUARES: self._squares, MOMENTS: functools.partial(input_moments, learner)}
        self._means = {name: jax.jit(program) for name, program in programs.items()}
        of_gradients = {row.compute for row in SCORES.values() if row.statistic == GRADIENTS}
        self._of_gradients = {
            of: jax.jit(functools.partial(average_over_rows, learner, of)) for of in of_gradients
        }

    def compute_scores(
        self,
        weights: Weights,
        pruning: Pruning,
        tokens_BT: np.ndarray,
        general_BT: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the scores that are asked for of every matrix of the blocks, as matrices [..., I,
        O], by path.
        """
        row, params = SCORES[pruning.score], named_leaves(jax.device_get(weights.params))
        if row.statistic != GRADIENTS:
            means = self.compute_means(row.statistic, weights, tokens_BT)
            return matrix_scores(pruning.score, self.specs, params, means)
        paths = jax.eval_shape(self._squares, weights, tokens_BT[:1])
        general = {path: np.zeros_like(params[path]) for path in paths}
        if row.needs_general:
            moments = self.compute_means(MOMENTS, weights, general_BT)
            general = {
                path: from_matrices(self.specs[path], scores_IO, params[path].shape)
                for path, scores_IO in matrix_scores('obs', self.specs, params, moments).items()
            }
        program = self._of_gradients[row.compute]
        found = self._mean(
            lambda rows_BT: program(weights, general, pruning.strength, rows_BT), tokens_BT
        )
        return {path: np.asarray(as_matrices(self.specs[path], x)) for path, x in found.items()}

    def compute_means(
        self, statistic: str, weights: Weights, tokens_BT: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns the means over all tokens of the SQUARES or MOMENTS of what each product
        multiplies, by the path of its parameter.
        """
        return self._mean(lambda rows_BT: self._means[statistic](weights, rows_BT), tokens_BT)

    def _mean(self, compute: Callable, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
        found = {}
        for start in range(0, len(tokens_BT), self._rows):
            rows_BT = tokens_BT[start : start + self._rows]
            share = len(rows_BT) / len(tokens_BT)
            for path, mean in jax.device_get(compute(rows_BT)).items():
                found[path] = found.get(path, 0.0) + share * np.asarray(mean, np.float64)
        return found


def matrix_scores(
    score: str,
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, np.ndarray],
    means: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns the scores, as matrices [..., I, O], of parameters that have `means` of what a row
    of SCORES reads, SQUARES or MOMENTS. All are by path.
    """
    row, found = SCORES[score], {}
    for path, mean in means.items():
        matrices_IO = np.asarray(as_matrices(specs[path], params[path]))
        inputs = matrices_IO.shape[:-1]
        shape = inputs if row.statistic == SQUARES else (*inputs, inputs[-1])
        found[path] = row.compute(matrices_IO, np.reshape(mean, shape))
    return found


def average_over_rows(
    learner: Learner,
    score: Callable,
    weights: Weights,
    general: Mapping[str, jax.Array],
    strength: jax.Array,
    tokens_BT: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the means over rows of scores of(weights, gradients of the loss of a row), shaped as
    the parameters that have a `general` importance, by path. 0 for none.
    """
    params = named_leaves(weights.params)

    def add(total, tokens_T):
        found, _ = gradients(learner, weights, tokens_T[None])
        grads = named_leaves(found)
        own = {
            path: score(params[path], regularise(grads[path], importance, strength))
            for path, importance in general.items()
        }
        return jax.tree.map(jnp.add, total, own), None

    zeros = {path: jnp.zeros_like(params[path]) for path in general}
    total, _ = jax.lax.scan(add, zeros, tokens_BT)
    return jax.tree.map(lambda x: x / len(tokens_BT), total)


def read_text_rows(checkpoint: Checkpoint, source: str, flag: str) -> np.ndarray:
    """Returns the tokens [B, T] of the documents of a `data.source`, in rows of data.seq_len, each
    document behind the token that begins one. What is left behind the last whole row is not read; a
    text of less than one row is one. flag: that names it.

    Raises ValueError for a source that cannot be read, or holds no text.
    """
    fields, tokenizer, tokens = checkpoint.recipe.data, checkpoint.tokenizer, []
    for _, parts in open_source(source, fields.text_field).documents():
        text = ''.join(codecs.iterdecode(parts, 'utf-8', 'replace'))
        tokens += [tokenizer.bos_id, *tokenizer.encode(text)] if text else []
    if len(tokens) < 2:
        raise ValueError(f'{flag}={source} holds no text')
    length = min(fields.seq_len, len(tokens))
    n_rows = len(tokens) // length
    return np.array(tokens[: n_rows * length], np.int32).reshape(n_rows, length)


def to_weights(checkpoint: Checkpoint, pruned_model: PrunedModel) -> Weights:
    """Returns the weights that a checkpoint is written with."""
    stats = jax.device_get(checkpoint.weights.stats)
    return Weights(unflatten_dict(dict(pruned_model.params), sep='/'), (), stats)
