"""Ablation: the loss without each attention head, and without each MLP."""

from typing import Annotated, Any

import jax
import numpy as np

from eval.load import Checkpoint, Intervention, open_data
from eval.suites.base import SuiteResult, Table
from eval.suites.reading import jit_statistic, validation_batches
from lm.inference.interventions import build_collections
from lm.inference.scoring import fetch_pipelined
from lm.training.state import Hyper, Learner, Weights
from lm.training.step import Batch, token_sums
from modules.interventions import HEADS, HIDDEN, SCALE
from modules.options import Option

INCREASE = 'loss increase'


def ablate(
    checkpoint: Checkpoint,
    *,
    tokens: Annotated[int, Option('approximate number of validation tokens; 0: all', 0)] = 16_384,
) -> SuiteResult:
    """Measures the loss without the output of each attention head, and of each MLP.

    The output of a head before the output matrix, or the hidden units of an MLP, are multiplied by
    0 (zero ablation). head_ and mlp_ are the loss without it minus the loss, in nats per token;
    _max and _mean summarise the heads of all layers, and the MLPs. Experts have no hidden units of
    fixed tokens, so that a model with experts has no mlp_.

    Args:
      checkpoint: a loaded checkpoint.
      tokens: approximate number of validation tokens to read; 0: all.
    """
    c = checkpoint
    L, N = c.recipe.model.n_layers, c.recipe.model.n_heads
    has_experts = any('n_experts' in kind.mlp.options for kind in c.recipe.kinds.values())
    loss = jit_statistic(c, sum_cross_entropy)
    # Nothing, then each head, then each MLP: all with arrays of the same shapes, for one program.
    heads = np.ones((1 + L * N + L, L, 1, 1, N, 1), np.float32)
    mlps = np.ones((1 + L * N + L, L, 1, 1, 1), np.float32)
    for i in range(L * N):
        heads[1 + i, i // N, 0, 0, i % N] = 0
    for layer in range(L):
        mlps[1 + L * N + layer, layer] = 0
    count = 1 + L * N + (0 if has_experts else L)

    def collections(i: int) -> dict[str, Any]:
        changes = [Intervention(HEADS, SCALE, heads[i])]
        changes += [] if has_experts else [Intervention(HIDDEN, SCALE, mlps[i])]
        return build_collections(c.recipe, changes, None)

    ce, n_tokens = np.zeros(count), 0.0
    changes = [collections(i) for i in range(count)]
    for batch in validation_batches(c, open_data(c).validation, tokens):
        sums = fetch_pipelined(loss(c.weights, batch, c.hyper, change) for change in changes)
        batch_ce, counts = zip(*sums, strict=True)
        ce, n_tokens = ce + batch_ce, n_tokens + float(counts[0])
    increase = (ce[1:] - ce[0]) / n_tokens
    by_head, by_mlp = increase[: L * N].reshape(L, N), increase[L * N :]
    numbers = {'ce': float(ce[0]) / n_tokens, 'tokens': n_tokens}
    for name, values in (('head', by_head), ('mlp', by_mlp)):
        if values.size:
            numbers |= {f'{name}_max': float(values.max()), f'{name}_mean': float(values.mean())}
    rows = [
        (i + 1, n, float(x)) for i, heads_N in enumerate(by_head) for n, x in enumerate(heads_N)
    ]
    heads_table = Table.from_rows(
        ('layer', 'head', INCREASE), rows, x='layer', y=INCREASE, by='head'
    )
    tables = {'Loss without each head': heads_table}
    if by_mlp.size:
        columns = {'layer': list(range(1, L + 1)), INCREASE: by_mlp.tolist()}
        tables['Loss without each MLP'] = Table(columns, x='layer', y=INCREASE)
    return SuiteResult(numbers, {}, tables)


def sum_cross_entropy(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper, collections: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the cross-entropy over targets, with interventions, and their number.

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
      collections: the interventions.
    """
    sums = token_sums(learner, learner.variables(weights) | collections, batch, hyper)
    return sums['ce'], sums['tokens']
