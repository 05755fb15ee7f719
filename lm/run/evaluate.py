"""Loss on the validation split, per token and per byte."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from lm.data import Rows
from lm.mesh import put_batch
from lm.state import Hyper, Weights


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
    ce = sum(float(s['ce']) for s in sums) / sum(float(s['tokens']) for s in sums)
    return {
        'validation_ce': ce,
        'bits_per_byte': ce / math.log(2) * rows.n_tokens / rows.n_bytes,
        'perplexity': math.exp(min(ce, 700.0)),  # beyond that exp overflows
    }
