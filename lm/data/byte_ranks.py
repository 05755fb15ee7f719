"""Vocabularies of byte pairs by rank: tiktoken's files, and tekken.json of Mistral.

Such a file lists tokens as bytes, in the order in which they are merged: wherever two neighbours
join to a token, the pair with the smallest rank is merged first. A tiktoken file has neither the
pattern that cuts a text into words nor the special tokens; those of public vocabularies are here.
"""

import base64
import binascii
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lm.storage.files import parse_json

RANK_LINE = re.compile(rb'[A-Za-z0-9+/]+=* [0-9]+\r?\n')
Ranks = Mapping[bytes, int]

# Each cuts a text as the pattern of its encoding in tiktoken does; that one is written for speed.
GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # one line
)
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
CL100K_PATTERN, QWEN_PATTERN = _CL100K % '{1,3}', _CL100K % ''
_UPPER, _LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}'
    rf'|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}'
    r'|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


class Vocabulary(NamedTuple):
    """A vocabulary of another library as a tokenizer of `tokenizers`.

    Attributes:
      library: the tokenizer.
      bos: the spelling of the token that begins a document, if the file or its origin names one.
      eos: of the token that ends a document.
    """

    library: Any
    bos: str | None = None
    eos: str | None = None


@dataclasses.dataclass(frozen=True)
class PublicRanks:
    """The parts of a public vocabulary that its tiktoken file leaves out.

    Attributes:
      name: of the vocabulary.
      pattern: that cuts a text into words.
      specials: returns {id: spelling} of the special tokens.
      bos: the token that begins a document.
      eos: the token that ends a document.
      is_composed: whether text is brought to the form NFC first.
    """

    name: str
    pattern: str
    specials: Callable[[], dict[int, str]]
    bos: str | None
    eos: str | None
    is_composed: bool = False


def _list_o200k() -> dict[int, str]:
    reserved = {i: f'<|reserved_{i}|>' for i in range(199998, 200019)}
    return reserved | {199999: '<|endoftext|>', 200018: '<|endofprompt|>'}


def _list_cl100k() -> dict[int, str]:
    reserved = {i: f'<|reserved_{i}|>' for i in range(100256, 100277)}
    fill = {100258: '<|fim_prefix|>', 100259: '<|fim_middle|>', 100260: '<|fim_suffix|>'}
    return reserved | fill | {100257: '<|endoftext|>', 100276: '<|endofprompt|>'}


def _list_llama3() -> dict[int, str]:
    # As in Llama 3.1; ids without a use are numbered on.
    names = {0: 'begin_of_text', 1: 'end_of_text', 4: 'finetune_right_pad_id', 5: 'step_id'}
    names |= {6: 'start_header_id', 7: 'end_header_id', 8: 'eom_id', 9: 'eot_id', 10: 'python_tag'}
    unused = iter(range(256))
    return {
        128000 + i: f'<|{names.get(i) or f"reserved_special_token_{next(unused)}"}|>'
        for i in range(256)
    }


def _list_qwen() -> dict[int, str]:
    names = ['endoftext', 'im_start', 'im_end', *(f'extra_{i}' for i in range(205))]
    return {151643 + i: f'<|{name}|>' for i, name in enumerate(names)}


def _list_gpt2() -> dict[int, str]:
    return {50256: END}


END = '<|endoftext|>'
# By the SHA-256 of a file with these ranks in order, each line "TOKEN RANK\n".
PUBLIC_RANKS = {
    '306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930': PublicRanks(
        'r50k_base', GPT2_PATTERN, _list_gpt2, END, END
    ),
    '94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069': PublicRanks(
        'p50k_base', GPT2_PATTERN, _list_gpt2, END, END
    ),
    '223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7': PublicRanks(
        'cl100k_base', CL100K_PATTERN, _list_cl100k, END, END
    ),
    '446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d': PublicRanks(
        'o200k_base', O200K_PATTERN, _list_o200k, END, END
    ),
    '82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55': PublicRanks(
        'Llama 3', CL100K_PATTERN, _list_llama3, '<|begin_of_text|>', '<|end_of_text|>'
    ),
    'b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186': PublicRanks(
        'Qwen', QWEN_PATTERN, _list_qwen, END, END, is_composed=True
    ),
}


def is_rank_file(content: bytes) -> bool:
    """Whether a file begins with a line of tiktoken: a token in base64, and its rank."""
    return RANK_LINE.match(content[:4096]) is not None


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Returns {token: rank} of a tiktoken file. Raises ValueError with the number of a bad line."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b' ')
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f'line {number} is not "TOKEN RANK": {line[:60]!r}') from None
    _check_ranks(ranks)
    return ranks


def _check_ranks(ranks: Ranks) -> None:
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f'it has no token for the byte {missing[0]}, so it cannot encode every text'
        )
    if len({*ranks.values()}) < len(ranks):
        raise ValueError('two tokens have the same rank')


def digest_ranks(ranks: Ranks) -> str:
    """Returns the SHA-256 of the file that tiktoken writes of these ranks."""
    digest = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        digest.update(base64.b64encode(token) + b' %d\n' % rank)
    return digest.hexdigest()


def read_tiktoken(content: bytes) -> Vocabulary:
    """Returns the tokenizer of a public tiktoken file, known by its ranks.

    Raises:
      ValueError: for ranks that are not known here, since the file lacks pattern and specials.
    """
    ranks = parse_ranks(content)
    if (public := PUBLIC_RANKS.get(digest_ranks(ranks))) is None:
        names = ', '.join(entry.name for entry in PUBLIC_RANKS.values())
        raise ValueError(
            f'its {len(ranks):,} ranks are not those of {names}; for other ranks, the file lacks '
            'the pattern that cuts text into words, and the special tokens'
        )
    import tokenizers

    library = build_tokenizer(ranks, public.pattern, public.specials())
    if public.is_composed:
        library.normalizer = tokenizers.normalizers.NFC()
    return Vocabulary(library, public.bos, public.eos)


TEKKEN_SPECIALS = (  # of files up to version 7, which do not list them
    *('<unk>', '<s>', '</s>', '[INST]', '[/INST]', '[AVAILABLE_TOOLS]', '[/AVAILABLE_TOOLS]'),
    *('[TOOL_RESULTS]', '[/TOOL_RESULTS]', '[TOOL_CALLS]', '[IMG]', '<pad>', '[IMG_BREAK]'),
    *('[IMG_END]', '[PREFIX]', '[MIDDLE]', '[SUFFIX]', '[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]'),
    '[TOOL_CONTENT]',
)


def read_tekken(content: bytes) -> Vocabulary:
    """Returns the tokenizer of a tekken.json, whose ids begin with the special tokens.

    Raises:
      ValueError: for a file that lacks one of the fields, or holds another type.
    """
    match parse_json(content):
        case {
            'config': {
                'pattern': str(pattern),
                'default_vocab_size': int(size),
                'default_num_special_tokens': int(n_specials),
            },
            'vocab': [*entries],
            **optional,
        } if 0 < n_specials < size <= n_specials + len(entries):
            pass
        case _:
            raise ValueError(
                'it must have vocab, and config with pattern, default_vocab_size and '
                'default_num_special_tokens'
            )
    listed = optional.get('special_tokens')
    specials = {i: f'<SPECIAL_{i}>' for i in range(n_specials)}
    try:
        ranks = {
            base64.b64decode(e['token_bytes']): e['rank'] for e in entries[: size - n_specials]
        }
        if listed is None:
            specials |= dict(enumerate(TEKKEN_SPECIALS))
        else:
            specials |= {entry['rank']: entry['token_str'] for entry in listed}
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f'an entry of vocab or special_tokens lacks a field: {error!r}') from error
    _check_ranks(ranks)
    library = build_tokenizer(ranks, pattern, specials, first=n_specials)
    return Vocabulary(library, '<s>', '</s>')


def build_tokenizer(ranks: Ranks, pattern: str, specials: Mapping[int, str], first: int = 0) -> Any:
    """Returns a tokenizer of `tokenizers` that merges by rank.

    Args:
      ranks: {token: rank}.
      pattern: cuts a text into words; no token crosses a cut.
      specials: {id: spelling} of tokens that no text has.
      first: the id of rank 0.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if a special token has the id or the spelling of a token.
    """
    import tokenizers as library

    spellings = {token: spell_bytes(token) for token in ranks}
    vocab = {spellings[token]: rank + first for token, rank in ranks.items()}
    if clash := {*specials} & {*vocab.values()} or {*specials.values()} & vocab.keys():
        raise ValueError(
            f'a special token is already an ordinary token: {sorted(map(str, clash))[0]}'
        )
    vocab |= {spelling: i for i, spelling in specials.items()}
    merges = [(spellings[first_part], spellings[end]) for first_part, end in list_merges(ranks)]
    # A word that is a token is not merged from its bytes, as in tiktoken.
    bpe = library.Tokenizer(library.models.BPE(vocab, merges, ignore_merges=True))
    pre_tokenizers = library.pre_tokenizers
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(library.Regex(pattern), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = library.decoders.ByteLevel()
    bpe.add_special_tokens(
        [library.AddedToken(text, normalized=False, special=True) for text in specials.values()]
    )
    return bpe


def list_merges(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Returns all pairs of tokens that join to a token, in the order of its rank.

    A token may be joined in several ways: which pair is there depends on the merges before.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


@functools.cache
def _byte_characters() -> list[str]:
    """Returns the printable character of each byte, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def spell_bytes(token: bytes) -> str:
    """Returns bytes as the ByteLevel of `tokenizers` spells them."""
    characters = _byte_characters()
    return ''.join(characters[byte] for byte in token)
