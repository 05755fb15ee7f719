"""Property: nearly valid content of each kind is read, or refused with a clear error."""

import io
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.faults.changes import change
from tests.faults.readers import READERS
from tests.hostile_models import CASES

COUNT = 10  # of changed contents per trial
NONSENSE = b'\xff\x00[{'
# Text in any form, damaged rows that are left out, and cells that are listed as unreadable.
TOLERANT = {'chat-template', 'csv', 'metrics.jsonl', 'config.json', 'summary.json'}
TOLERANT |= {'supervisors'}


@pytest.mark.trials(short=1, long=100)
@pytest.mark.parametrize('name', READERS)
def test_changed_content_is_read_or_refused(name, trial, tmp_path):
    rng, reader = random.Random(f'{name} {trial}'), READERS[name](tmp_path)
    assert any(map(reader.accepts, reader.samples))
    # Catches a reader that never opens the file.
    assert reader.accepts(NONSENSE) == (name in TOLERANT)
    for _ in range(COUNT):
        reader.accepts(change(rng, rng.choice(reader.samples), rng.choice(reader.samples)))


LLAMA = CASES['llama3']['config']
REFUSED = {  # content that ended in another error, or moved the cursor of a terminal
    'a piece whose text is a number': ('tokenizer.model', b'\x0a\x02\x08\x05'),
    'a score of 8 bytes': ('tokenizer.model', b'\x0a\x09\x11' + bytes(8)),
    'a vocabulary without words': (
        'tokenizer.json',
        b'{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, '
        b'"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}}',
    ),
    'a rotary parameter of escapes': (
        'model-config',
        json.dumps(LLAMA | {'rope_parameters': {'rope_type': 'default', '\x1b[2J': 1}}).encode(),
    ),
    'a delimiter that is expected': ('csv', b'a\tb\n"x"y\t1\n'),
    'a version of escapes': ('tokenizer.json', json.dumps({'version': '\x1b[2J'}).encode()),
    'a folder of escapes': (
        'hub-files',
        json.dumps({'paths': ['\x1b[2J/a.parquet'], 'card': {}, 'subset': 'x'}).encode(),
    ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_content_is_refused(name, tmp_path):
    reader, content = REFUSED[name]
    assert not READERS[reader](tmp_path).accepts(content)


@pytest.mark.parametrize('column', ['text', 'n'])
def test_invalid_statistics_do_not_end_the_process(column, tmp_path):
    """pyarrow aborts where it reads the metadata of such a chunk: a failure ends this process."""
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.table({'text': ['a', None], 'n': [1, 2]}), buffer)
    optional, required = (
        b'%' + repetition + b'\x18' + bytes([len(column)]) + column.encode()
        for repetition in (b'\x02', b'\x00')
    )
    assert buffer.getvalue().count(optional) == 1
    content = buffer.getvalue().replace(optional, required)
    assert READERS['parquet'](tmp_path).accepts(content) == (column == 'n')
