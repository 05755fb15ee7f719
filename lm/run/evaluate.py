"""The validation split: up to train.eval_batches batches of each source, and their losses; and the
held-out texts of eval.texts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from lm import data
from lm.config.mixture import MixedRows, mean_by_share, split_by_source
from lm.data import Rows
from lm.devices.mesh import process_share, put_batch
from lm.inference.scoring import fetch_pipelined
from lm.record.run import TEXT
from lm.run.program import Experiment
from lm.training.state import Hyper, Weights

Sums = dict[str, list[dict[str, Any]]]  # batch sums by source; a single source is ''


def validation_batches(experiment: Experiment, rows: Rows | MixedRows) -> Iterator[data.Batch]:
    """Yields this process's share of the batches. A batch has the size of a microbatch, to fit in
    memory.
    """
    recipe = experiment.recipe
    process_index, process_count = process_share(experiment.mesh)
    return data.evaluation_batches(
        rows,
        batch_size=recipe.data.batch_size // recipe.train.microbatches,
        limit=recipe.train.eval_batches,
        process_index=process_index,
        process_count=process_count,
    )


def count_validation_batches(experiment: Experiment) -> int:
    """Returns the number of batches of an evaluation, over all sources and objectives."""
    recipe = experiment.recipe
    batch_size = recipe.data.batch_size // recipe.train.microbatches
    splits = [experiment.dataset.validation, *experiment.objective_rows.values()]
    sources = [source for rows in splits for source in split_by_source(rows).values()]
    return sum(
        data.count_evaluation_batches(source, batch_size, recipe.train.eval_batches)
        for source in sources
    )


def text_batches(experiment: Experiment, rows: Rows) -> Iterator[data.Batch]:
    """Yields this process's share of all rows of a held-out text."""
    recipe = experiment.recipe
    process_index, process_count = process_share(experiment.mesh)
    return data.evaluation_batches(
        rows,
        batch_size=recipe.microbatch_size,
        limit=0,
        process_index=process_index,
        process_count=process_count,
    )


def text_losses(sums: Mapping[str, Sums], texts: Mapping[str, Any]) -> dict[str, float]:
    """Returns the loss (nats per token) and bits per byte of each held-out text, and their means.

    The names are text_NAME_ce and text_NAME_bits_per_byte; of the means, in which each text counts
    as much, texts_ce and texts_bits_per_byte.

    Args:
      sums: of each text, as of a split.
      texts: rows of each text.
    """
    losses = {name: validation_losses(sums[name], rows) for name, rows in texts.items()}
    quantities = {'ce': 'validation_ce', 'bits_per_byte': 'bits_per_byte'}
    by_name = {
        f'{TEXT}{name}_{quantity}': text[key]
        for name, text in losses.items()
        for quantity, key in quantities.items()
    }
    means = {
        f'texts_{quantity}': math.fsum(text[key] for text in losses.values()) / len(losses)
        for quantity, key in quantities.items()
    }
    return by_name | means


def evaluate(
    eval_step: Callable,
    weights: Weights,
    hyper: Hyper,
    mesh: Mesh,
    batches: Callable[[Rows], Iterable[dict]],
    rows: Rows | MixedRows,
) -> dict[str, float]:
    """Computes `validation_losses` of one run.

    Args:
      eval_step: (weights, batch, hyper) -> sums of a batch.
      weights: the weights.
      hyper: the hyperparameters.
      mesh: the mesh of the weights.
      batches: (rows) -> batches of a source.
      rows: the validation split.

    Returns:
      The losses by name.
    """
    sums = sums_by_source(
        lambda batch: eval_step(weights, put_batch(mesh, batch), hyper), batches, rows
    )
    return validation_losses(sums, rows)


def sums_by_source(step: Callable, batches: Callable, rows: Rows | MixedRows) -> Sums:
    """Returns the sums of every batch, by source.

    Args:
      step: (batch) -> sums of a batch.
      batches: (rows) -> batches of a source.
      rows: the validation split.
    """
    sources = split_by_source(rows).items()
    return {
        name: list(fetch_pipelined(map(step, batches(source_rows))))
        for name, source_rows in sources
    }


def validation_losses(sums: Sums, rows: Rows | MixedRows) -> dict[str, float]:
    """Returns validation_ce (nats per token), bits_per_byte and perplexity.

    bits_per_byte = ce / ln 2 * (target tokens / bytes of their text) of the whole split: exact if
    the batches cover it, and then comparable between tokenizers. For a mixture both are means over
    its sources, weighted by data.mixture, and each source's ce is included by
    `objective_loss_name`; perplexity is exp(validation_ce).

    sums: the sums of each batch, by source. rows: the validation split.
    """
    ces = {name: mean_ce(source_sums) for name, source_sums in sums.items()}
    sources, ce = split_by_source(rows), mean_by_share(ces, rows)
    bits = {
        name: ces[name] / math.log(2) * source_rows.n_tokens / source_rows.n_bytes
        for name, source_rows in sources.items()
    }
    return {
        'validation_ce': ce,
        'bits_per_byte': mean_by_share(bits, rows),
        'perplexity': math.exp(min(ce, 700.0)),  # exp overflows beyond 709
        **{objective_loss_name(name): ces[name] for name in sources if name},
    }


def objective_loss(name: str, sums: Sums, rows: Any) -> dict[str, float]:
    """Returns the nats per target token of an objective, by its name in records.

    Args:
      name: the objective.
      sums: the sums of each batch, by source.
      rows: its rows; for a mixture, the loss is the mean over sources.
    """
    means = {source: mean_ce(source_sums) for source, source_sums in sums.items()}
    return {objective_loss_name(name): mean_by_share(means, rows)}


def objective_loss_name(name: str) -> str:
    """Returns the name in records of the loss of an objective, or of a source of a mixture."""
    return f'validation_{name}_ce'


def mean_ce(sums: list[dict[str, Any]]) -> float:
    """Returns the mean loss per token.

    It is NaN if no token is a target, as in documents that are too short.
    """
    tokens = sum(float(batch_sums['tokens']) for batch_sums in sums)
    # Added in Python's float64: a sum over a whole split would round in float32.
    return sum(float(batch_sums['ce']) for batch_sums in sums) / tokens if tokens else math.nan
