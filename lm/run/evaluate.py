"""The validation split: which batches of it are seen, and the loss per token and per byte.

A mixture has one of each source, all of which are seen at every evaluation, up to
train.eval_batches of each.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from lm import data
from lm.config.mixture import Mixed, by_source, mean_by_share
from lm.data import Rows
from lm.devices.mesh import put_batch, share_of_process
from lm.run.experiment import Experiment
from lm.training.state import Hyper, Weights


def validation_batches(experiment: Experiment, rows: Rows | Mixed) -> Iterator[data.Batch]:
    """This process's share of them, of the size of a microbatch, so that evaluation needs no more
    memory than training.
    """
    recipe = experiment.recipe
    process_index, process_count = share_of_process(experiment.mesh)
    return data.evaluation_batches(
        rows,
        batch_size=recipe.data.batch_size // recipe.train.microbatches,
        limit=recipe.train.eval_batches,
        process_index=process_index,
        process_count=process_count,
    )


def first_batch(experiment: Experiment, rows: Rows | Mixed) -> data.Batch:
    """The validation batch that layers are diagnosed with, always the same."""
    return next(validation_batches(experiment, rows))


def evaluate(
    eval_step: Callable,
    weights: Weights,
    hyper: Hyper,
    mesh: Mesh,
    batches: Callable[[Rows], Iterable[dict]],
    rows: Rows | Mixed,
) -> dict[str, float]:
    """`validation_losses` of one run over batches(rows) of each source."""
    pending = {
        name: [eval_step(weights, put_batch(mesh, batch), hyper) for batch in batches(own)]
        for name, own in by_source(rows).items()
    }
    return validation_losses(jax.device_get(pending), rows)


Sums = dict[str, list[dict[str, Any]]]  # of each batch of each source; one alone is ''


def validation_losses(sums: Sums, rows: Rows | Mixed) -> dict[str, float]:
    """validation_ce (nats per token), bits_per_byte and perplexity, from the sums of each batch.

    bits_per_byte = ce / ln 2 * (target tokens / bytes of text they stand for) of the whole split:
    exact where the batches cover it, and then comparable between tokenizers. Of a mixture both are
    the means of its sources' own, weighted by data.mixture, and each source's ce is there by
    `objective_loss_name`; perplexity is exp(validation_ce).
    """
    ces = {name: mean_ce(of_source) for name, of_source in sums.items()}
    bits = {
        name: ces[name] / math.log(2) * own.n_tokens / own.n_bytes
        for name, own in by_source(rows).items()
    }
    ce = mean_by_share(ces, rows)
    return {
        'validation_ce': ce,
        'bits_per_byte': mean_by_share(bits, rows),
        'perplexity': math.exp(min(ce, 700.0)),  # beyond that exp overflows
        **{objective_loss_name(name): ces[name] for name in by_source(rows) if name},
    }


def objective_loss(name: str, sums: Sums, rows: Any) -> dict[str, float]:
    """Nats a target token of an objective (`lm.model.objectives`), by the name it is recorded under; of a
    mixture the mean of its sources', weighted.
    """
    means = {source: mean_ce(of_source) for source, of_source in sums.items()}
    return {objective_loss_name(name): mean_by_share(means, rows)}


def objective_loss_name(name: str) -> str:
    """Of an objective, or of a source of a mixture."""
    return f'validation_{name}_ce'


def mean_ce(sums: list[dict[str, Any]]) -> float:
    """NaN where nothing was a target, as where all documents are too short for their marks."""
    tokens = sum(float(s['tokens']) for s in sums)
    return sum(float(s['ce']) for s in sums) / tokens if tokens else math.nan
