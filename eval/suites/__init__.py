"""Suites: each row maps a loaded checkpoint to a `Result`.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation, lm.inference and lm.data.
"""

import math

from eval.suites.base import Suite
from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {
    'ngram': Suite(ngram),
    'perplexity': Suite(
        perplexity,
        argument='stride',
        score='nats',
        weight='bytes',
        unit='bits per byte',
        scale=1 / math.log(2),
        counted='documents',
    ),
}
