"""Factors between the weights of a file and its logits, which our models have in their weights.

Gemma has the scalar of its queries, Granite the multipliers of muP: of embeddings, of attention, of
what a block adds to the stream, and a divisor of logits.
"""

import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from eval.convert.hf_config import (
    ATTENTION_FACTOR,
    BRANCH_FACTOR,
    EMBEDDING_FACTOR,
    LOGIT_DIVISOR,
    QUERY_SCALAR,
)
from lm.config.recipe import Recipe

EMBEDDING, READOUT, GAIN = 'embedding', 'readout', 'final_norm/scale'
STREAM_WRITERS = ('/out', '/out_bias', '/down', '/down_bias')


def list_factors(
    fields: Mapping[str, Any], recipe: Recipe, shapes: Mapping[str, Any]
) -> dict[str, float]:
    """Returns {path: factor} of the parameters that are the file's times a factor.

    Args:
      fields: of the model, as its family reads them.
      recipe: of the model.
      shapes: of its parameters, by path.
    """
    factors, embedding = {}, fields.get(EMBEDDING_FACTOR, 1.0)
    # Our models divide logits by sqrt(head_dim), theirs by sqrt(scalar): queries absorb the ratio.
    scalar, attention = fields.get(QUERY_SCALAR, recipe.head_dim), fields.get(ATTENTION_FACTOR)
    ratio = math.sqrt(recipe.head_dim / scalar)
    if attention is not None:
        ratio *= attention * math.sqrt(scalar)
    factors |= dict.fromkeys(query_paths(shapes), ratio)
    factors |= {
        path: fields.get(BRANCH_FACTOR, 1.0) for path in shapes if path.endswith(STREAM_WRITERS)
    }
    # A tied readout has the factor of embeddings too, and the last gain takes it out again.
    is_tied = recipe.model.tie_embeddings
    factors[EMBEDDING] = embedding
    factors[GAIN if is_tied else READOUT] = 1 / fields.get(LOGIT_DIVISOR, 1.0)
    if is_tied:
        factors[GAIN] /= embedding
    return {path: factor for path, factor in factors.items() if factor != 1}


def query_paths(paths: Container[str]) -> list[str]:
    """Returns the parameters that scale the logits of attention.

    These are the gain of the norm of queries, or else the query matrix and its bias.
    """
    gain = 'layers/attention/query_norm/scale'
    matrix = 'layers/attention/query'
    return [
        path for path in ((gain,) if gain in paths else (matrix, f'{matrix}_bias')) if path in paths
    ]


def scale_queries(params: dict[str, np.ndarray], factor: float) -> None:
    """Multiplies the logits of attention by a factor, through the parameters of `query_paths`."""
    for path in query_paths(params):
        params[path] = (params[path] * factor).astype(np.float32)
