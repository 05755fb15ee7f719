"""Reads files of models that others made: regular ones alone, of bounded sizes, with typed fields.

A folder may come from anyone. A pipe in place of a file would be waited for, a size of 10**9 would
be built, and a text in place of a number would end as an error of some library. So each field of
config.json that a family takes has a `Kind` here, which is checked before the family sees it. The
other fields are numbers that are finite, texts and flags, and nothing of what a model computes
depends on them.
"""

import dataclasses
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.storage.files import open_regular, parse_json

CONFIG, GENERATION, TEMPLATE = 'config.json', 'generation_config.json', 'chat_template.jinja'
SETTINGS = ('tokenizer_config.json', 'special_tokens_map.json', GENERATION)
TOKENIZER, ADAPTER = 'tokenizer.json', 'adapter_config.json'
MOST_CONFIG = 1 << 24  # bytes; those of the Hub have some 1,000, with long factors of RoPE 5,000
MOST_SETTINGS = 1 << 26  # bytes; a tokenizer_config.json with 100,000 added tokens has 20 MB
MOST_TOKENIZER = 1 << 28  # bytes of a tokenizer.json; that of a vocabulary of 262,000 has 33 MB
MOST_TEMPLATE = 1 << 22  # bytes
MOST_FIELDS = 1000  # of an object in config.json; id2label is not read
MOST_DIGITS = 40  # of a whole number; model_max_length of many tokenizers is 10**30
MOST_SIZE = (1 << 31) - 1
MOST_TEXT = 200  # characters of a choice
MOST_SHOWN = 60  # characters of a value in an error

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = MOST_SHOWN
_shown.maxlevel = 2


def shown(value: Any) -> str:
    """Returns a value as an error shows it: in one line, and short."""
    return _shown.repr(value)


def has_file(path: Path) -> bool:
    """Whether there is a regular file, perhaps behind a link, as in the cache of the Hub.

    Raises:
      ValueError: for anything else of this name: a pipe, a folder, a link to nothing. It is not
        opened, as a pipe would wait for who writes it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if os.path.lexists(path):
            raise ValueError(f'{path} is a link that leads to no file ({error.strerror})') from None
        return False
    if not stat.S_ISREG(mode):
        raise ValueError(f'{path} is no regular file, and nothing else is read')
    return True


def read_bytes(path: Path, most: int) -> bytes:
    """Returns the content of a file. Raises ValueError where it is larger than `most` bytes, not
    there, or no regular file.
    """
    if not has_file(path):
        raise ValueError(f'{path.parent} holds no {path.name}')
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f'{path} has more than {most:,} bytes: too many for a file of its kind')
    return data


def read_object(path: Path, most: int) -> dict[str, Any]:
    """Returns the object in a JSON file, of which a number of very many digits is infinite.

    Raises:
      ValueError: as `read_bytes` does, and for what is no JSON object: no UTF-8, cut, nested deeper
        than `MOST_NESTING`, or with a field twice that has two values.
    """
    data = read_bytes(path, most)
    try:
        value = parse_json(data, parse_int=_whole, object_pairs_hook=_without_doubles)
    except ValueError as error:
        raise ValueError(f'{path} is no JSON ({error})') from error
    if not isinstance(value, dict):
        raise ValueError(f'{path} holds no JSON object')
    return value


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= MOST_DIGITS else float(text)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        for name, value in pairs:
            if repr(merged[name]) != repr(value):
                raise ValueError(f'it has {shown(name)} twice, with two values')
    return merged


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field may have.

    types: of Python, where bool is no int. words: what they are, for an error. least, most: of
    numbers; above: they must be more than `least`. null: whether null is one of them too. items: of
    a list. fields: of an object, where a name that is not listed may have any value. texts: of
    characters at most MOST_TEXT.
    """

    types: tuple[type, ...]
    words: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    null: bool = False
    items: 'Kind | None' = None
    fields: Mapping[str, 'Kind'] | None = None

    def wrong(self, path: str, value: Any) -> Iterator[str]:
        """Yields what is wrong with a value, and with those in it. path: of the field."""
        if value is None and self.null:
            return
        if type(value) not in self.types or not self._holds(value):
            null = ', or null' if self.null else ''
            yield f'{path}={shown(value)}, and it must be {self.words}{null}'
        elif isinstance(value, list) and self.items:
            for i, inner in enumerate(value):
                yield from self.items.wrong(f'{path}[{i}]', inner)
        elif isinstance(value, dict) and self.fields is not None:
            for name, inner in value.items():
                if name in self.fields:
                    yield from self.fields[name].wrong(f'{path}.{name}', inner)

    def _holds(self, value: Any) -> bool:
        if isinstance(value, int | float):
            above = self.least < value if self.above else self.least <= value
            return math.isfinite(value) and above and value <= self.most
        return not isinstance(value, str) or len(value) <= MOST_TEXT


def whole(least: int = 1, most: int = MOST_SIZE, null: bool = False) -> Kind:
    return Kind((int,), f'a whole number from {least} to {most}', least, most, null=null)


def number(least: float = -math.inf, most: float = math.inf, *, null: bool = False) -> Kind:
    bounds = f' from {least:g} to {most:g}' if math.isfinite(most) else f' of at least {least:g}'
    words = 'a finite number' + (bounds if math.isfinite(least) else '')
    return Kind((int, float), words, least, most, null=null)


def positive(most: float = math.inf, *, null: bool = False) -> Kind:
    words = 'a number above 0' + (f', at most {most:g}' if math.isfinite(most) else '')
    return Kind((int, float), words, 0.0, most, above=True, null=null)


def list_of(items: Kind, *, null: bool = False) -> Kind:
    return Kind((list,), f'a list, each of it {items.words}', null=null, items=items)


def object_of(fields: Mapping[str, Kind], *, null: bool = False) -> Kind:
    return Kind((dict,), 'an object', null=null, fields=fields)


FLAG = Kind((bool,), 'true or false')
FLAG_OR_NULL = dataclasses.replace(FLAG, null=True)
TEXT = Kind((str,), f'a text of at most {MOST_TEXT} characters')
TEXT_OR_NULL = dataclasses.replace(TEXT, null=True)
SIZE, SIZE_OR_NULL = whole(), whole(null=True)
# A token, or several; some write -1 for none.
ID = Kind((int,), 'an id', -1, MOST_SIZE)
IDS = Kind((int, list), 'an id or a list of ids', -1, MOST_SIZE, null=True, items=ID)
DROPOUT = Kind((int, float, bool), 'a number from 0 to 1', 0, 1, null=True)
LENGTH = whole(most=1 << 40)  # positions: a number in sums alone

ROPE_FIELDS = {
    'rope_type': TEXT_OR_NULL,
    'type': TEXT_OR_NULL,
    'rope_theta': positive(null=True),
    'partial_rotary_factor': positive(1, null=True),
    'factor': positive(null=True),
    'original_max_position_embeddings': whole(most=1 << 40, null=True),
    'low_freq_factor': positive(null=True),
    'high_freq_factor': positive(null=True),
    'short_factor': list_of(positive(), null=True),
    'long_factor': list_of(positive(), null=True),
    'attention_factor': positive(null=True),
    'beta_fast': positive(null=True),
    'beta_slow': positive(null=True),
    'truncate': FLAG_OR_NULL,
}
ROPE = object_of(ROPE_FIELDS, null=True)
# Gemma 3 has one for each kind of its layers.
ROPES = object_of(
    ROPE_FIELDS | {'full_attention': ROPE, 'sliding_attention': ROPE},
    null=True,
)

# By their names in config.json, which mean the same in all families.
FIELDS: dict[str, Kind] = {
    'model_type': TEXT,
    'hidden_size': SIZE,
    'n_embd': SIZE,
    'num_hidden_layers': SIZE,
    'n_layer': SIZE,
    'num_attention_heads': SIZE,
    'n_head': SIZE,
    'num_key_value_heads': SIZE_OR_NULL,
    'intermediate_size': SIZE,
    'n_inner': SIZE_OR_NULL,
    'moe_intermediate_size': SIZE,
    'head_dim': SIZE_OR_NULL,
    'num_experts': SIZE,
    'num_local_experts': SIZE,
    'num_experts_per_tok': SIZE,
    'experts_per_token': SIZE,
    'vocab_size': SIZE_OR_NULL,
    'n_positions': SIZE,
    'max_position_embeddings': LENGTH,
    'original_max_position_embeddings': whole(most=1 << 40, null=True),
    'layer_norm_epsilon': number(0, 1),
    'layer_norm_eps': number(0, 1),
    'rms_norm_eps': number(0, 1),
    'tie_word_embeddings': FLAG,
    'bos_token_id': IDS,
    'eos_token_id': IDS,
    # Attention
    'attention_bias': FLAG,
    'attn_logit_softcapping': positive(null=True),
    'add_cross_attention': FLAG,
    'query_pre_attn_scalar': positive(),
    'scale_attn_by_inverse_layer_idx': FLAG,
    'scale_attn_weights': FLAG,
    'use_bidirectional_attention': FLAG_OR_NULL,
    # Windows and kinds of layers
    'layer_types': list_of(TEXT, null=True),
    'max_window_layers': whole(0),
    'no_rope_layer_interval': whole(0),
    'no_rope_layers': list_of(whole(0, 1), null=True),
    'sliding_window': whole(most=1 << 40, null=True),
    'sliding_window_pattern': SIZE_OR_NULL,
    'use_sliding_window': FLAG_OR_NULL,
    # RoPE
    'partial_rotary_factor': positive(1, null=True),
    'rope_interleaved': FLAG,
    'rope_local_base_freq': positive(null=True),
    'rope_parameters': ROPES,
    'rope_scaling': ROPES,
    'rope_theta': positive(null=True),
    'rotary_emb_base': positive(null=True),
    'rotary_pct': positive(1, null=True),
    'use_mrope': FLAG,
    # MLPs and experts
    'activation_function': TEXT,
    'decoder_sparse_step': SIZE,
    'hidden_act': TEXT,
    'hidden_activation': TEXT_OR_NULL,
    'mlp_bias': FLAG,
    'mlp_only_layers': list_of(whole(0), null=True),
    'norm_topk_prob': FLAG,
    'swiglu_alpha': number(),
    'swiglu_limit': positive(),
    'use_parallel_residual': FLAG,
    # Readout
    'final_logit_softcapping': positive(null=True),
    'quantization_config': object_of({'quant_method': TEXT_OR_NULL}, null=True),
}


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first of them, for fields of config.json that are too many, of
    another type, out of their bounds or not finite.
    """
    if len(raw) > MOST_FIELDS:
        raise ValueError(f'{CONFIG} has {len(raw):,} fields, and at most {MOST_FIELDS:,} are read')
    for name, value in raw.items():
        if len(name) > MOST_TEXT or not name.isprintable():
            raise ValueError(f'{CONFIG} has a field {shown(name)}, which is no name')
        kind = FIELDS.get(name, DROPOUT if is_dropout(name) else None)
        for wrong in kind.wrong(name, value) if kind else ():
            raise ValueError(f'{CONFIG} has {wrong}')
        for path in _not_finite(name, value):
            raise ValueError(f'{CONFIG} has {path}, which is no finite number')


def is_dropout(name: str) -> bool:
    return 'dropout' in name or name.endswith('_pdrop')


def _not_finite(path: str, value: Any) -> Iterator[str]:
    """Yields 'a.b=nan' for numbers in a value."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f'{path}={value}'
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _not_finite(f'{path}.{shown(name)}', inner)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a folder, with the text model's of one that reads images too.

    Raises:
      ValueError: where there is no such folder or file, and as `read_object` and `check_fields` do.
    """
    if not folder.is_dir():
        raise ValueError(f'{folder} is no folder; nothing is downloaded')
    raw = read_object(folder / CONFIG, MOST_CONFIG)
    check_fields(raw)
    inner = raw.get('text_config')
    if isinstance(inner, dict):
        check_fields(inner)
    return raw


def check_settings(folder: Path) -> None:
    """Checks the files beside the weights, which an import takes along as they are.

    Raises ValueError where one is no regular file, no JSON object, no UTF-8 or too large, and where
    the tokens that end a text are no ids.
    """
    for name in SETTINGS:
        if has_file(folder / name):
            settings = read_object(folder / name, MOST_SETTINGS)
            ends = settings.get('eos_token_id') if name == GENERATION else None
            for wrong in IDS.wrong('eos_token_id', ends):
                raise ValueError(f'{folder / name} has {wrong}')
    path = folder / TEMPLATE
    if has_file(path):
        try:
            read_bytes(path, MOST_TEMPLATE).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f'{path} is no UTF-8 ({error})') from error
    path = folder / TOKENIZER
    if has_file(path) and (size := path.stat().st_size) > MOST_TOKENIZER:
        raise ValueError(f'{path} has {size:,} bytes, over {MOST_TOKENIZER:,}')


def notes_on_settings(folder: Path, eos: int) -> list[str]:
    """Returns notes on files that transformers would use otherwise.

    Args:
      folder: as `check_settings` takes it.
      eos: the id that ends a document here.

    Returns:
      A note for an adapter, and one where the model's own settings end a text with other tokens.
    """
    notes = []
    if has_file(folder / ADAPTER):
        notes.append(
            f'{ADAPTER} is there: transformers adds that adapter to the weights, and this import '
            'has the weights alone. Merge it first, with merge_and_unload of PEFT, if it counts'
        )
    if has_file(folder / GENERATION):
        ends = read_object(folder / GENERATION, MOST_SETTINGS).get('eos_token_id')
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if ends and eos not in ends:
            notes.append(
                f'{GENERATION} ends a text with eos_token_id={shown(ends)}, and documents end with '
                f'{eos} here; a chat of eval.serve ends with either'
            )
    return notes
