"""Exact probabilities of bytes under a model of tokens, as sums over covers.

A cover of a text x is a sequence of tokens that a tokenizer gives for some text that begins with x.
Only its last token reaches the end of x. Then

    P(x) = sum over covers t of P(t),    P(next byte b | x) = P(x b) / P(x).

All tokens of a cover but the last encode a prefix of x, and a tokenizer has about one encoding for
each prefix. So the covers form a tree of contexts, with one node per byte. Source: Phan et al. 2025
(arXiv:2410.09303).
"""

import bisect
import codecs
import dataclasses
import itertools
import json
from collections.abc import Sequence

import numpy as np

from lm.data.tokenizers import BYTES, CUT, ByteTokenizer, SubwordTokenizer, Tokenizer

# Possible continuations, one for each class that a tokenizer's pattern distinguishes: the tokens of
# a prefix can depend on the next character, for example on whether a run of spaces ends the text.
NEXT_TEXTS = (b'', b'a', b'0', b'.', b' ', b'\n')
# Bytes that may complete a character: some give letters, some give signs.
CONTINUATIONS = (0x80, 0x97, 0xA5, 0xBF)
UNSUPPORTED = (
    'bytes have probabilities only if the tokenizer reproduces every byte of a text: byte, '
    'bpe:SIZE, or a byte-level hf:PATH, such as those of GPT-2, Llama 3 and Qwen.'
)

WordTokens = tuple[int, ...]  # tokens since a position where the tokenizer always cuts


@dataclasses.dataclass(frozen=True)
class ContextTree:
    """The contexts of a text: a tree of token sequences, each its parent's with one more token.

    A parent comes before its children, and node 0 has no tokens. All fields but text and trunk have
    an entry for each node.
    """

    text: bytes
    parents: Sequence[int]
    tokens: Sequence[int]  #: the last token; -1 for node 0
    ends: Sequence[int]  #: number of bytes of the text in the node's tokens
    #: Tokens that may follow and agree with the remaining text, and how many of its bytes each has.
    next_tokens: Sequence[np.ndarray]
    matched_bytes: Sequence[np.ndarray]
    trunk: Sequence[int]  #: nodes of the tokenizer's encoding of the text, from node 0

    def depths(self) -> np.ndarray:
        """Returns the number of tokens of each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return np.array(depths)


class ContextFinder:
    """Finds the contexts of texts under a tokenizer, and the tokens that may follow them."""

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError for a tokenizer that does not reproduce the bytes of a text."""
        self._tokenizer = tokenizer
        self.token_bytes = spell_vocabulary(tokenizer)
        self._tokens_by_first_byte: dict[int, list[int]] = {}
        for token, spelling in enumerate(self.token_bytes):
            if spelling:
                self._tokens_by_first_byte.setdefault(spelling[0], []).append(token)
        self._encodings: dict[bytes, list[WordTokens]] = {}
        self._valid_next: dict[tuple[WordTokens, int], np.ndarray] = {}

    def build_tree(self, text: bytes, open_ended: bool = False) -> ContextTree:
        """Builds the tree of contexts of a text, which may end within a character.

        Args:
          text: bytes that begin a text in UTF-8.
          open_ended: whether to include every token that may follow the text, for
            `next_byte_probs`.
        """
        cuts = self._cut_positions(text)
        parents, tokens, ends = [-1], [-1], [0]
        locals_: list[WordTokens] = [()]
        trunk = [0]
        for start, stop in itertools.pairwise([*cuts, len(text)] if text else [0]):
            word = text[start:stop]
            word_tokens = self._encode([word])[0] or max(
                self._word_encodings(word), key=lambda context: len(self._spell(context))
            )
            base = trunk[-1]
            nodes: dict[WordTokens, int] = {(): base}
            locals_[base] = ()
            for local in self._word_encodings(word):
                nodes[local] = len(parents)
                parents.append(nodes[local[:-1]])
                tokens.append(local[-1])
                ends.append(ends[parents[-1]] + len(self.token_bytes[local[-1]]))
                locals_.append(local)
            trunk += [nodes[word_tokens[:n]] for n in range(1, len(word_tokens) + 1)]
        next_tokens, matched_bytes = [], []
        children = {}
        for node in range(1, len(parents)):
            children.setdefault(parents[node], []).append(tokens[node])
        for node, (end, local) in enumerate(zip(ends, locals_, strict=True)):
            tail = text[end:]
            firsts = [tail[0]] if tail else sorted(self._tokens_by_first_byte) if open_ended else []
            candidates = [self._find_next_tokens(local, first) for first in firsts]
            token_ids = np.unique(
                np.concatenate([*candidates, children.get(node, [])]).astype(np.int64)
            )
            counts = np.array(
                [common_prefix_length(self.token_bytes[i], tail) for i in token_ids.tolist()],
                np.int64,
            )
            next_tokens.append(token_ids)
            matched_bytes.append(counts)
        return ContextTree(text, parents, tokens, ends, next_tokens, matched_bytes, trunk)

    def _cut_positions(self, text: bytes) -> list[int]:
        """Returns 0 and the byte positions at which the tokenizer always cuts the text."""
        if not self._tokenizer.cuttable:
            return [0]
        characters = text.decode('utf-8', 'ignore')
        sizes = np.cumsum([0] + [len(character.encode()) for character in characters])
        return [0, *(int(sizes[match.end()]) for match in CUT.finditer(characters))]

    def _word_encodings(self, word: bytes) -> list[WordTokens]:
        """Returns the encodings of each prefix of a word, shortest first."""
        if word not in self._encodings:
            ends = range(1, len(word) + 1)
            texts = [
                (end, word[:end] + continuation)
                for end in ends
                for continuation in list_continuations(word[:end])
            ]
            texts.append((len(word), word))
            encodings = set()
            token_lists = self._encode([text for _, text in texts])
            for (end, _), tokens in zip(texts, token_lists, strict=True):
                ends_T = np.cumsum([len(self.token_bytes[token]) for token in tokens])
                n_reached = bisect.bisect_right(ends_T, end)
                encodings.update(tokens[:n] for n in range(1, n_reached + 1))
            self._encodings[word] = sorted(encodings, key=len)
        return self._encodings[word]

    def _find_next_tokens(self, local: WordTokens, first: int) -> np.ndarray:
        """Returns the tokens with first byte `first` that follow `local` in the encoding of some
        text.
        """
        if (local, first) not in self._valid_next:
            before = self._spell(local)
            untried = {
                token: list_continuations(before + self.token_bytes[token])
                for token in self._tokens_by_first_byte.get(first, ())
            }
            next_tokens = []
            for attempt in range(max(map(len, untried.values()), default=0)):
                continuations = {
                    token: texts_after[attempt]
                    for token, texts_after in untried.items()
                    if attempt < len(texts_after)
                }
                texts = [
                    before + self.token_bytes[token] + continuation
                    for token, continuation in continuations.items()
                ]
                encodings = self._encode(texts)
                for token, tokens in zip(continuations, encodings, strict=True):
                    if tokens[: len(local) + 1] == (*local, token):
                        next_tokens.append(token)
                        del untried[token]
            self._valid_next[local, first] = np.array(next_tokens, np.int64)
        return self._valid_next[local, first]

    def _spell(self, tokens: WordTokens) -> bytes:
        """Returns the bytes of tokens."""
        return b''.join(self.token_bytes[token] for token in tokens)

    def _encode(self, texts: Sequence[bytes]) -> list[WordTokens]:
        """Returns the tokens of each text, none for a text that is not UTF-8."""
        prefixes = [text.decode('utf-8', 'ignore') for text in texts]
        encodings = self._tokenizer.encode_batch(prefixes)
        are_utf8 = [
            len(characters.encode()) == len(text)
            for characters, text in zip(prefixes, texts, strict=True)
        ]
        return [
            tuple(tokens.tolist()) if is_utf8 else ()
            for tokens, is_utf8 in zip(encodings, are_utf8, strict=True)
        ]


def spell_vocabulary(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes of each token; b'' for BOS, EOS and ids that no text contains.

    Raises ValueError for a tokenizer whose tokens do not spell the text.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([i]) if i < BYTES else b'' for i in range(tokenizer.vocab_size)]
    if not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError(f'{UNSUPPORTED} Texts of this model are token ids.')
    library = tokenizer.library
    decoder = json.loads(library.to_str())['decoder'] or {}
    kinds = {config['type'] for config in (decoder, *decoder.get('decoders', ())) if config}
    if 'ByteLevel' not in kinds:
        raise ValueError(
            f'{UNSUPPORTED} This one has the decoders {", ".join(sorted(kinds)) or "none"}.'
        )
    alphabet = byte_alphabet()
    added = library.get_added_tokens_decoder()
    token_bytes = [b''] * tokenizer.vocab_size
    for spelling, token in library.get_vocab(with_added_tokens=True).items():
        if token >= tokenizer.vocab_size:
            continue  # the model has no row for it
        if token in added:
            token_bytes[token] = b'' if added[token].special else spelling.encode()
        elif all(character in alphabet for character in spelling):
            token_bytes[token] = bytes(alphabet[character] for character in spelling)
    for text in ('a', ' a') if b' ' in token_bytes else ():
        if b''.join(token_bytes[token] for token in tokenizer.encode(text)) != text.encode():
            raise ValueError(f'{UNSUPPORTED} This one changes the text {text!r}.')
    return token_bytes


def byte_alphabet() -> dict[str, int]:
    """Returns the byte for each character of a byte-level vocabulary (GPT-2's table).

    Printable characters of Latin-1 represent themselves. The other bytes, in order, are represented
    by the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(BYTES) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(unprintable)
    }


def list_continuations(prefix: bytes) -> list[bytes]:
    """Returns bytes that may follow a prefix; none if no text in UTF-8 begins with the prefix."""
    decoder = codecs.getincrementaldecoder('utf-8')()
    try:
        decoder.decode(prefix)
    except UnicodeDecodeError:
        return []
    pending = decoder.getstate()[0]
    if not pending:
        return list(NEXT_TEXTS)
    size = 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4
    endings = map(bytes, itertools.product(CONTINUATIONS, repeat=size - len(pending)))
    return [ending for ending in endings if (pending + ending).decode('utf-8', 'ignore')]


def common_prefix_length(a: bytes, b: bytes) -> int:
    """Returns the length of the longest common prefix."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def node_log_probs(tree: ContextTree, log_ps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns log P of the tokens of each node.

    log_ps: for each node, log p of `tree.next_tokens` given the node's tokens.
    """
    weights = np.zeros(len(tree.parents))
    for node in range(1, len(weights)):
        parent = tree.parents[node]
        place = np.searchsorted(tree.next_tokens[parent], tree.tokens[node])
        weights[node] = weights[parent] + log_ps[parent][place]
    return weights


def prefix_log_probs(tree: ContextTree, log_ps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns log P(x_1..x_n) of the first n bytes of the text, for n = 0, 1, ..., its length.

    log_ps: as in `node_log_probs`.
    """
    weights = node_log_probs(tree, log_ps)
    totals = np.full(len(tree.text) + 1, -np.inf)
    totals[0] = 0.0
    for node, (end, n_matched) in enumerate(zip(tree.ends, tree.matched_bytes, strict=True)):
        order = np.argsort(-n_matched)
        log_masses = np.logaddexp.accumulate(log_ps[node][order]) if len(order) else []
        for n in range(1, int(n_matched.max(initial=0)) + 1):  # tokens that match n more bytes
            log_mass = log_masses[np.searchsorted(-n_matched[order], -n, side='right') - 1]
            totals[end + n] = np.logaddexp(totals[end + n], weights[node] + log_mass)
    return totals


def next_byte_probs(
    tree: ContextTree, log_ps: Sequence[np.ndarray], token_bytes: Sequence[bytes]
) -> np.ndarray:
    """Returns P(next byte | the text) [256].

    The sum may be below 1: the remainder ends the document, or belongs to token sequences that the
    tokenizer never gives.

    Args:
      tree: built with `open_ended`.
      log_ps: as in `node_log_probs`.
      token_bytes: `ContextFinder.token_bytes`.
    """
    weights, length = node_log_probs(tree, log_ps), len(tree.text)
    log_probs = np.full(BYTES, -np.inf)
    for node, end in enumerate(tree.ends):
        n_left = length - end
        for token, n_matched, log_p in zip(
            tree.next_tokens[node].tolist(), tree.matched_bytes[node], log_ps[node], strict=True
        ):
            if n_matched == n_left < len(token_bytes[token]):
                byte = token_bytes[token][n_left]
                log_probs[byte] = np.logaddexp(log_probs[byte], weights[node] + log_p)
    return np.exp(log_probs - prefix_log_probs(tree, log_ps)[-1])
