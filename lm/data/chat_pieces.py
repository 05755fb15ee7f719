"""Encodes the conversations of a piece, as `lm.data.prepare` encodes text."""

import array
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.config.fields import DataConfig
from lm.data import prepared, tokenizers
from lm.data.chat_template import ChatTemplate, find_template
from lm.data.conversations import VERSION, format_plain, parse_document
from lm.data.prepared import INDEX, LEFT_OUT, SPANS, TARGET_BYTES, TOKENS
from lm.data.scan import SPLITS
from lm.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from lm.data.chat_encoder import ChatEncoder

BATCH_SIZE, BATCH_CHARACTERS = 256, 1 << 22  # most that is encoded at once, over all cores


def find_tokenizer_template(spec: str) -> ChatTemplate | None:
    """Returns the chat template of data.tokenizer, or None if it has none."""
    path = tokenizers.find_library_file(spec)
    return None if path is None else find_template(path.parent)


def build_encoder(tokenizer: Tokenizer, spec: str) -> 'ChatEncoder':
    """Returns the encoder of conversations.

    Args:
      tokenizer: the tokenizer.
      spec: data.tokenizer, beside which its chat template lies.
    """
    from lm.data.chat_encoder import ChatEncoder  # Jinja delays the start of training

    return ChatEncoder(tokenizer, find_tokenizer_template(spec))


def identify_chats(spec: str) -> bytes:
    """Returns what determines the tokens of a conversation besides the tokenizer.

    spec: data.tokenizer.
    """
    template = find_tokenizer_template(spec)
    return b'chats %d ' % VERSION + (b'' if template is None else template.identity)


def plain_text(document: str) -> str:
    """Returns the text of a conversation, to train a tokenizer on."""
    conversation = parse_document(document)
    if not conversation.messages:
        return conversation.prompt + conversation.completion
    has_text = all({'role', 'content'} <= message.keys() for message in conversation.messages)
    return format_plain(conversation).text if has_text else ''


def encode_chats(
    documents: Iterator[tuple[str, str]], encoder: 'ChatEncoder', dtype: type, folder: Path
) -> None:
    """Writes the tokens of conversations, the ends of each, and the spans to learn.

    Args:
      documents: (split, conversation as JSON).
      encoder: the encoder.
      dtype: of the tokens.
      folder: the folder to write to.
    """
    ends, sizes, spans = ({split: array.array('q') for split in SPLITS} for _ in range(3))
    n_tokens, left_out = dict.fromkeys(SPLITS, 0), Counter()
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context(open(folder / f'{s}{TOKENS}', 'wb')) for s in SPLITS}
        for group in _batch_documents(documents):
            chats = encoder.encode_batch([document for _, document in group])
            for (split, _), chat in zip(group, chats, strict=True):
                if isinstance(chat, str):
                    left_out[chat] += 1
                    continue
                files[split].write(np.asarray(chat.tokens, dtype).tobytes())
                spans[split].extend((chat.targets + n_tokens[split]).reshape(-1).tolist())
                n_tokens[split] += len(chat.tokens)
                ends[split].append(n_tokens[split])
                sizes[split].append(chat.n_bytes)
    index: dict[str, Any] = {}
    for split in SPLITS:
        index[split] = np.array(ends[split], np.int64)
        index[f'{split}{SPANS}'] = np.array(spans[split], np.int64).reshape(-1, 2)
        index[f'{split}{TARGET_BYTES}'] = np.array(sizes[split], np.int64)
    index['n_bytes'] = np.array([sum(sizes[split]) for split in SPLITS])
    index[LEFT_OUT] = np.frombuffer(json.dumps(left_out).encode(), np.uint8)
    np.savez(folder / INDEX, **index)
    prepared.seal(folder)


def _batch_documents(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Groups conversations until they are BATCH_SIZE, or have BATCH_CHARACTERS."""
    group, size = [], 0
    for split, document in documents:
        group.append((split, document))
        size += len(document)
        if len(group) == BATCH_SIZE or size >= BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def list_split_sources(cfg: DataConfig) -> dict[str, str]:
    """Returns the source of each split."""
    return {'train': cfg.source, 'validation': cfg.validation_source or cfg.source}


def check_left_out(
    n_documents: Mapping[str, int], left_out: Mapping[str, int], cfg: DataConfig
) -> None:
    """Raises ValueError if a split has no conversation.

    Args:
      n_documents: the conversations of each split.
      left_out: conversations that are left out, by the reason.
      cfg: the data section.
    """
    for split, source in list_split_sources(cfg).items():
        if not n_documents[split]:
            reasons = describe_left_out(left_out) or 'there are too few'
            raise ValueError(
                f'no conversation of {source} can be used in the {split} split: {reasons}. Correct '
                'them, or add more conversations.'
            )


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Returns the numbers of conversations that are left out, with reasons; '' if none is."""
    return ', '.join(f'{count:,} {reason}' for reason, count in sorted(left_out.items()))


def describe_rows(rows: Mapping[str, Any], left_out: Mapping[str, int], say: Callable) -> None:
    """Reports the conversations that are not trained on.

    Args:
      rows: of each split.
      left_out: by the reason.
      say: gets lines of progress.
    """
    if reasons := describe_left_out(left_out):
        say(f'NOTE: conversations are left out: {reasons}')
    n_long = sum(rows[split].n_left_out for split in SPLITS)
    if n_long:
        longest = max(rows[split].longest for split in SPLITS)
        say(
            f'NOTE: conversations are left out: {n_long:,} are longer than data.seq_len + 1 '
            f'tokens. Set data.seq_len={longest - 1} to include all.'
        )
