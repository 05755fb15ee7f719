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
    'linear attention with a decay for each feature (KDA), and latent attention': 'kimi_linear',
    'layers of lightning attention': 'minimax',
    'multi-head latent attention (kv_lora_rank)': (
        'axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash '
        'bailing_hybrid minicpm3 mistral4 sarvam_mla youtu'
    ),
    'AltUp, LAuReL and per-layer inputs': 'gemma3n',
    'per-layer inputs (per_layer_input) and an image encoder': 'gemma4',
    'attention within chunks, and a shared expert': 'llama4',
    'an encoder and cross-attention': (
        'bart blenderbot led longt5 m2m_100 marian mbart mt5 pegasus prophetnet '
        'switch_transformers t5 umt5 whisper'
    ),
    'bidirectional attention (it predicts masked tokens)': (
        'albert bert camembert deberta deberta_v2 distilbert electra modernbert mpnet roberta '
        'xlm_roberta'
    ),
    'an image encoder': (
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
    'exaone_moe': 'windows, RoPE in windowed layers alone, and experts with a bias of the choice',
    'granitemoeshared': 'multipliers, and a shared expert in fused tensors',
    'hunyuan_v1_moe': 'norms of queries and keys behind RoPE, and a shared expert',
    'hy_v3': 'a router with a bias of the choice, and a shared expert',
    'minimax_m2': 'norms of queries over all heads, RoPE on a part, and experts with a bias',
    'bloom': 'ALiBi, a norm of the embeddings, and queries, keys and values interleaved by head',
    'codegen': 'RoPE on neighbouring features, and a bias of the logits',
    'cohere': 'RoPE on neighbouring features, and a factor of the logits (logit_scale)',
    'falcon': 'ALiBi or RoPE, one or two norms of parallel sublayers, fused grouped queries',
    'gpt_bigcode': 'multi-query attention with queries, keys and values in one tensor',
    'gpt_neo': 'attention scores without a factor, and a bias of the attention output only',
    'mpt': 'ALiBi, LayerNorm without biases, and optional clipping (clip_qkv)',
    'opt': 'learned positions that begin at 2, and norms before or after a sublayer',
    'phi': 'one norm for parallel sublayers, RoPE on a part of each head, a bias of the logits',
    'stablelm': 'LayerNorm, RoPE on a part of each head, and norms of queries by head',
}


def describe_unread(raw: Mapping[str, Any], read_types: Collection[str]) -> str:
    """Returns the error for a config.json whose model_type is not read.

    It names the part that our models lack, or the types that are read.

    Args:
      raw: the config.json.
      read_types: the types that are read.
    """
    name = str(raw['model_type'])
    prefix = f'config.json has model_type={name[:60]!r}, which is not supported'
    if part := LACKING_PARTS.get(name):
        return f'{prefix}: our models lack {part}'
    if table := LACKING_TABLES.get(name):
        return f'{prefix}: the importer has no table of its tensors and fields ({table})'
    is_foreign = bool(raw.get('auto_map')) or name in FOREIGN_CODE.split()
    reason = ': its code comes with the weights and is not run' if is_foreign else ''
    return f'{prefix}{reason}. Supported: {", ".join(sorted(read_types))}'
