"""Suites: each row maps a loaded checkpoint to a `Result`.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation, lm.inference and lm.data.
"""

from eval.suites.base import Suite
from eval.suites.bytes import bytes_
from eval.suites.harness import harness
from eval.suites.minimal_pairs import minimal_pairs
from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {
    'bytes': Suite(bytes_, score='bits', weight='bytes'),
    'harness': Suite(harness, argument='tasks', score='value', lower_is_better=False),
    'minimal_pairs': Suite(minimal_pairs, argument='path', score='is_right', lower_is_better=False),
    'ngram': Suite(ngram),
    'perplexity': Suite(perplexity),
}
