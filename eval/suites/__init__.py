"""Suites: each row maps a loaded checkpoint to a dict of numbers.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation and lm.data.
"""

from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {'ngram': ngram, 'perplexity': perplexity}
