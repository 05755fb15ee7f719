"""Training texts, written for each test; a module apart, since texts need no run."""

import random
from pathlib import Path


def write_corpus(folder: Path) -> dict[str, str]:
    """Writes small documents; returns the fields of config.data that name them and their cache."""
    words = ['norm', 'layer', 'head', 'token', 'scale', 'depth', 'width', 'loss']
    rng = random.Random(0)
    for i in range(30):
        (folder / f'{i}.txt').write_text(' '.join(rng.choices(words, k=60)))
    return {'data.source': f'text:{folder}/*.txt', 'data.cache_dir': str(folder / 'cache')}
