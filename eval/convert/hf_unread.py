"""Types of models in transformers that are not read, and the part that each lacks here.

The reasons are of the modelling code of transformers 5.24. A type that becomes a family leaves this
table.
"""

from collections.abc import Collection, Mapping
from typing import Any

# What our models lack -> model types.
_LACKING_PARTS = {
    'a state-space mixer in place of attention': 'mamba mamba2 falcon_mamba',
    'a recurrence in place of attention': 'rwkv xlstm',
    'state-space layers among layers of attention': (
        'bamba falcon_h1 granitemoehybrid jamba nemotron_h zamba zamba2'
    ),
    'recurrent layers (RG-LRU) among layers of attention': 'recurrent_gemma',
    'short convolutions among layers of attention': 'lfm2 lfm2_moe',
    'layers of linear attention with a delta rule': (
        'kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next'
    ),
    'layers of lightning attention': 'minimax',
    'multi-head latent attention (kv_lora_rank)': (
        'axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash '
        'minicpm3 mistral4 sarvam_mla youtu'
    ),
    'an expert that all tokens share, beside the chosen ones': (
        'dots1 ernie4_5_moe glm4_moe granitemoeshared hunyuan_v1_moe qwen2_moe'
    ),
    'AltUp and LAuReL, and inputs of each layer': 'gemma3n',
    'inputs of each layer (per_layer_input), and an encoder of images': 'gemma4',
    'attention within chunks, and an expert that all tokens share': 'llama4',
    'an encoder, and attention of the decoder to it': (
        'bart blenderbot led longt5 m2m_100 marian mbart mt5 pegasus prophetnet '
        'switch_transformers t5 umt5 whisper'
    ),
    'attention to both sides: it predicts masked tokens and not the next': (
        'albert bert camembert deberta deberta_v2 distilbert electra modernbert mpnet roberta '
        'xlm_roberta'
    ),
    'an encoder of images': (
        'aya_vision cohere2_vision idefics3 internvl llava llava_next llava_onevision mistral3 '
        'mllama paligemma qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe smolvlm'
    ),
}
LACKING_PARTS: dict[str, str] = {
    name: part for part, names in _LACKING_PARTS.items() for name in names.split()
}
# Types that transformers has no code of its own for.
FOREIGN_CODE = (
    'baichuan chatglm deepseek internlm internlm2 minicpm orion phi-msft phi3_v qwen rwkv5'
)
# Types of which the importer has no table -> what such a table has to convert.
LACKING_TABLES = {
    'bloom': 'ALiBi, a norm of the embeddings, and queries, keys and values interleaved by head',
    'codegen': 'RoPE that pairs neighbouring features, and a bias of the logits',
    'cohere': 'RoPE that pairs neighbouring features, and a factor of the logits (logit_scale)',
    'falcon': 'ALiBi or RoPE, one or two norms of parallel parts, and grouped queries in a tensor',
    'gpt_bigcode': 'heads that share keys and values in a tensor with all queries',
    'gpt_neo': 'scores without a factor, and a bias of the output of attention alone',
    'mpt': 'ALiBi, LayerNorm without biases, and queries that may be clipped (clip_qkv)',
    'opt': 'learned positions that begin at 2, and norms before or after a part',
    'phi': 'one norm of parallel parts, a part of each head turned, and a bias of the logits',
    'stablelm': 'LayerNorm with a part of each head turned, and norms of queries by head',
}


def describe_unread(raw: Mapping[str, Any], read_types: Collection[str]) -> str:
    """Returns the error for a config.json whose model_type is not read.

    It names the part that our models lack, or the types that are read.

    Args:
      raw: the config.json.
      read_types: the types that are read.
    """
    name = str(raw['model_type'])
    prefix = f'config.json has model_type={name[:60]!r}, which is not read'
    if part := LACKING_PARTS.get(name):
        return f'{prefix}: our models lack {part}'
    if table := LACKING_TABLES.get(name):
        return f'{prefix}: the importer has no table of its tensors and fields ({table})'
    is_foreign = bool(raw.get('auto_map')) or name in FOREIGN_CODE.split()
    reason = ': its code lies beside the weights and is not run' if is_foreign else ''
    return f'{prefix}{reason}. Types that are read: {", ".join(sorted(read_types))}'
