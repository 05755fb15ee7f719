"""The validation split: which batches of it are seen, and the loss per token and per byte."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from lm import data
from lm.data import Rows
from lm.mesh import put_batch, share_of_process
from lm.run.experiment import Experiment
from lm.state import Hyper, Weights


def validation_batches(experiment: Experiment, rows: Rows) -> Iterator[data.Batch]:
    """This process's share of them, of the size of a microbatch, so that evaluation needs no more
    memory than training.
    """
    config = experiment.config
    process_index, process_count = share_of_process(experiment.mesh)
    return data.evaluation_batches(
        rows,
        batch_size=config.data.batch_size // config.train.microbatches,
        limit=config.train.eval_batches,
        process_index=process_index,
        process_count=process_count,
    )


def first_batch(experiment: Experiment, rows: Rows) -> data.Batch:
    """The validation batch that layers are diagnosed with, always the same."""
    return next(validation_batches(experiment, rows))


def evaluate(
    eval_step: Callable,
    weights: Weights,
    hyper: Hyper,
    mesh: Mesh,
    batches: Iterable[dict],
    rows: Rows,
) -> dict[str, float]:
    """`validation_losses` of one run over `batches` of `rows`."""
    pending = [eval_step(weights, put_batch(mesh, batch), hyper) for batch in batches]
    return validation_losses(jax.device_get(pending), rows)


def validation_losses(sums: list[dict[str, Any]], rows: Rows) -> dict[str, float]:
    """validation_ce (nats per token), bits_per_byte and perplexity, from the sums of each batch.

    bits_per_byte = ce / ln 2 * (target tokens / bytes of text they stand for) of the whole split:
    exact where the batches cover it, and then comparable between tokenizers.
    """
    ce = mean_ce(sums)
    return {
        'validation_ce': ce,
        'bits_per_byte': ce / math.log(2) * rows.n_tokens / rows.n_bytes,
        'perplexity': math.exp(min(ce, 700.0)),  # beyond that exp overflows
    }


def objective_loss(name: str, sums: list[dict[str, Any]]) -> dict[str, float]:
    """Nats a target token of an objective (`lm.objectives`), by the name it is recorded under."""
    return {objective_loss_name(name): mean_ce(sums)}


def objective_loss_name(name: str) -> str:
    return f'validation_{name}_ce'


def mean_ce(sums: list[dict[str, Any]]) -> float:
    """NaN where nothing was a target, as where all documents are too short for their marks."""
    tokens = sum(float(s['tokens']) for s in sums)
    return sum(float(s['ce']) for s in sums) / tokens if tokens else math.nan
