"""Compares the ids of vocabularies with those of the libraries that they were made for.

    uv run --with sentencepiece --with tiktoken --with mistral-common \
        python -m tests.bench.vocabularies FILE ... [--random=1000]

FILE: a model of SentencePiece, a tiktoken file of a public vocabulary, or a tekken.json. Prints a
row for each: how many of the texts of tests/hard_texts.py have the same ids, and how many random
strings; then the first texts that do not. Nothing is downloaded.
"""

import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

from lm.data import tokenizers
from lm.data.byte_ranks import PUBLIC_RANKS, digest_ranks, is_rank_file, parse_ranks
from tests.hard_texts import HARD_TEXTS

SHOWN = 3  # texts with other ids


def load_original(path: Path) -> tuple[str, Callable[[str], list[int]]]:
    """Returns (the name of the library, its function from a text to ids) for a file."""
    content = path.read_bytes()
    if is_rank_file(content):
        import tiktoken

        ranks = parse_ranks(content)
        public = PUBLIC_RANKS[digest_ranks(ranks)]
        # The pattern of the installed tiktoken if it has this vocabulary, else the author's.
        pattern = public.pattern
        if public.name in tiktoken.list_encoding_names():
            pattern = find_pattern(public.name)
        encoding = tiktoken.Encoding(
            'x', pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        if public.is_composed:
            return 'tiktoken', lambda text: encoding.encode_ordinary(
                unicodedata.normalize('NFC', text)
            )
        return 'tiktoken', encoding.encode_ordinary
    if path.suffix == '.json':
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        tekken = Tekkenizer.from_file(path)
        return 'mistral-common', lambda text: tekken.encode(text, bos=False, eos=False)
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    return 'sentencepiece', processor.encode


def find_pattern(name: str) -> str:
    """Returns the pattern of a public encoding, without its ranks, which tiktoken downloads."""
    from tiktoken_ext import openai_public

    loader, openai_public.load_tiktoken_bpe = (
        openai_public.load_tiktoken_bpe,
        lambda *args, **options: {},
    )
    try:
        return openai_public.ENCODING_CONSTRUCTORS[name]()['pat_str']
    finally:
        openai_public.load_tiktoken_bpe = loader


def make_random_texts(count: int) -> list[str]:
    """Returns strings of parts of the hard texts and of random characters."""
    rng = random.Random(0)
    joined = ''.join(HARD_TEXTS)
    texts = []
    for _ in range(count):
        text = ''
        for _ in range(rng.randrange(1, 8)):
            start = rng.randrange(len(joined))
            text += joined[start : start + rng.randrange(1, 30)]
            text += rng.choice(['', ' ', '\n', '  ', "'s", chr(rng.choice([*range(0x3000)]))])
        texts.append(text)
    return texts


def main(arguments: list[str]) -> None:
    files = [Path(a) for a in arguments if not a.startswith('--')]
    (count,) = [int(a.partition('=')[2]) for a in arguments if a.startswith('--random=')] or [1000]
    random_texts = make_random_texts(count)
    for path in files:
        library, encode = load_original(path)
        tokenizer = tokenizers.plan_tokenizer(f'hf:{path}').build([])
        different = []
        counts = []
        for texts in (HARD_TEXTS, random_texts):
            ids = [array.tolist() for array in tokenizer.encode_batch(texts)]
            wrong = [t for t, i in zip(texts, ids, strict=True) if i != list(encode(t))]
            counts.append(f'{len(texts) - len(wrong):,} of {len(texts):,}')
            different += wrong
        print(f'{path.name:45} {library:15} {counts[0]:10} {counts[1]}')
        for text in different[:SHOWN]:
            print(f'  {text!r}\n    here  {tokenizer.encode(text)}\n    there {[*encode(text)]}')


if __name__ == '__main__':
    main(sys.argv[1:])
