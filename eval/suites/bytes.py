"""Bits per byte of the bytes themselves, whatever the tokenizer makes of them."""

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

MAX_DOCUMENTS = 16  # documents that are read side by side
MIN_COLUMNS = 2  # columns of a part that is read: few widths, few programs
MAX_TOKENS = 8  # tokens of the encoding that are read at once where no other context branches off


def bytes_(
    checkpoint: Checkpoint,
    *,
    documents: Annotated[int, Option('validation documents, of each source of a mixture', 1)] = 16,
    length: Annotated[int, Option('bytes of each, from its beginning', 1)] = 256,
) -> SuiteResult:
    """bits_per_byte by exact probabilities of bytes, and by tokens on the same text.

    The probability of a text sums over all its covers, not over the tokenizer's encoding alone
    (`lm.inference.bytes`), so that models with different tokenizers compare byte by byte. By bytes
    there are never more bits than by tokens. Ends of documents are not counted. One token is read
    for about each byte, and the tokenizer asked about each token that could follow. Source: Phan et
    al. 2025 (arXiv:2410.09303).
    """
    covers = ContextFinder(checkpoint.tokenizer)
    most = checkpoint.recipe.data.seq_len
    names, trees = [], []
    for source, rows in split_by_source(open_data(checkpoint).validation).items():
        texts = (checkpoint.tokenizer.decode(tokens.tolist()) for tokens in rows.documents())
        begun = (text for text in (_truncate_text(text, length) for text in texts) if text)
        for i, text in enumerate(itertools.islice(begun, documents)):
            names.append(f'{source}/{i}' if source else f'{i}')
            trees.append(_fit_tree(covers, text, most))
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
    return text.encode()[:length].decode('utf-8', 'ignore').encode()


def _fit_tree(covers: ContextFinder, text: bytes, max_tokens: int) -> ContextTree:
    """Returns the tree of a text, or of as much of it as has contexts of fewer than `most` tokens:
    BOS comes before them.
    """
    while True:
        tree = covers.build_tree(text)
        too_deep = np.array(tree.ends)[tree.depths() >= max_tokens]
        if not len(too_deep):
            return tree
        text = _truncate_text(text.decode(), int(too_deep.min()) - 1)


class TreeSegment(NamedTuple):
    """Tokens that are read in one go, behind those that the cache holds, and their nodes."""

    tokens: list[int]
    nodes: list[int]
    is_cached: bool  # whether the cache is to hold them


def score_trees(checkpoint: Checkpoint, trees: Sequence[ContextTree]) -> Iterator[list[np.ndarray]]:
    """Yields of each tree what `prefix_log_probs` takes: log p of what may follow each node.

    The tokenizer's own encoding is read into a cache, each token once; other contexts are read
    behind the part of it that they share, and forgotten.
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
        found = [[np.zeros(0)] * len(tree.parents) for tree in group]
        cache = checkpoint.init_cache(size, capacity)
        while any(parts):
            for is_kept in (False, True):
                now = {r: own.pop(0) for r, own in enumerate(parts) if own and own[0][2] == is_kept}
                if not now:
                    continue
                longest = max(len(part.tokens) for part in now.values())
                width = (
                    MIN_COLUMNS
                    if longest <= MIN_COLUMNS
                    else next_power_2(max(longest, MAX_TOKENS))
                )
                tokens_BT, counts_B = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
                for r, part in now.items():
                    counts_B[r] = len(part.tokens)
                    tokens_BT[r, : counts_B[r]] = part.tokens
                logits_BTV, after = checkpoint.extend(cache, tokens_BT, counts_B)
                cache = after if is_kept else cache
                log_p_BTV = jax.device_get(log_softmax(logits_BTV))
                for r, part in now.items():
                    for column, node in enumerate(part.nodes):
                        found[r][node] = log_p_BTV[r, column, group[r].next_tokens[node]].astype(
                            np.float64
                        )
        yield from found


def split_tree(tree: ContextTree, bos_id: int) -> list[TreeSegment]:
    """Returns in what parts the nodes of a tree are read, each node at least once."""
    on_trunk = dict(zip(tree.trunk, range(len(tree.trunk)), strict=True))
    has_child = set(tree.parents) | {tree.trunk[-1]}
    branches: dict[int, list[TreeSegment]] = {}
    for node in range(len(tree.parents)):
        if node in on_trunk or node in has_child:
            continue
        path = [node]
        while (parent := tree.parents[path[0]]) not in on_trunk:
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
