"""The families that are read and written, by model_type of config.json."""

from collections.abc import Mapping
from typing import Any

from eval.convert.families.experts import GPT_OSS, MIXTRAL, OLMOE, QWEN3_MOE
from eval.convert.families.family import Family
from eval.convert.families.gemma import GEMMA1, GEMMA2, GEMMA3
from eval.convert.families.gpt import GPT2, GPT_NEOX, NEMOTRON, STARCODER2
from eval.convert.families.hybrid import OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from eval.convert.families.interleaved import ERNIE4_5, GLM, GLM4, GPTJ, HELIUM
from eval.convert.families.llama import (
    ARCEE,
    GRANITE,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from eval.convert.families.routed import DOTS1, ERNIE4_5_MOE, GLM4_MOE, QWEN2_MOE, SOLAR_OPEN
from eval.convert.hf_multimodal import TEXT_MODELS
from eval.convert.hf_unread import describe_unread

# By model_type. Export takes the first family that fits.
FAMILIES = {
    'gpt2': GPT2,
    'llama': LLAMA,
    'mistral': MISTRAL,
    'qwen2': QWEN2,
    'qwen3': QWEN3,
    'olmo2': OLMO2,
    'phi3': PHI3,
    'gemma2': GEMMA2,
    'gemma3_text': GEMMA3,
    'smollm3': SMOLLM3,
    'gpt_neox': GPT_NEOX,
    'mixtral': MIXTRAL,
    'qwen3_moe': QWEN3_MOE,
    'gpt_oss': GPT_OSS,
    'ministral': MINISTRAL,
    'gemma': GEMMA1,
    'olmo3': OLMO3,
    'olmoe': OLMOE,
    'seed_oss': SEED_OSS,
    'granite': GRANITE,
    'arcee': ARCEE,
    'starcoder2': STARCODER2,
    'nemotron': NEMOTRON,
    'gptj': GPTJ,
    'glm': GLM,
    'glm4': GLM4,
    'helium': HELIUM,
    'ernie4_5': ERNIE4_5,
    'qwen3_next': QWEN3_NEXT,
    'qwen3_5_text': QWEN3_5,
    'qwen3_5_moe_text': QWEN3_5_MOE,
    'glm4_moe': GLM4_MOE,
    'dots1': DOTS1,
    'ernie4_5_moe': ERNIE4_5_MOE,
    'qwen2_moe': QWEN2_MOE,
    'solar_open': SOLAR_OPEN,
    'olmo_hybrid': OLMO_HYBRID,
}


def find_family(raw: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ValueError for another type: it says why."""
    if 'model_type' not in raw:
        raise ValueError('config.json must have the field model_type')
    if (name := str(raw['model_type'])) not in FAMILIES:
        raise ValueError(describe_unread(raw, {*FAMILIES, *TEXT_MODELS}))
    return FAMILIES[name]


# Scripts of users import the earlier name.
family_of = find_family
