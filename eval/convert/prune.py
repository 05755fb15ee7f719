"""Prunes checkpoints: sets some weights of every output to 0, by what a text does with them."""

import codecs
import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.convert.merge import check_stored_as_used, flat_params, specs_of
from eval.convert.scores import REMOVE, removed
from eval.load import Checkpoint
from lm.data.sources import open_source
from lm.inference.probes import input_squares
from lm.training.state import Weights
from modules.choices import choose
from modules.params import ParamSpec


@dataclasses.dataclass(frozen=True)
class Pruned:
    """A model, or its parameters, without some weights. n_removed: how many were set to 0, of the
    n_weights that its matrices have.
    """

    params: Mapping[str, np.ndarray]
    n_removed: int
    n_weights: int


def check_asked(remove: str, share: float) -> None:
    """Raises ValueError, before anything is loaded, for a choice or a share that is none."""
    choose(REMOVE, remove, '--remove')
    if not 0 < share < 1:
        raise ValueError(f'--share must be above 0 and below 1, such as 0.1; got {share}')


def prune_checkpoint(
    checkpoint: Checkpoint, tokens_BT: np.ndarray, remove: str, share: float, seed: int
) -> Pruned:
    """Returns a model without a share of the inputs of every output, of all matrices of its blocks.

    All masks are of the model as it was, once. Embeddings, readout, norms and biases stay. The code
    of Antidote (arXiv:2408.09600) prunes the factors of LoRA, or queries, keys and values where all
    weights were fine-tuned; here it is every matrix that multiplies activations within a block.

    Args:
      checkpoint: as `load` gives it.
      tokens_BT: the text whose activations the scores are of, each row one document.
      remove: a row of REMOVE.
      share: of the inputs of every output, above 0 and below 1.
      seed: of the row `random`.

    Raises:
      ValueError: for a share that removes nothing of a matrix, and for a model with a
        reparametrisation.
    """
    check_stored_as_used(checkpoint, 'pruned')
    squares, rng = mean_squares(checkpoint, tokens_BT), np.random.default_rng(seed)
    return pruned(specs_of(checkpoint), flat_params(checkpoint), squares, remove, share, rng)


def pruned(
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, np.ndarray],
    squares: Mapping[str, np.ndarray],
    remove: str,
    share: float,
    rng: np.random.Generator,
) -> Pruned:
    """Returns parameters without what `eval.convert.scores.removed` chooses of each that has
    `squares` of its inputs. All are by path.
    """
    left, n_removed, n_weights = dict(params), 0, 0
    for path, own in squares.items():
        weight = np.asarray(params[path])
        mask = removed(specs[path], weight, own, remove, share, rng)
        left[path] = np.where(mask, np.zeros_like(weight), weight)
        n_removed, n_weights = n_removed + int(mask.sum()), n_weights + mask.size
    return Pruned(left, n_removed, n_weights)


def mean_squares(checkpoint: Checkpoint, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the means over all tokens of the squares of what each product multiplies, by the path
    of its parameter (`lm.inference.probes.input_squares`), a microbatch of rows at a time.
    """
    size, found = checkpoint.recipe.microbatch, {}
    of_rows = jax.jit(functools.partial(input_squares, checkpoint.learner))
    for start in range(0, len(tokens_BT), size):
        rows_BT = tokens_BT[start : start + size]
        share = len(rows_BT) / len(tokens_BT)
        for path, squares in jax.device_get(of_rows(checkpoint.weights, rows_BT)).items():
            found[path] = found.get(path, 0.0) + share * np.asarray(squares, np.float64)
    return found


def rows_of_text(checkpoint: Checkpoint, source: str) -> np.ndarray:
    """Returns the tokens [B, T] of the documents of a `data.source`, in rows of data.seq_len, each
    document behind the token that begins one. What is left behind the last whole row is not read; a
    text of less than one row is one.

    Raises ValueError for a source that cannot be read, or holds no text.
    """
    fields, tokenizer, tokens = checkpoint.recipe.data, checkpoint.tokenizer, []
    for _, parts in open_source(source, fields.text_field).documents():
        text = ''.join(codecs.iterdecode(parts, 'utf-8', 'replace'))
        tokens += [tokenizer.bos_id, *tokenizer.encode(text)] if text else []
    if len(tokens) < 2:
        raise ValueError(f'--text={source} holds no text')
    length = min(fields.seq_len, len(tokens))
    n_rows = len(tokens) // length
    return np.array(tokens[: n_rows * length], np.int32).reshape(n_rows, length)


def weights_of(checkpoint: Checkpoint, found: Pruned) -> Weights:
    """Returns the weights that a checkpoint is written with."""
    stats = jax.device_get(checkpoint.weights.stats)
    return Weights(unflatten_dict(dict(found.params), sep='/'), (), stats)
