"""Suites: each row maps a loaded checkpoint to a `Result`.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation, lm.inference and lm.data.
"""

from eval.suites.base import Suite
from eval.suites.in_context import in_context
from eval.suites.influence import influence
from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {
    'in_context': Suite(in_context, score='squared error'),
    'influence': Suite(influence),
    'ngram': Suite(ngram),
    'perplexity': Suite(perplexity),
}
