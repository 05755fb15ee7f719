"""A data section small enough to prepare in a fraction of a second."""

import dataclasses

import numpy as np
import pytest

from configs import default
from lm.config import resolve
from lm.sections import DataConfig

WORDS = ['a', 'the', 'of', 'norm', 'scale', 'loss', '日本', 'é', '🙂', 'x=1', '\r\n', '\t', '']


def document(i: int) -> str:
    rng = np.random.default_rng(i)
    lines = [' '.join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(rng.integers(1, 20))]
    return f'document {i}\n' + '\n'.join(lines) + '\n'


@pytest.fixture
def cfg(tmp_path):
    """cfg(field=value, ...) -> DataConfig; its source is 40 .txt files, its cache is its own."""
    base = resolve(default.get_config()).data

    def make(**fields) -> DataConfig:
        folder = tmp_path / 'corpus'
        if 'source' not in fields and not folder.exists():
            folder.mkdir()
            for i in range(40):
                (folder / f'{i:02}.txt').write_bytes(document(i).encode())
        own = {
            'source': f'text:{folder}/*.txt',
            'tokenizer': 'byte',
            'seq_len': 32,
            'batch_size': 4,
            'validation_fraction': 0.2,
            'cache_dir': str(tmp_path / 'cache'),
        }
        return dataclasses.replace(base, **(own | fields))

    return make


def quiet(line: str) -> None:
    del line
