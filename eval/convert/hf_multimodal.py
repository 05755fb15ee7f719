"""Text models inside of models that read images too, as Gemma 3 of 4B and more.

The text model's config.json is the field text_config there, and its tensors have names that begin
with language_model. What reads images is left out.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from eval.convert.hf_config import FILE
from eval.convert.safetensors import StoredTensor

# The class that fills in what a text_config leaves out: Gemma3TextConfig of transformers.
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
# model_type of the whole -> that of the text model, and the fields of its class.
TEXT_MODELS = {'gemma3': ('gemma3_text', GEMMA3_TEXT)}
# Fields of the whole that are of the text model too.
SHARED_FIELDS = ('bos_token_id', 'eos_token_id', 'tie_word_embeddings', 'quantization_config')
# Beginnings of names, as transformers 4 and 5 write them -> those of the text model alone.
PREFIXES = {
    'model.language_model.': 'model.',
    'language_model.model.': 'model.',
    'language_model.lm_head.': 'lm_head.',
}
IMAGE_MODULES = ('vision_tower', 'multi_modal_projector')


def find_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the text model; `raw` itself where that is one.

    Raises ValueError where the whole has no text_config.
    """
    if raw.get('model_type') not in TEXT_MODELS:
        return raw
    name, of_class = TEXT_MODELS[raw['model_type']]
    own = raw.get('text_config')
    if not isinstance(own, dict):
        raise ValueError(f'{FILE} has model_type={raw["model_type"]!r} and no text_config')
    shared = {field: raw[field] for field in SHARED_FIELDS if raw.get(field) is not None}
    return of_class | shared | own | {'model_type': name}


def select_text_tensors(
    raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns (the tensors of the text model by its own names, notes of what was left out).

    raw: the config.json of the whole.
    """
    if raw.get('model_type') not in TEXT_MODELS:
        return dict(stored), []
    kept, left = {}, Counter()
    for name, where in stored.items():
        part = name.removeprefix('model.').partition('.')[0]
        if part in IMAGE_MODULES:
            left[part] += 1
            continue
        start = next((one for one in PREFIXES if name.startswith(one)), '')
        kept[PREFIXES.get(start, '') + name.removeprefix(start)] = where
    said = ', '.join(f'{part} ({count} tensors)' for part, count in left.items())
    return kept, [f'left out, as it reads images: {said}'] if left else []
