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
from lm.model.base_size import base_head_dim
from lm.model.pattern import Stack, block_stacks

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
    factors |= dict.fromkeys(query_paths(shapes, recipe), ratio)
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


def query_paths(paths: Container[str], recipe: Recipe) -> list[str]:
    """Returns the parameters that scale the logits of attention.

    These are the gain of the norm of queries, or else the query matrix and its bias.

    Args:
      paths: of the parameters.
      recipe: of the model.
    """
    scaling = []
    for stack in block_stacks(recipe):
        if stack.recipe.attention.row.has_scores:
            scaling += _query_paths(paths, stack)
    return scaling


def _query_paths(paths: Container[str], stack: Stack) -> list[str]:
    """Returns the parameters of a stack of blocks that scale its logits."""
    gain, matrix = (f'{stack.path}/attention/{name}' for name in ('query_norm/scale', 'query'))
    candidates = (gain,) if gain in paths else (matrix, f'{matrix}_bias')
    return [path for path in candidates if path in paths]


def scale_queries(params: dict[str, np.ndarray], recipe: Recipe) -> None:
    """Multiplies the logits of attention, which muP divides by H, so that sqrt(H) divides them.

    Args:
      params: by path; changed in place.
      recipe: of the model.
    """
    for stack in block_stacks(recipe):
        kind = stack.recipe
        head_dim, base = kind.head_dim, base_head_dim(kind)
        if not kind.attention.row.has_scores:
            continue
        if kind.attention.options.get('logit_scale') == 'mup':
            factor = 1 / math.sqrt(head_dim)
        elif base not in (None, head_dim):
            factor = math.sqrt(base / head_dim)
        else:
            continue
        for path in _query_paths(params, stack):
            params[path] = (params[path] * factor).astype(np.float32)
