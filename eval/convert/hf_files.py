"""Reads model files of other programs: only regular files with bounded sizes and typed fields.

A folder may come from anyone. A pipe in place of a file would block, a size of 10**9 would be
allocated, and a text in place of a number would end as an error of some library. Each field of
config.json that a family takes therefore has a `FieldKind` here, which is checked before the family
reads the field. Other fields must be finite numbers, texts or flags; the computation does not
depend on them.
"""

import dataclasses
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.data.chat_template import MAX_TEMPLATE_BYTES
from lm.data.tokenizer_files import (
    FILES_BESIDE,
    GENERATION_FILE,
    LIBRARY_FILE,
    TEMPLATE_FILE,
    list_files_beside,
)
from lm.record.foreign_weights import explain_foreign_weights
from lm.storage.files import open_regular, parse_json

CONFIG, ADAPTER = 'config.json', 'adapter_config.json'
MAX_CONFIG_BYTES = 1 << 24  # files on the Hub have some 1,000, with long factors of RoPE 5,000
MAX_SETTINGS_BYTES = 1 << 26  # a tokenizer_config.json with 100,000 added tokens has 20 MB
MAX_TOKENIZER_BYTES = 1 << 28  # a tokenizer.json with a vocabulary of 262,000 has 33 MB
MAX_FIELDS = 1000  # of an object in config.json; id2label is not read
MAX_DIGITS = 40  # of a whole number; model_max_length of many tokenizers is 10**30
MAX_SIZE = (1 << 31) - 1
MAX_TEXT = 200  # characters of a choice
MAX_REPR = 60  # characters of a value in an error

_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = MAX_REPR
_short_repr.maxlevel = 2


def format_value(value: Any) -> str:
    """Returns a value as a short line for an error."""
    return _short_repr.repr(value)


def has_file(path: Path) -> bool:
    """Whether there is a regular file, perhaps behind a link, as in the cache of the Hub.

    Raises:
      ValueError: for anything else with this name: a pipe, a folder, a dangling link. It is not
        opened, since opening a pipe blocks until somebody writes to it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if os.path.lexists(path):
            raise ValueError(f'{path} is a broken link ({error.strerror})') from None
        return False
    if not stat.S_ISREG(mode):
        raise ValueError(f'{path} must be a regular file')
    return True


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises ValueError if the file has more than `max_bytes`, is missing, or is not a regular file.
    """
    if not has_file(path):
        raise ValueError(f'{path.parent} contains no {path.name}')
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(
            f'{path} is too large: files of this kind have at most {max_bytes:,} bytes'
        )
    return content


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Returns the object in a JSON file. Numbers with more than MAX_DIGITS digits are infinite.

    Raises:
      ValueError: as `read_bytes` does, and for anything but a JSON object: not UTF-8, truncated,
        nested deeper than `MAX_NESTING`, or with a field that occurs twice with two values.
    """
    content = read_bytes(path, max_bytes)
    try:
        value = parse_json(content, parse_int=_parse_integer, object_pairs_hook=_refuse_duplicates)
    except ValueError as error:
        raise ValueError(f'{path} is not valid JSON ({error})') from error
    if not isinstance(value, dict):
        raise ValueError(f'{path} must contain a JSON object')
    return value


def _parse_integer(text: str) -> int | float:
    # int() refuses more than 4,300 digits. Infinity fails the check for finite numbers.
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        # The same value twice is harmless. repr tells 1 from true and 1.0, which == does not.
        for name, value in pairs:
            if repr(merged[name]) != repr(value):
                raise ValueError(f'{format_value(name)} occurs twice, with different values')
    return merged


@dataclasses.dataclass(frozen=True)
class FieldKind:
    """The values that a field may have.

    types: Python types, compared exactly, so that a bool is not an int. description: for an error.
    minimum, maximum: of numbers. is_exclusive: whether numbers must be above `minimum`. nullable:
    whether null is allowed. element: the kind of the elements of a list. fields: the kinds of an
    object's fields; a name that is not listed may have any value. Texts have at most MAX_TEXT
    characters.
    """

    types: tuple[type, ...]
    description: str
    minimum: float = -math.inf
    maximum: float = math.inf
    is_exclusive: bool = False
    nullable: bool = False
    element: 'FieldKind | None' = None
    fields: Mapping[str, 'FieldKind'] | None = None

    def find_errors(self, path: str, value: Any) -> Iterator[str]:
        """Yields the errors of a value and of the values in it. path: of the field."""
        if value is None and self.nullable:
            return
        if type(value) not in self.types or not self._is_in_bounds(value):
            null = ', or null' if self.nullable else ''
            yield f'{path} must be {self.description}{null}; got {format_value(value)}'
        elif isinstance(value, list) and self.element:
            for i, inner in enumerate(value):
                yield from self.element.find_errors(f'{path}[{i}]', inner)
        elif isinstance(value, dict) and self.fields is not None:
            for name, inner in value.items():
                if name in self.fields:
                    yield from self.fields[name].find_errors(f'{path}.{name}', inner)

    def _is_in_bounds(self, value: Any) -> bool:
        if isinstance(value, int | float):
            is_above = self.minimum < value if self.is_exclusive else self.minimum <= value
            return math.isfinite(value) and is_above and value <= self.maximum
        return not isinstance(value, str) or len(value) <= MAX_TEXT


def integer_kind(minimum: int = 1, maximum: int = MAX_SIZE, nullable: bool = False) -> FieldKind:
    """Returns the kind of integers in a range.

    Args:
      minimum: the least value.
      maximum: the largest value.
      nullable: whether null is allowed.
    """
    return FieldKind(
        (int,), f'a whole number from {minimum} to {maximum}', minimum, maximum, nullable=nullable
    )


def number_kind(
    minimum: float = -math.inf, maximum: float = math.inf, *, nullable: bool = False
) -> FieldKind:
    """Returns the kind of finite numbers in a range.

    Args:
      minimum: the least value.
      maximum: the largest value.
      nullable: whether null is allowed.
    """
    bounds = (
        f' from {minimum:g} to {maximum:g}'
        if math.isfinite(maximum)
        else f' of at least {minimum:g}'
    )
    words = 'a finite number' + (bounds if math.isfinite(minimum) else '')
    return FieldKind((int, float), words, minimum, maximum, nullable=nullable)


def positive_kind(maximum: float = math.inf, *, nullable: bool = False) -> FieldKind:
    words = 'a number above 0' + (f' and at most {maximum:g}' if math.isfinite(maximum) else '')
    return FieldKind((int, float), words, 0.0, maximum, is_exclusive=True, nullable=nullable)


def list_kind(element: FieldKind, *, nullable: bool = False) -> FieldKind:
    return FieldKind(
        (list,),
        f'a list with elements that are {element.description}',
        nullable=nullable,
        element=element,
    )


def object_kind(fields: Mapping[str, FieldKind], *, nullable: bool = False) -> FieldKind:
    return FieldKind((dict,), 'an object', nullable=nullable, fields=fields)


FLAG = FieldKind((bool,), 'true or false')
FLAG_OR_NULL = dataclasses.replace(FLAG, nullable=True)
TEXT = FieldKind((str,), f'text of at most {MAX_TEXT} characters')
TEXT_OR_NULL = dataclasses.replace(TEXT, nullable=True)
SIZE, SIZE_OR_NULL = integer_kind(), integer_kind(nullable=True)
# A token, or several; some write -1 for none.
ID = FieldKind((int,), 'an id', -1, MAX_SIZE)
IDS = FieldKind((int, list), 'an id or a list of ids', -1, MAX_SIZE, nullable=True, element=ID)
DROPOUT = FieldKind((int, float, bool), 'a number from 0 to 1', 0, 1, nullable=True)
LENGTH = integer_kind(maximum=1 << 40)  # positions are never allocated by this number

ROPE_FIELDS = {
    'rope_type': TEXT_OR_NULL,
    'type': TEXT_OR_NULL,
    'rope_theta': positive_kind(nullable=True),
    'partial_rotary_factor': positive_kind(1, nullable=True),
    'factor': positive_kind(nullable=True),
    'original_max_position_embeddings': integer_kind(maximum=1 << 40, nullable=True),
    'low_freq_factor': positive_kind(nullable=True),
    'high_freq_factor': positive_kind(nullable=True),
    'short_factor': list_kind(positive_kind(), nullable=True),
    'long_factor': list_kind(positive_kind(), nullable=True),
    'attention_factor': positive_kind(nullable=True),
    'mscale': number_kind(0, nullable=True),
    'mscale_all_dim': number_kind(0, nullable=True),
    'beta_fast': positive_kind(nullable=True),
    'beta_slow': positive_kind(nullable=True),
    'truncate': FLAG_OR_NULL,
}
ROPE = object_kind(ROPE_FIELDS, nullable=True)
# Gemma 3 has a separate object for each kind of layer.
ROPES = object_kind(
    ROPE_FIELDS | {'full_attention': ROPE, 'sliding_attention': ROPE},
    nullable=True,
)

# By their names in config.json, which mean the same in all families.
FIELDS: dict[str, FieldKind] = {
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
    'original_max_position_embeddings': integer_kind(maximum=1 << 40, nullable=True),
    'layer_norm_epsilon': number_kind(0, 1),
    'layer_norm_eps': number_kind(0, 1),
    'norm_eps': number_kind(0, 1),
    'norm_epsilon': number_kind(0, 1),
    'norm_type': TEXT,
    'rms_norm_eps': number_kind(0, 1),
    'tie_word_embeddings': FLAG,
    'bos_token_id': IDS,
    'eos_token_id': IDS,
    # Attention
    'attention_bias': FLAG,
    'attention_multiplier': positive_kind(),
    'attention_out_bias': FLAG,
    'attention_softmax_in_fp32': FLAG,
    'attn_logit_softcapping': positive_kind(nullable=True),
    'add_cross_attention': FLAG,
    'clip_qkv': positive_kind(nullable=True),
    'query_pre_attn_scalar': positive_kind(),
    'scale_attention_softmax_in_fp32': FLAG,
    'scale_attn_by_inverse_layer_idx': FLAG,
    'scale_attn_weights': FLAG,
    'use_bidirectional_attention': FLAG_OR_NULL,
    # Windows and kinds of layers
    'layer_types': list_kind(TEXT, nullable=True),
    'max_window_layers': integer_kind(0),
    'no_rope_layer_interval': integer_kind(0),
    'no_rope_layers': list_kind(integer_kind(0, 1), nullable=True),
    'sliding_window': integer_kind(0, maximum=1 << 40, nullable=True),
    'sliding_window_pattern': SIZE_OR_NULL,
    'use_sliding_window': FLAG_OR_NULL,
    # Recurrences
    'full_attention_interval': SIZE,
    'linear_a_log_max': number_kind(),
    'linear_a_log_min': number_kind(),
    'linear_allow_neg_eigval': FLAG,
    'linear_conv_kernel_dim': SIZE,
    'linear_dt_init_floor': number_kind(0),
    'linear_dt_max': number_kind(0),
    'linear_dt_min': number_kind(0),
    'linear_key_head_dim': SIZE_OR_NULL,
    'linear_num_key_heads': SIZE_OR_NULL,
    'linear_num_value_heads': SIZE_OR_NULL,
    'linear_value_head_dim': SIZE_OR_NULL,
    # RoPE
    'partial_rotary_factor': positive_kind(1, nullable=True),
    'rope_interleaved': FLAG,
    'rope_local_base_freq': positive_kind(nullable=True),
    'rope_parameters': ROPES,
    'rope_scaling': ROPES,
    'rope_theta': positive_kind(nullable=True),
    'rotary': FLAG,
    'rotary_dim': SIZE,
    'rotary_emb_base': positive_kind(nullable=True),
    'rotary_pct': positive_kind(1, nullable=True),
    'use_mrope': FLAG,
    # MLPs and experts
    'activation_function': TEXT,
    'decoder_sparse_step': SIZE,
    'first_k_dense_replace': integer_kind(0),
    'hidden_act': TEXT,
    'hidden_activation': TEXT_OR_NULL,
    'mlp_bias': FLAG,
    'mlp_only_layers': list_kind(integer_kind(0), nullable=True),
    'mlp_type': TEXT,
    'moe_k': SIZE,
    'moe_layer_end_index': integer_kind(-1),
    'moe_layer_interval': SIZE,
    'moe_layer_start_index': integer_kind(0),
    'moe_norm_min': number_kind(0),
    'moe_num_experts': SIZE,
    'moe_num_shared_experts': integer_kind(0),
    'n_group': SIZE,
    'n_routed_experts': SIZE,
    'num_mtp_layers': integer_kind(0),
    'num_nextn_predict_layers': integer_kind(0),
    'n_shared_experts': integer_kind(0),
    'norm_topk_prob': FLAG,
    'qkv_bias': FLAG,
    'routed_scaling_factor': positive_kind(),
    'shared_expert_intermediate_size': integer_kind(0),
    'swiglu_alpha': number_kind(),
    'swiglu_limit': positive_kind(),
    'topk_group': SIZE,
    'use_bias': FLAG,
    'use_parallel_residual': FLAG,
    'use_qk_norm': FLAG,
    # Factors of weights
    'embedding_multiplier': positive_kind(),
    'logits_scaling': positive_kind(),
    'residual_multiplier': positive_kind(),
    # Readout
    'final_logit_softcapping': positive_kind(nullable=True),
    'quantization_config': object_kind({'quant_method': TEXT_OR_NULL}, nullable=True),
}


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raises ValueError for the first invalid field of config.json, or for too many fields.

    A field is invalid if it has another type, is out of its bounds or is not finite.
    """
    if len(raw) > MAX_FIELDS:
        raise ValueError(f'{CONFIG} must have at most {MAX_FIELDS:,} fields; got {len(raw):,}')
    for name, value in raw.items():
        if len(name) > MAX_TEXT or not name.isprintable():
            raise ValueError(f'{CONFIG} has an invalid field name, {format_value(name)}')
        kind = FIELDS.get(name, DROPOUT if is_dropout(name) else None)
        for wrong in kind.find_errors(name, value) if kind else ():
            raise ValueError(f'{CONFIG}: {wrong}')
        for path in _find_nonfinite(name, value):
            raise ValueError(f'{CONFIG} has {path}; numbers must be finite')


def is_dropout(name: str) -> bool:
    return 'dropout' in name or name.endswith('_pdrop')


def _find_nonfinite(path: str, value: Any) -> Iterator[str]:
    """Yields 'a.b=nan' for each number in a value that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f'{path}={value}'
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in pairs:
            yield from _find_nonfinite(f'{path}.{format_value(name)}', inner)


def read_config(
    folder: Path, check_type: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Returns the config.json of a folder, after checking it and the text_config in it.

    Args:
      folder: of transformers.
      check_type: is called before the fields are checked, which mean other things in models that
        are not read.

    Raises:
      ValueError: if there is no such folder or file, and as `read_object` and `check_fields` do.
    """
    if not folder.is_dir():
        explanation = explain_foreign_weights(folder) or (
            'download the model first and pass its folder'
        )
        raise ValueError(f'{folder} is not a local folder; {explanation}')
    if not has_file(folder / CONFIG) and (explanation := explain_foreign_weights(folder)):
        raise ValueError(f'{folder} contains no {CONFIG}; {explanation}')
    raw = read_object(folder / CONFIG, MAX_CONFIG_BYTES)
    if check_type is not None:
        check_type(raw)
    check_fields(raw)
    inner = raw.get('text_config')
    if isinstance(inner, dict):
        check_fields(inner)
    return raw


def check_settings(folder: Path) -> None:
    """Checks the files beside the weights, which an import copies.

    Raises ValueError if a file is not a regular file, not a JSON object, not UTF-8 or too large,
    and if the tokens that end a text are not ids.
    """
    for name in (name for name in FILES_BESIDE if name.endswith('.json')):
        if has_file(folder / name):
            settings = read_object(folder / name, MAX_SETTINGS_BYTES)
            ends = settings.get('eos_token_id') if name == GENERATION_FILE else None
            for wrong in IDS.find_errors('eos_token_id', ends):
                raise ValueError(f'{folder / name}: {wrong}')
    templates = [name for name in list_files_beside(folder) if name.endswith('.jinja')]
    for path in (folder / name for name in dict.fromkeys([TEMPLATE_FILE, *templates])):
        if not has_file(path):
            continue
        try:
            read_bytes(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f'{path} is not valid UTF-8 ({error})') from error
    path = folder / LIBRARY_FILE
    if has_file(path) and (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ValueError(f'{path} must have at most {MAX_TOKENIZER_BYTES:,} bytes; got {size:,}')


def list_settings_notes(folder: Path, eos: int) -> list[str]:
    """Returns notes on files that transformers would use differently.

    Args:
      folder: the model's.
      eos: the id that ends a document here.

    Returns:
      A note for an adapter, and a note if the model's settings end a text with other tokens.
    """
    notes = []
    if has_file(folder / ADAPTER):
        notes.append(
            f"the adapter in {ADAPTER} was not imported. To include it, merge it first with PEFT's "
            'merge_and_unload'
        )
    if has_file(folder / GENERATION_FILE):
        ends = read_object(folder / GENERATION_FILE, MAX_SETTINGS_BYTES).get('eos_token_id')
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if ends and eos not in ends:
            notes.append(
                f'{GENERATION_FILE} has eos_token_id={format_value(ends)}, but documents end with '
                f'{eos} here; generated texts end at any of these tokens'
            )
    return notes
