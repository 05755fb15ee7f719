"""The validation split: up to train.eval_batches batches of each source, and their losses."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.sharding import Mesh

from lm import data
from lm.config.mixture import MixedRows, mean_by_share, split_by_source
from lm.data import Rows
from lm.devices.mesh import process_share, put_batch
from lm.inference.scoring import fetch_pipelined
from lm.run.program import Experiment
from lm.training.state import Hyper, Weights

Sums = dict[str, list[dict[str, Any]]]  # of each batch of each source; a single source is ''


def validation_batches(experiment: Experiment, rows: Rows | MixedRows) -> Iterator[data.Batch]:
    """This process's share of the batches, as large as microbatches: they fit in memory."""
    recipe = experiment.recipe
    process_index, process_count = process_share(experiment.mesh)
    return data.evaluation_batches(
        rows,
        batch_size=recipe.data.batch_size // recipe.train.microbatches,
        limit=recipe.train.eval_batches,
        process_index=process_index,
        process_count=process_count,
    )


def evaluate(
    eval_step: Callable,
    weights: Weights,
    hyper: Hyper,
    mesh: Mesh,
    batches: Callable[[Rows], Iterable[dict]],
    rows: Rows | MixedRows,
) -> dict[str, float]:
    """`validation_losses` of one run over batches(rows) of each source."""
    sums = sums_by_source(
        lambda batch: eval_step(weights, put_batch(mesh, batch), hyper), batches, rows
    )
    return validation_losses(sums, rows)


def sums_by_source(step: Callable, batches: Callable, rows: Rows | MixedRows) -> Sums:
    """Returns step(batch) of batches(rows) of each source."""
    named = split_by_source(rows).items()
    return {name: list(fetch_pipelined(map(step, batches(own)))) for name, own in named}


def validation_losses(sums: Sums, rows: Rows | MixedRows) -> dict[str, float]:
    """validation_ce (nats per token), bits_per_byte and perplexity, from the sums of each batch.

    bits_per_byte = ce / ln 2 * (target tokens / bytes of text they stand for) of the whole split:
    exact where the batches cover it, and then comparable between tokenizers. For a mixture both are
    the means of its sources' own, weighted by data.mixture, and each source's ce is there by
    `objective_loss_name`; perplexity is exp(validation_ce).
    """
    ces = {name: mean_ce(of_source) for name, of_source in sums.items()}
    named, ce = split_by_source(rows), mean_by_share(ces, rows)
    bits = {k: ces[k] / math.log(2) * own.n_tokens / own.n_bytes for k, own in named.items()}
    return {
        'validation_ce': ce,
        'bits_per_byte': mean_by_share(bits, rows),
        'perplexity': math.exp(min(ce, 700.0)),  # beyond that exp overflows
        **{objective_loss_name(name): ces[name] for name in named if name},
    }


def objective_loss(name: str, sums: Sums, rows: Any) -> dict[str, float]:
    """Nats per target token of an objective, by its name in records; for a mixture the mean."""
    means = {source: mean_ce(of_source) for source, of_source in sums.items()}
    return {objective_loss_name(name): mean_by_share(means, rows)}


def objective_loss_name(name: str) -> str:
    """The name in records of the loss of an objective, or of a source of a mixture."""
    return f'validation_{name}_ce'


def mean_ce(sums: list[dict[str, Any]]) -> float:
    """NaN where nothing was a target, as where all documents are too short for their marks."""
    tokens = sum(float(s['tokens']) for s in sums)
    return sum(float(s['ce']) for s in sums) / tokens if tokens else math.nan
