"""Suites: each row maps a loaded checkpoint to a dict of numbers."""

from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity

SUITES = {'ngram': ngram, 'perplexity': perplexity}
