"""Bits per byte of the bytes themselves, independent of the tokenizer."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import jax
import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult
from lm.config.mixture import split_by_source
from lm.inference.bytes import ContextFinder, ContextTree, node_log_probs, prefix_log_probs
from lm.inference.scoring import next_power_2
from modules.options import Option

MAX_DOCUMENTS = 16  # documents in a batch
MIN_COLUMNS = 2  # tokens of a segment, at least: few widths mean few programs
MAX_TOKENS = 8  # tokens of the encoding that are read at once, if no other context branches off


def bytes_(
    checkpoint: Checkpoint,
    *,
    documents: Annotated[int, Option('validation documents per source of a mixture', 1)] = 16,
    length: Annotated[int, Option('bytes read from the start of each document', 1)] = 256,
) -> SuiteResult:
    """Measures exact bits per byte, independent of the tokenizer.

    The probability of a text is summed over all token sequences that cover it, and not only the
    tokenizer's encoding (`lm.inference.bytes`). Models with different tokenizers can therefore be
    compared byte by byte. The exact number is never larger than the one from tokens
    (bits_per_byte_by_tokens). Ends of documents do not count. The model reads about one token per
    byte, and the tokenizer checks each token that could follow. Source: Phan et al. 2025
    (arXiv:2410.09303).

    Args:
      checkpoint: a loaded checkpoint.
      documents: validation documents per source.
      length: bytes read from the start of each document.
    """
    contexts = ContextFinder(checkpoint.tokenizer)
    max_tokens = checkpoint.recipe.data.seq_len
    names, trees = [], []
    for source, rows in split_by_source(open_data(checkpoint).validation).items():
        texts = (checkpoint.tokenizer.decode(tokens.tolist()) for tokens in rows.documents())
        beginnings = (text for text in (_truncate_text(text, length) for text in texts) if text)
        for i, text in enumerate(itertools.islice(beginnings, documents)):
            names.append(f'{source}/{i}' if source else f'{i}')
            trees.append(_fit_tree(contexts, text, max_tokens))
    bits, token_bits = [], []
    for tree, log_ps in zip(trees, score_trees(checkpoint, trees), strict=True):
        bits.append(-prefix_log_probs(tree, log_ps)[-1] / math.log(2))
        token_bits.append(-node_log_probs(tree, log_ps)[tree.trunk[-1]] / math.log(2))
    n_bytes = [len(tree.text) for tree in trees]
    return SuiteResult(
        {
            'bits_per_byte': sum(bits) / sum(n_bytes),
            'bits_per_byte_by_tokens': sum(token_bits) / sum(n_bytes),
            'bytes': sum(n_bytes),
            'documents': len(trees),
            'contexts': sum(len(tree.parents) for tree in trees),
        },
        items={'item': names, 'bits': bits, 'bits_by_tokens': token_bits, 'bytes': n_bytes},
    )


def _truncate_text(text: str, length: int) -> bytes:
    # Cuts before a character that does not fit.
    return text.encode()[:length].decode('utf-8', 'ignore').encode()


def _fit_tree(contexts: ContextFinder, text: bytes, max_tokens: int) -> ContextTree:
    """Returns the tree of a text, or of its longest prefix with contexts that fit.

    A context has fewer than `max_tokens` tokens, since BOS precedes it.
    """
    while True:
        tree = contexts.build_tree(text)
        too_deep = np.array(tree.ends)[tree.depths() >= max_tokens]
        if not len(too_deep):
            return tree
        text = _truncate_text(text.decode(), int(too_deep.min()) - 1)


class TreeSegment(NamedTuple):
    """Tokens that are read in a single call, after the tokens in the cache, and their nodes."""

    tokens: list[int]
    nodes: list[int]
    is_cached: bool  # whether the tokens stay in the cache


def score_trees(checkpoint: Checkpoint, trees: Sequence[ContextTree]) -> Iterator[list[np.ndarray]]:
    """Yields for each tree the log probabilities of the tokens that may follow each node.

    This is the argument of `prefix_log_probs`. The tokenizer's encoding is read into a cache, each
    token once. Other contexts are read after the part of it that they share, and are not cached.
    """
    depth = 1 + max((int(tree.depths().max()) for tree in trees), default=0)
    capacity = min(next_power_2(depth), checkpoint.recipe.data.seq_len)
    size = min(MAX_DOCUMENTS, next_power_2(max(1, len(trees))))

    @jax.jit
    def log_softmax(logits_BTV):
        return jax.nn.log_softmax(logits_BTV.astype('float32'))

    for start in range(0, len(trees), size):
        group = trees[start : start + size]
        parts = [split_tree(tree, checkpoint.tokenizer.bos_id) for tree in group]
        log_probs = [[np.zeros(0)] * len(tree.parents) for tree in group]
        cache = checkpoint.init_cache(size, capacity)
        while any(parts):
            # Branches are read before the cache grows beyond the node where they start.
            for is_cached in (False, True):
                due = {
                    r: queue.pop(0)
                    for r, queue in enumerate(parts)
                    if queue and queue[0][2] == is_cached
                }
                if not due:
                    continue
                max_length = max(len(part.tokens) for part in due.values())
                # Only two widths, or few more, since each width is a separate program.
                width = (
                    MIN_COLUMNS
                    if max_length <= MIN_COLUMNS
                    else next_power_2(max(max_length, MAX_TOKENS))
                )
                tokens_BT, counts_B = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
                for r, part in due.items():
                    counts_B[r] = len(part.tokens)
                    tokens_BT[r, : counts_B[r]] = part.tokens
                # `extend` is jitted and takes NumPy arrays.
                logits_BTV, after = checkpoint.extend(
                    cache,
                    tokens_BT,  # ty: ignore[invalid-argument-type]
                    counts_B,  # ty: ignore[invalid-argument-type]
                )
                cache = after if is_cached else cache
                log_p_BTV = jax.device_get(log_softmax(logits_BTV))
                for r, part in due.items():
                    for column, node in enumerate(part.nodes):
                        log_probs[r][node] = log_p_BTV[
                            r, column, group[r].next_tokens[node]
                        ].astype(np.float64)
        yield from log_probs


def split_tree(tree: ContextTree, bos_id: int) -> list[TreeSegment]:
    """Returns segments that contain each node of a tree at least once."""
    trunk_index = dict(zip(tree.trunk, range(len(tree.trunk)), strict=True))
    has_child = set(tree.parents) | {tree.trunk[-1]}
    branches: dict[int, list[TreeSegment]] = {}
    for node in range(len(tree.parents)):
        if node in trunk_index or node in has_child:
            continue
        path = [node]
        while (parent := tree.parents[path[0]]) not in trunk_index:
            path.insert(0, parent)
        part = TreeSegment([tree.tokens[n] for n in path], path, is_cached=False)
        branches.setdefault(parent, []).append(part)
    parts = [TreeSegment([bos_id], [0], is_cached=True)]
    for node in tree.trunk[1:]:
        parts += branches.get(tree.parents[node], [])
        if not parts[-1].is_cached or len(parts[-1].tokens) == MAX_TOKENS:
            parts.append(TreeSegment([], [], is_cached=True))
        parts[-1].tokens.append(tree.tokens[node])
        parts[-1].nodes.append(node)
    return parts + branches.get(tree.trunk[-1], [])
