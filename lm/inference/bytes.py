"""Exact probabilities of bytes under a model of tokens, as sums over covers.

A text x can begin in many ways: its covers are the sequences of tokens that a tokenizer gives for
some text, whose bytes begin with x, and whose last token alone reaches the end of x. Then

    P(x) = sum over covers t of P(t),    P(next byte b | x) = P(x b) / P(x).

All of a cover but its last token is an encoding of a part of x, and a tokenizer has about one for
each part: a tree of contexts, with a node a byte. Source: Phan et al. 2025 (arXiv:2410.09303).
"""

import bisect
import codecs
import dataclasses
import itertools
import json
from collections.abc import Sequence

import numpy as np

from lm.data.tokenizers import BYTES, CUT, ByteTokenizer, SubwordTokenizer, Tokenizer

# Text that may follow, of each kind that a tokenizer's pattern tells apart: which tokens it gives
# for a part can depend on what comes next, as whether a run of spaces ends the text.
NEXT_TEXTS = (b'', b'a', b'0', b'.', b' ', b'\n')
# Bytes that may complete a character, letters and signs.
CONTINUATIONS = (0x80, 0x97, 0xA5, 0xBF)
UNSUPPORTED = (
    'bytes have probabilities under a tokenizer that gives back every byte of a text: byte, '
    'bpe:SIZE, or an hf:PATH that is byte-level, as those of GPT-2, Llama 3 and Qwen are.'
)

WordTokens = tuple[int, ...]  # tokens since a place where the tokenizer always cuts


@dataclasses.dataclass(frozen=True)
class ContextTree:
    """The contexts of a text: sequences of tokens, each its parent's with one more.

    A parent comes before its children, and node 0 has no tokens.
    """

    text: bytes
    parents: Sequence[int]  # of each node
    tokens: Sequence[int]  # the last one of each node, -1 of node 0
    ends: Sequence[int]  # how many bytes of the text the node's tokens have
    #: Of each node, the tokens that may follow and agree with the rest of the text, and how many
    #: bytes of that each of them has.
    next_tokens: Sequence[np.ndarray]
    matched_bytes: Sequence[np.ndarray]
    trunk: Sequence[int]  # nodes of the tokenizer's own encoding of the text, from node 0 on

    def depths(self) -> np.ndarray:
        """Returns how many tokens each node has."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return np.array(depths)


class ContextFinder:
    """Finds the contexts of texts under a tokenizer, and the tokens that may follow them."""

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError for a tokenizer that does not give back the bytes of a text."""
        self._tokenizer = tokenizer
        self.token_bytes = spell_vocabulary(tokenizer)
        self._tokens_by_first_byte: dict[int, list[int]] = {}
        for token, spelt in enumerate(self.token_bytes):
            if spelt:
                self._tokens_by_first_byte.setdefault(spelt[0], []).append(token)
        self._encodings: dict[bytes, list[WordTokens]] = {}
        self._valid_next: dict[tuple[WordTokens, int], np.ndarray] = {}

    def build_tree(self, text: bytes, open_ended: bool = False) -> ContextTree:
        """Returns the contexts of a text, which may end within a character.

        Args:
          text: bytes that begin a text in UTF-8.
          ahead: whether all that may follow the text is wanted, for `next_bytes`.
        """
        cuts = self._cut_positions(text)
        parents, tokens, ends, locals_ = [-1], [-1], [0], [()]
        trunk = [0]
        for start, stop in itertools.pairwise([*cuts, len(text)] if text else [0]):
            word = text[start:stop]
            own = self._encode([word])[0] or max(
                self._word_encodings(word), key=lambda c: len(self._spell(c))
            )
            base, nodes = trunk[-1], {(): trunk[-1]}
            locals_[base] = ()
            for local in self._word_encodings(word):
                nodes[local] = len(parents)
                parents.append(nodes[local[:-1]])
                tokens.append(local[-1])
                ends.append(ends[parents[-1]] + len(self.token_bytes[local[-1]]))
                locals_.append(local)
            trunk += [nodes[own[:n]] for n in range(1, len(own) + 1)]
        following, matched = [], []
        children = {}
        for node in range(1, len(parents)):
            children.setdefault(parents[node], []).append(tokens[node])
        for node, (end, local) in enumerate(zip(ends, locals_, strict=True)):
            rest = text[end:]
            firsts = [rest[0]] if rest else sorted(self._tokens_by_first_byte) if open_ended else []
            valid = [self._find_next_tokens(local, first) for first in firsts]
            ids = np.unique(np.concatenate([*valid, children.get(node, [])]).astype(np.int64))
            counts = np.array(
                [common_prefix_length(self.token_bytes[i], rest) for i in ids.tolist()], np.int64
            )
            following.append(ids)
            matched.append(counts)
        return ContextTree(text, parents, tokens, ends, following, matched, trunk)

    def _cut_positions(self, text: bytes) -> list[int]:
        """Returns the places between bytes at which the tokenizer always cuts the text, and 0."""
        if not self._tokenizer.cuttable:
            return [0]
        characters = text.decode('utf-8', 'ignore')
        sizes = np.cumsum([0] + [len(character.encode()) for character in characters])
        return [0, *(int(sizes[match.end()]) for match in CUT.finditer(characters))]

    def _word_encodings(self, word: bytes) -> list[WordTokens]:
        """Returns the encodings of each part of a word from its beginning, shorter ones first."""
        if word not in self._encodings:
            ends = range(1, len(word) + 1)
            texts = [
                (end, word[:end] + more) for end in ends for more in list_continuations(word[:end])
            ]
            texts.append((len(word), word))
            found = set()
            encoded = self._encode([text for _, text in texts])
            for (end, _), tokens in zip(texts, encoded, strict=True):
                reached = np.cumsum([len(self.token_bytes[token]) for token in tokens])
                kept = bisect.bisect_right(reached, end)
                found.update(tokens[:n] for n in range(1, kept + 1))
            self._encodings[word] = sorted(found, key=len)
        return self._encodings[word]

    def _find_next_tokens(self, local: WordTokens, first: int) -> np.ndarray:
        """Returns the tokens, of those whose first byte is `first`, that some text has next."""
        if (local, first) not in self._valid_next:
            before = self._spell(local)
            waiting = {
                token: list_continuations(before + self.token_bytes[token])
                for token in self._tokens_by_first_byte.get(first, ())
            }
            valid = []
            for turn in range(max(map(len, waiting.values()), default=0)):
                asked = {token: more[turn] for token, more in waiting.items() if turn < len(more)}
                texts = [before + self.token_bytes[token] + more for token, more in asked.items()]
                encoded = self._encode(texts)
                for token, tokens in zip(asked, encoded, strict=True):
                    if tokens[: len(local) + 1] == (*local, token):
                        valid.append(token)
                        del waiting[token]
            self._valid_next[local, first] = np.array(valid, np.int64)
        return self._valid_next[local, first]

    def _spell(self, tokens: WordTokens) -> bytes:
        return b''.join(self.token_bytes[token] for token in tokens)

    def _encode(self, texts: Sequence[bytes]) -> list[WordTokens]:
        """Returns the tokens of each text, none for one that is not UTF-8."""
        characters = [text.decode('utf-8', 'ignore') for text in texts]
        encoded = self._tokenizer.encode_batch(characters)
        whole = [len(c.encode()) == len(text) for c, text in zip(characters, texts, strict=True)]
        return [tuple(e.tolist()) if w else () for e, w in zip(encoded, whole, strict=True)]


def spell_vocabulary(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes of each token; none for BOS, EOS and ids that no text gives.

    Raises ValueError for a tokenizer whose tokens do not spell the text.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([i]) if i < BYTES else b'' for i in range(tokenizer.vocab_size)]
    if not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError(f'{UNSUPPORTED} Here texts are token ids.')
    library = tokenizer.library
    decoder = json.loads(library.to_str())['decoder'] or {}
    kinds = {one['type'] for one in (decoder, *decoder.get('decoders', ())) if one}
    if 'ByteLevel' not in kinds:
        raise ValueError(
            f'{UNSUPPORTED} This one decodes by {", ".join(sorted(kinds)) or "nothing"}.'
        )
    alphabet = byte_alphabet()
    added = library.get_added_tokens_decoder()
    found = [b''] * tokenizer.vocab_size
    for spelt, token in library.get_vocab(with_added_tokens=True).items():
        if token in added:
            found[token] = b'' if added[token].special else spelt.encode()
        elif all(character in alphabet for character in spelt):
            found[token] = bytes(alphabet[character] for character in spelt)
    for text in ('a', ' a') if b' ' in found else ():
        if b''.join(found[token] for token in tokenizer.encode(text)) != text.encode():
            raise ValueError(f'{UNSUPPORTED} This one spells {text!r} otherwise.')
    return found


def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, are the
    characters from U+0100 on.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def list_continuations(prefix: bytes) -> list[bytes]:
    """Returns what may follow bytes that begin a text; nothing where they begin none in UTF-8."""
    decoder = codecs.getincrementaldecoder('utf-8')()
    try:
        decoder.decode(prefix)
    except UnicodeDecodeError:
        return []
    pending = decoder.getstate()[0]
    if not pending:
        return list(NEXT_TEXTS)
    size = 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4
    rests = map(bytes, itertools.product(CONTINUATIONS, repeat=size - len(pending)))
    return [rest for rest in rests if (pending + rest).decode('utf-8', 'ignore')]


def common_prefix_length(a: bytes, b: bytes) -> int:
    """Returns the length of the longest common beginning."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def node_log_probs(tree: ContextTree, log_ps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns log P of the tokens of each node.

    log_ps: of each node, log p of the tokens in `tree.following`, given the node's tokens.
    """
    weights = np.zeros(len(tree.parents))
    for node in range(1, len(weights)):
        parent = tree.parents[node]
        place = np.searchsorted(tree.next_tokens[parent], tree.tokens[node])
        weights[node] = weights[parent] + log_ps[parent][place]
    return weights


def prefix_log_probs(tree: ContextTree, log_ps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns log P(x_1..x_n) of the first n bytes of the text, for n = 0, 1, ..., its length.

    log_ps: as `log_weights` takes them.
    """
    weights = node_log_probs(tree, log_ps)
    totals = np.full(len(tree.text) + 1, -np.inf)
    totals[0] = 0.0
    for node, (end, matched) in enumerate(zip(tree.ends, tree.matched_bytes, strict=True)):
        order = np.argsort(-matched)
        masses = np.logaddexp.accumulate(log_ps[node][order]) if len(order) else []
        for n in range(1, int(matched.max(initial=0)) + 1):  # tokens with n bytes of the rest
            reaching = masses[np.searchsorted(-matched[order], -n, side='right') - 1]
            totals[end + n] = np.logaddexp(totals[end + n], weights[node] + reaching)
    return totals


def next_byte_probs(
    tree: ContextTree, log_ps: Sequence[np.ndarray], token_bytes: Sequence[bytes]
) -> np.ndarray:
    """Returns P(next byte | the text) [256]; what is missing to 1 ends the document, or goes to
    sequences that the tokenizer never gives.

    Args:
      tree: made with `ahead`.
      log_ps: as `log_weights` takes them.
      spelt: `ContextFinder.spelling`.
    """
    weights, whole = node_log_probs(tree, log_ps), len(tree.text)
    found = np.full(BYTES, -np.inf)
    for node, end in enumerate(tree.ends):
        rest = whole - end
        for token, matched, log_p in zip(
            tree.next_tokens[node].tolist(), tree.matched_bytes[node], log_ps[node], strict=True
        ):
            if matched == rest < len(token_bytes[token]):
                byte = token_bytes[token][rest]
                found[byte] = np.logaddexp(found[byte], weights[node] + log_p)
    return np.exp(found - prefix_log_probs(tree, log_ps)[-1])
