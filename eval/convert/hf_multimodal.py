"""Text models inside models that also read images: Gemma 3 of 4B and more, and Qwen 3.5.

The text model's config.json is the field text_config, and its tensors have names that begin with
language_model. Everything that reads images is left out.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from eval.convert.hf_config import FILE
from eval.convert.safetensors import StoredTensor

# Defaults of a text_config, as in Gemma3TextConfig of transformers.
GEMMA3_TEXT = {
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'max_position_embeddings': 131_072,
    'eos_token_id': 1,
    'bos_token_id': 2,
}
# As in Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
QWEN3_5_TEXT = {
    'hidden_size': 4096,
    'intermediate_size': 12_288,
    'num_hidden_layers': 32,
    'num_attention_heads': 16,
    'num_key_value_heads': 4,
    'max_position_embeddings': 32_768,
}
QWEN3_5_MOE_TEXT = {name: x for name, x in QWEN3_5_TEXT.items() if name != 'intermediate_size'}
QWEN3_5_MOE_TEXT |= {'hidden_size': 2048, 'num_hidden_layers': 40, 'num_key_value_heads': 2}
# model_type of the whole model -> model_type of the text model, and the defaults of its class.
TEXT_MODELS = {
    'gemma3': ('gemma3_text', GEMMA3_TEXT),
    'qwen3_5': ('qwen3_5_text', QWEN3_5_TEXT),
    'qwen3_5_moe': ('qwen3_5_moe_text', QWEN3_5_MOE_TEXT),
}
# Fields of the whole model that apply to the text model too.
SHARED_FIELDS = ('bos_token_id', 'eos_token_id', 'tie_word_embeddings', 'quantization_config')
# Prefixes of names, as transformers 4 and 5 write them -> prefixes in a text model.
PREFIXES = {
    'model.language_model.': 'model.',
    'language_model.model.': 'model.',
    'language_model.lm_head.': 'lm_head.',
}
IMAGE_MODULES = ('vision_tower', 'multi_modal_projector', 'visual')


def find_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the text model; `raw` itself if it has no other modality.

    Raises ValueError if a multimodal config has no text_config.
    """
    if raw.get('model_type') not in TEXT_MODELS:
        return raw
    name, class_defaults = TEXT_MODELS[raw['model_type']]
    text_fields = raw.get('text_config')
    if not isinstance(text_fields, dict):
        raise ValueError(f'{FILE} with model_type={raw["model_type"]!r} must have a text_config')
    shared = {field: raw[field] for field in SHARED_FIELDS if raw.get(field) is not None}
    # A text_config omits fields with the default of its class.
    return class_defaults | shared | text_fields | {'model_type': name}


def select_text_tensors(
    raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns (the tensors of the text model by its own names, notes on tensors that are left out).

    raw: the config.json of the whole model.
    """
    if raw.get('model_type') not in TEXT_MODELS:
        return dict(stored), []
    text_tensors, left_out = {}, Counter()
    for name, tensor in stored.items():
        part = name.removeprefix('model.').partition('.')[0]
        if part in IMAGE_MODULES:
            left_out[part] += 1
            continue
        prefix = next((candidate for candidate in PREFIXES if name.startswith(candidate)), '')
        text_tensors[PREFIXES.get(prefix, '') + name.removeprefix(prefix)] = tensor
    counts = ', '.join(f'{part} ({count} tensors)' for part, count in left_out.items())
    return text_tensors, [f'skipped the modules that read images: {counts}'] if left_out else []
