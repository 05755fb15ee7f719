"""Reads checkpoints and run records. `from eval import perplexity`; a bare import would hide
eval().

Each row of `SUITES` maps a loaded checkpoint to a dict of numbers.
"""

from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {'ngram': ngram, 'perplexity': perplexity}
