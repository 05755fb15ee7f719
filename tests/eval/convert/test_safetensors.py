"""Contract: an inconsistent file is refused with one line, and written files are read back.

Reference: the library's own checks (https://github.com/huggingface/safetensors).
"""

import json

import ml_dtypes
import numpy as np
import pytest

from eval.convert import safetensors
from eval.convert.safetensors import (
    make_tensors,
    map_tensors,
    read_folder,
    read_header,
    write_folder,
)

ARRAYS = {
    'b': np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    'a': np.array([1, -2.5, 3], ml_dtypes.bfloat16),
    'empty': np.zeros((0, 2), np.float16),
    'scalar': np.array(7, np.int64),
}


def raw(header, payload=b'', length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, 'little') + text + payload


def entry(begin, end, shape, dtype='U8'):
    return {'dtype': dtype, 'shape': shape, 'data_offsets': [begin, end]}


@pytest.mark.parametrize('max_bytes, files', [(10**6, 1), (30, 2)])
def test_written_tensors_are_read_back(tmp_path, max_bytes, files):
    """Tensors are written to one file or several. Catches a transposed array written in memory
    order, and one dtype for all tensors of a file.
    """
    write_folder(tmp_path, make_tensors(ARRAYS), max_bytes)
    assert len(list(tmp_path.glob('*.safetensors'))) == files
    arrays = dict(map_tensors(read_folder(tmp_path)))
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


BAD = {
    'short': (b'\0\0\0', 'got 3'),
    'long header': (raw({}, length=100_000_001), 'at most 100,000,000 bytes'),
    'cut header': (raw({}, length=50), 'it is truncated'),
    'no JSON': (raw(b'{"a"'), 'must be JSON'),
    'no text': (raw(b'\xff\xfe'), 'must be JSON'),
    'deep': (raw(b'[' * 100_000), 'must be JSON'),
    'list': (raw([]), 'must be a JSON object'),
    'twice': (raw(b'{"a": 1, "a": 2}'), "'a' occurs twice"),
    'no offsets': (raw({'a': {'dtype': 'U8', 'shape': [1]}}), 'a must have a dtype'),
    'negative': (raw({'a': entry(0, 1, [-1])}, b'1'), 'at least 0'),
    'no number': (raw({'a': entry(0, 1, [True])}, b'1'), 'at least 0'),
    'dtype': (raw({'a': entry(0, 1, [2], 'F4')}, b'1'), 'dtype F4; supported: BOOL'),
    'shape': (raw({'a': entry(0, 4, [2], 'F32')}, b'1234'), r'F32\[2\], 8 bytes'),
    'overflow': (raw({'a': entry(0, 0, [2**32, 2**32])}), 'span 0'),
    'overlap': (raw({'a': entry(0, 2, [2]), 'b': entry(1, 3, [2])}, b'123'), 'a and b overlap'),
    'hole': (raw({'a': entry(0, 1, [1]), 'b': entry(2, 3, [1])}, b'123'), 'a and b have a gap'),
    'begins late': (raw({'a': entry(1, 2, [1])}, b'12'), 'the header and a have a gap'),
    'trailing': (raw({'a': entry(0, 1, [1])}, b'12'), 'bytes follow the last tensor'),
    'truncated': (raw({'a': entry(0, 4, [4])}, b'12'), 'it is truncated'),
}


@pytest.mark.parametrize('name', BAD)
def test_inconsistent_file_is_refused(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / 'model.safetensors'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value) and '\n' not in str(error.value)


def index(folder, **files):
    record = {'weight_map': files}
    (folder / safetensors.INDEX).write_text(json.dumps(record))


@pytest.mark.parametrize(
    'files, message',
    [
        ({'a': '../one.safetensors'}, 'must name a file in its own folder'),
        ({'a': 'sub/one.safetensors'}, 'must name a file in its own folder'),
        ({'a': 'sub\\one.safetensors'}, 'must name a file in its own folder'),
        ({'a': '..'}, 'must name a file in its own folder'),
        ({'a': 'three.safetensors'}, 'which does not exist'),
        ({'a': 'one.safetensors', 'c': 'one.safetensors'}, 'disagree on c'),
        ({'b': 'one.safetensors'}, 'disagree on a, b'),
        ({'a': 'two.safetensors', 'b': 'one.safetensors'}, 'tensors of another file, such as a'),
    ],
)
def test_inconsistent_index_is_refused(tmp_path, files, message):
    for name in ('one', 'two'):
        (tmp_path / f'{name}.safetensors').write_bytes(raw({'a': entry(0, 1, [1])}, b'1'))
    index(tmp_path, **files)
    with pytest.raises(ValueError, match=message):
        read_folder(tmp_path)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'contains neither model.safetensors .*save_pretrained'):
        read_folder(tmp_path)
    (tmp_path / safetensors.INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(ValueError, match=r"index.json is not valid JSON .'a' occurs twice"):
        read_folder(tmp_path)
