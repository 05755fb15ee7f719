"""Bytes to text in blocks: what is not UTF-8 is refused, or replaced and counted."""

from collections.abc import Iterable, Iterator

LEADS = (0xC0, 0xE0, 0xF0)  # of two, three and four bytes; a continuation is below all of them


def characters(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, cut where no character is: decoded one by one they make the whole text.

    Invalid bytes are replaced as in the whole, too. Blocks grow by three bytes at most.
    """
    rest = b''
    for block in blocks:
        block = rest + block
        border = _border(block)
        block, rest = block[:border], block[border:]
        if block:
            yield block
    if rest:
        yield rest


def _border(data: bytes) -> int:
    """Where a character that `data` does not end would begin; else its length."""
    for present in range(1, min(len(data), 3) + 1):
        byte = data[-present]
        if byte & 0xC0 != 0x80:
            needed = 1 + sum(byte >= lead for lead in LEADS)
            return len(data) - present if present < needed else len(data)
    return len(data)


def replace(name: str, data: bytes, offset: int) -> int:
    """How many bytes are not UTF-8. They become U+FFFD."""
    try:
        data.decode()
    except UnicodeDecodeError:
        # surrogateescape makes one character, found in no valid text, of each byte not valid.
        return sum('\udc80' <= c <= '\udcff' for c in data.decode('utf-8', 'surrogateescape'))
    return 0


def stop(name: str, data: bytes, offset: int) -> int:
    """Raises ValueError for a byte that is not UTF-8; `data` is at `offset` in the document."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset '
            f'{offset + error.start} ({error.reason}). Mend it, or set data.invalid_utf8=replace '
            'to read on and count.'
        ) from error
    return 0


INVALID_UTF8 = {'replace': replace, 'stop': stop}
