"""Loss on the validation split the run held out."""

import functools

from eval.load import Checkpoint, open_data
from eval.suites.base import Result
from lm import data
from lm.devices.mesh import batch_parts
from lm.devices.shardings import jit_eval_step
from lm.run.evaluate import evaluate


def perplexity(checkpoint: Checkpoint) -> Result:
    """validation_ce in nats per token, bits_per_byte, and perplexity = exp(validation_ce).

    The whole validation split counts, every token once, with at most data.seq_len of context. For a
    mixture these are means over its sources, weighted by data.mixture, and each has its own ce.
    """
    c = checkpoint
    rows = open_data(c).validation
    eval_step = jit_eval_step(c.learner, c.mesh)
    parts = batch_parts(c.mesh)
    batch_size = -(-(c.recipe.data.batch_size // c.recipe.train.microbatches) // parts) * parts
    batches = functools.partial(data.evaluation_batches, batch_size=batch_size, limit=0)
    losses = evaluate(eval_step, c.weights, c.hyper, c.mesh, batches, rows)
    return Result(losses | {'tokens': rows.n_tokens, 'bytes': rows.n_bytes})
