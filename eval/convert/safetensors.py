"""Reads and writes safetensors files, without the library of that name.

A file consists of the length of a header in 8 bytes (little-endian), the header, which is a JSON
object {name: {dtype, shape, data_offsets}}, and the data. Tensors are read through `numpy.memmap`,
so that only the parts that are read take memory. Format:
https://github.com/huggingface/safetensors.

The library (0.8) does not suffice. Its `get_tensor` copies, its numpy interface has no dtype for
float8, it reads the last of several entries with the same name, it allows names that move the
cursor of a terminal, and most of its errors give neither the tensor nor the numbers. Its
`save_file` takes all tensors at once, but a model larger than memory must be written tensor by
tensor.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eval.convert.hf_files import format_value, has_file, read_object
from lm.record.foreign_weights import explain_foreign_weights
from lm.storage.files import open_regular, replace_file, write_json

MAX_HEADER_BYTES = 100_000_000  # bytes, as in the library
MAX_FILE_BYTES = 1 << 63  # also bounds an axis
MAX_AXES = 32  # numpy has 64
MAX_TENSORS = 100_000  # of a file; each of the 163 files of DeepSeek-V3 has some 600
MOST_NAME, MOST_FILE = 1000, 255  # bytes of the names of tensors and of files
METADATA = '__metadata__'
ONE_FILE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES = {
    'BOOL': np.bool_,
    'U8': np.uint8,
    'I8': np.int8,
    'U16': np.uint16,
    'I16': np.int16,
    'U32': np.uint32,
    'I32': np.int32,
    'U64': np.uint64,
    'I64': np.int64,
    'F16': np.float16,
    'BF16': ml_dtypes.bfloat16,
    'F32': np.float32,
    'F64': np.float64,
    'F8_E4M3': ml_dtypes.float8_e4m3fn,
    'F8_E5M2': ml_dtypes.float8_e5m2,
    'F8_E8M0': ml_dtypes.float8_e8m0fnu,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """The place of a tensor in a file. begin: the offset of its first byte."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def n_bytes(self) -> int:
        """The bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns {name: its place} for a file, in the order of the data.

    Raises ValueError for a header that is truncated, too long, not a JSON object or has a name
    twice; for a dtype that numpy and ml_dtypes lack; and if shapes, offsets and the length of the
    file do not agree: each byte of the data must belong to a single tensor.
    """

    def make_error(reason: str) -> ValueError:
        return ValueError(f'{path} is not a valid safetensors file: {reason}')

    if not has_file(path):
        raise ValueError(f'{path.parent} contains no {path.name}')
    size = path.stat().st_size
    with open_regular(path) as file:
        if size < 8:
            raise make_error(f'it must have at least 8 bytes, the length of its header; got {size}')
        length = int.from_bytes(file.read(8), 'little')
        if length > MAX_HEADER_BYTES:
            raise make_error(
                f'its header must have at most {MAX_HEADER_BYTES:,} bytes; got {length:,}'
            )
        if length > size - 8:
            raise make_error(
                f'it is truncated: its header has {length:,} bytes, the whole file {size:,}'
            )
        try:
            text = file.read(length).decode()
            header = json.loads(text, object_pairs_hook=_refuse_duplicates)
        except (ValueError, RecursionError) as error:
            raise make_error(f'its header must be JSON with unique names ({error})') from error
    if not isinstance(header, dict):
        raise make_error('its header must be a JSON object')
    header.pop(METADATA, None)
    if len(header) > MAX_TENSORS:
        raise make_error(f'it must have at most {MAX_TENSORS:,} tensors; got {len(header):,}')
    tensors, data_bytes = {}, size - 8 - length
    for name, entry in header.items():
        if not is_name(name, MOST_NAME):
            raise make_error(f'{format_value(name)} is not a valid name of a tensor')
        match entry:
            case {'dtype': str(code), 'shape': list(shape), 'data_offsets': [begin, end]}:
                pass
            case _:
                raise make_error(f'{name} must have a dtype, a shape and two data_offsets')
        if not all(type(n) is int and 0 <= n < MAX_FILE_BYTES for n in (*shape, begin, end)):
            raise make_error(f'shape and data_offsets of {name} must be integers of at least 0')
        if len(shape) > MAX_AXES:
            raise make_error(f'{name} must have at most {MAX_AXES} axes; got {len(shape):,}')
        if code not in DTYPES:
            raise make_error(
                f'{name} has dtype {format_value(code)[1:-1]}; supported: {", ".join(DTYPES)}'
            )
        dtype = np.dtype(DTYPES[code])
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes != end - begin:
            raise make_error(
                f'{name} is {code}{list(shape)}, {n_bytes:,} bytes, but its data_offsets '
                f'{begin}:{end} span {end - begin:,}'
            )
        tensors[name] = StoredTensor(path, dtype, tuple(shape), begin + 8 + length)
    # By size too: an empty tensor begins where the next tensor does, and must come first.
    tensors = dict(sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].n_bytes)))
    # The tensors must cover the data without gaps and overlaps.
    position, previous = 8 + length, 'the header'
    for name, stored in tensors.items():
        if stored.begin != position:
            defect = 'overlap' if stored.begin < position else 'have a gap between them'
            raise make_error(f'{previous} and {name} {defect}')
        position, previous = stored.begin + stored.n_bytes, name
    if position != size:
        tensor_bytes = position - 8 - length
        defect = 'it is truncated' if position > size else 'bytes follow the last tensor'
        raise make_error(
            f'{defect}: its tensors have {tensor_bytes:,} bytes, its data {data_bytes:,}'
        )
    return tensors


def is_name(text: str, max_bytes: int) -> bool:
    """Whether a text may name a tensor or a file.

    A name has at most `max_bytes` bytes, and no characters that move the cursor of a terminal.
    """
    return text.isprintable() and len(text.encode()) <= max_bytes


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'{format_value(name)} occurs twice')
    return merged


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Returns {name: its place} for model.safetensors, or for the files that an index names.

    model.safetensors takes precedence, as in transformers.

    Raises ValueError if there is neither, for an index that names a path, a file that is missing,
    or a tensor that its file lacks, for a tensor that is in two files or not in the index, and as
    `read_header` does.
    """
    index = folder / INDEX
    if has_file(folder / ONE_FILE):
        return read_header(folder / ONE_FILE)
    if not has_file(index):
        explanation = explain_foreign_weights(folder) or (
            'Other formats are not supported; save_pretrained of transformers writes safetensors.'
        )
        raise ValueError(f'{folder} contains neither {ONE_FILE} nor {INDEX}. {explanation}')
    file_names = read_object(index, MAX_HEADER_BYTES).get('weight_map')
    if not isinstance(file_names, dict) or not file_names:
        raise ValueError(f'{index} must have a weight_map that is not empty')
    for name, file in file_names.items():
        # A name in an index must not lead out of the folder.
        is_file = isinstance(file, str) and is_name(file, MOST_FILE) and '\\' not in file
        if not is_file or file in ('', '..') or file != Path(file).name:
            raise ValueError(
                f'{index} names {format_value(file)} for {format_value(name)}; it must name a file '
                'in its own folder'
            )
        if not is_name(name, MOST_NAME):
            raise ValueError(f'{index} has an invalid name of a tensor, {format_value(name)}')
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({*file_names.values()}):
        if not has_file(folder / file):
            raise ValueError(f'{index} names {file}, which does not exist')
        file_tensors = read_header(folder / file)
        if duplicates := sorted(file_tensors.keys() & tensors.keys()):
            raise ValueError(
                f'{folder / file} repeats tensors of another file, such as {duplicates[0]}'
            )
        tensors |= file_tensors
    wrong = [
        n for n in file_names.keys() | tensors.keys() if n not in tensors or n not in file_names
    ]
    wrong += [
        n for n in file_names.keys() & tensors.keys() if tensors[n].file.name != file_names[n]
    ]
    if wrong:
        raise ValueError(f'{index} and its files disagree on {", ".join(sorted(wrong)[:5])}')
    return tensors


def list_unread_files(folder: Path) -> list[str]:
    """Returns notes on files of weights that are not read."""
    if has_file(folder / ONE_FILE) and os.path.lexists(folder / INDEX):
        return [f'{ONE_FILE} was read, as by transformers; the files of {INDEX} were ignored']
    return []


def map_tensor(tensor: StoredTensor) -> np.ndarray:
    """Returns a memory-mapped view of the file; its pages are freed with the last array in use."""
    if tensor.n_bytes == 0:  # mmap refuses a length of 0
        return np.empty(tensor.shape, tensor.dtype)
    whole = np.memmap(tensor.file, np.uint8, 'r', tensor.begin, (tensor.n_bytes,))
    return np.asarray(whole).view(tensor.dtype).reshape(tensor.shape)


def map_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of the tensors; an array is a view of the file."""
    for name, tensor in tensors.items():
        yield name, map_tensor(tensor)


class Tensor(NamedTuple):
    """A tensor to be written. make() computes it when it is due."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def make_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns arrays as tensors to be written, by name."""
    return {name: Tensor(x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file. Only a single tensor at a time is in memory."""
    header: dict[str, Any] = {METADATA: {'format': 'pt'}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.n_bytes
        entry = {'dtype': NAMES[np.dtype(tensor.dtype)], 'shape': list(tensor.shape)}
        header[name], begin = entry | {'data_offsets': [begin, end]}, end
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # so that the data is aligned
    with replace_file(path) as temporary, temporary.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for name, tensor in tensors.items():
            array = np.asarray(tensor.make(), tensor.dtype, order='C')
            if array.shape != tuple(tensor.shape):
                raise ValueError(f'{name} must have the shape {tensor.shape}; got {array.shape}')
            file.write(array.reshape(-1).view(np.uint8).data)
            # Frees the memory before the next tensor is computed.
            del array


def write_folder(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
    """Writes model.safetensors, or several files and their index.

    Args:
      folder: exists.
      tensors: by name.
      max_bytes: of a file, unless a single tensor is larger.
    """
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(t.n_bytes for t in parts[-1].values()) + tensor.n_bytes > max_bytes:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        write_file(folder / ONE_FILE, parts[0])
        return
    file_names = {}
    for i, part in enumerate(parts, 1):
        file = f'model-{i:05d}-of-{len(parts):05d}.safetensors'
        write_file(folder / file, part)
        file_names |= dict.fromkeys(part, file)
    total = sum(tensor.n_bytes for tensor in tensors.values())
    record = {'metadata': {'total_size': total}, 'weight_map': file_names}
    write_json(folder / INDEX, record)
