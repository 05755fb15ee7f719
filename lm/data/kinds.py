"""Kinds of files: by the suffix, or else by how the content begins."""

import codecs
from pathlib import Path

from lm.data.streams import COMPRESSIONS, match_mark, read_start

SNIFFED = 1 << 13  # bytes at the beginning of a file that tell its kind

TEXT, JSON, CSV, PARQUET, ARROW = 'text', 'json', 'csv', 'parquet', 'arrow'
KINDS = {
    '.txt': TEXT,
    '.jsonl': JSON,
    '.ndjson': JSON,
    '.json': JSON,
    '.csv': CSV,
    '.tsv': CSV,
    '.parquet': PARQUET,
    '.arrow': ARROW,
    '.feather': ARROW,
}
COLUMNAR = {PARQUET, ARROW}
MARKED_SUFFIXES = {'.txt', '.jsonl'}  # of files that earlier versions read with their marks

# Files that are no text, and how to go on.
ADVICE = {
    '.pdf': 'a PDF. Convert it to text first, for example with pdftotext',
    '.docx .doc .odt .rtf .epub .pptx .ppt': (
        "a word processor's document. Convert it to text first, for example with pandoc -t plain"
    ),
    '.xlsx .xls .ods': 'a spreadsheet. Save it as .csv',
    '.zip .tar .tgz .tbz2 .txz .7z .rar': 'an archive. Unpack it and name its folder',
    '.lz4 .br .lzo .z .lzma .bgz': (
        f'compressed in an unsupported format. Decompress it, or use {", ".join(COMPRESSIONS)}'
    ),
    '.bin .npy .npz .idx': (
        'an array of numbers. If these are token ids of another program (nanoGPT, Megatron), use '
        'the text they were made from, or write the ids as text for data.tokenizer=ids:V,BOS,EOS'
    ),
    '.pt .pth .ckpt .safetensors .pkl .pickle .h5 .hdf5': "a program's data file",
    '.png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico': 'an image',
    '.mp3 .wav .flac .ogg .mp4 .mkv .avi .mov .webm': 'sound or video',
    '.db .sqlite .sqlite3 .duckdb': 'a database. Export the table of texts to .parquet or .jsonl',
    '.tfrecord .array_record .mds .orc .avro .lance': (
        'an unsupported format of records. Export it to .parquet or .jsonl'
    ),
    '.so .o .a .exe .dll .pyc .class .jar .whl': 'a program',
}
BINARY_KINDS = {suffix: text for suffixes, text in ADVICE.items() for suffix in suffixes.split()}
# Beginnings of such files; some of them have no zero byte soon after.
MAGIC = (
    (b'%PDF', '.pdf'),
    (b'{\\rtf', '.rtf'),
    (b'PK\x03\x04', '.zip'),
    (b'\x93NUMPY', '.npy'),
    (b'\x89PNG', '.png'),
    (b'\xff\xd8\xff', '.jpg'),
    (b'SQLite format 3', '.sqlite'),
    (b'\x7fELF', '.so'),
)
COMPRESSED = ((b'\x1f\x8b', '.gz'), (b'BZh', '.bz2'), (b'\xfd7zXZ', '.xz'), (b'(\xb5/\xfd', '.zst'))


class UnreadableKind(ValueError):
    """A file holds neither text nor records; the message says how to go on."""


def file_suffix(path: Path) -> str:
    """Returns '.jsonl' for 'a.jsonl.gz' and 'A.JSONL', and '.parquet.gz' for that: a columnar file
    is not compressed as a whole.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner + suffix if KINDS.get(inner) in COLUMNAR or inner in BINARY_KINDS else inner


def detect_kind(path: Path) -> str:
    """Returns TEXT, JSON, CSV, PARQUET or ARROW.

    Raises UnreadableKind for a file that is none of them.
    """
    suffix = file_suffix(path)
    if suffix in KINDS:
        return KINDS[suffix]
    inner, is_compressed = Path(suffix).stem, Path(suffix).suffix in COMPRESSIONS
    if is_compressed and KINDS.get(inner) in COLUMNAR:
        raise UnreadableKind(f'{path} is compressed as a whole. Decompress it to a {inner} file.')
    start = read_start(path, SNIFFED)
    if start.startswith(b'PAR1'):
        return PARQUET
    if start.startswith(b'ARROW1'):
        return ARROW
    if reason := _describe_binary(start, inner if is_compressed else suffix):
        raise UnreadableKind(f'{path} {reason}')
    return TEXT


def _describe_binary(start: bytes, suffix: str) -> str:
    """Returns why the beginning of a file is no text, and how to go on; '' for text."""
    magic = next((name for head, name in MAGIC if start.startswith(head)), '')
    compression = next((name for head, name in COMPRESSED if start.startswith(head)), '')
    if compression and suffix not in BINARY_KINDS:
        return (
            f'is compressed, but its name does not show this. Rename it to end with {compression}.'
        )
    if match_mark(start)[0]:
        return ''
    try:
        codecs.getincrementaldecoder('utf-8')().decode(start, len(start) < SNIFFED)
        invalid = start.find(0)
    except UnicodeDecodeError as error:
        invalid = error.start
    if invalid < 0 and not magic:
        return ''
    # A .docx is a .zip, and better known by its name.
    if kind := BINARY_KINDS.get(suffix) or BINARY_KINDS.get(magic):
        return f'is {kind}.'
    return (
        f'is not UTF-8 text: byte 0x{start[invalid]:02x} at offset {invalid}. If it is text in '
        'another encoding, convert it (iconv -t utf-8), or rename it to .txt and set '
        'data.invalid_utf8.'
    )


def begins_like_json(path: Path, field: str) -> bool:
    """Returns whether a text begins like a JSON object, or an array of them, with a field."""
    start = read_start(path, SNIFFED)
    is_object = start.replace(b' ', b'').lstrip(b'[\r\n').startswith(b'{"')
    return is_object and f'"{field}":'.encode() in start


def detect_mark(path: Path) -> str:
    """Returns the encoding that the byte-order mark of a .txt or .jsonl file names, or ''."""
    if file_suffix(path) not in MARKED_SUFFIXES:
        return ''
    return match_mark(read_start(path, 4))[0]
