"""Texts to train on, written anew by whoever asks: what needs no run imports none."""

import random
from pathlib import Path


def write_corpus(folder: Path) -> dict[str, str]:
    """Some small documents, and a cache of their own: the fields of config.data that name them."""
    words = ['norm', 'layer', 'head', 'token', 'scale', 'depth', 'width', 'loss']
    rng = random.Random(0)
    for i in range(30):
        (folder / f'{i}.txt').write_text(' '.join(rng.choices(words, k=60)))
    return {'data.source': f'text:{folder}/*.txt', 'data.cache_dir': str(folder / 'cache')}
