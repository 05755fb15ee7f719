"""Reads checkpoints and run records. `from eval import perplexity`; a bare import would hide
eval().

Each row of `SUITES` maps a loaded checkpoint to a dict of numbers.
"""

from eval.ngram import ngram
from eval.perplexity import perplexity

SUITES = {'ngram': ngram, 'perplexity': perplexity}
