"""Contract: the fields of config.json of published models are read, or what they lack is named.

The values are facts about the models. They were taken from the tables of configs in mlc-ai/mlc-llm
(python/mlc_llm/model/model_preset.py) and AI-Hypercomputer/maxtext
(src/maxtext/checkpoint_conversion/utils/hf_model_configs.py).
"""

import json
import math
from pathlib import Path

import pytest

from configs import default
from eval.convert.families import FAMILIES, find_family
from eval.convert.fold import build_cpu_learner
from eval.convert.hf_files import check_fields
from eval.convert.import_hf import SCALE, import_folder, param_shapes, recipe_for
from lm.model.check import check

SIZES = (
    'model_type',
    'hidden_size',
    'num_hidden_layers',
    'num_attention_heads',
    'num_key_value_heads',
    'intermediate_size',
    'vocab_size',
)
LLAMA3 = {
    'rope_type': 'llama3',
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
}
YARN = {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
    'rope_theta': 150_000,
}
QWEN2 = {'max_window_layers': 24, 'sliding_window': 32_768, 'use_sliding_window': False}
QWEN2 |= {'rope_theta': 1e6, 'tie_word_embeddings': True}
QWEN3 = {'head_dim': 128, 'max_window_layers': 28, 'sliding_window': None, 'rope_scaling': None}
QWEN3 |= {'attention_bias': False, 'rope_theta': 1_000_000, 'use_sliding_window': False}
GEMMA = {'head_dim': 256, 'query_pre_attn_scalar': 256, 'cache_implementation': 'hybrid'}
GEMMA |= {'hidden_activation': 'gelu_pytorch_tanh', 'attention_bias': False}
PHI = {'original_max_position_embeddings': 4096, 'max_position_embeddings': 131_072}
PHI |= {'sliding_window': 262_144, 'attention_bias': False, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
PHI |= {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0] * 48, 'long_factor': [2.0] * 48}}
CODER = {'decoder_sparse_step': 1, 'mlp_only_layers': [], 'moe_intermediate_size': 2560}
CODER |= {'num_experts': 160, 'num_experts_per_tok': 8, 'norm_topk_prob': True, 'head_dim': 128}
CODER |= {'qkv_bias': False, 'shared_expert_intermediate_size': 0, 'use_qk_norm': True}
GPT_OSS = {'head_dim': 64, 'num_local_experts': 32, 'num_experts_per_tok': 4, 'swiglu_limit': 7.0}
GPT_OSS |= {'experts_per_token': 4, 'initial_context_length': 4096, 'sliding_window': 128}
GPT_OSS |= {'layer_types': ['sliding_attention', 'full_attention'] * 12, 'rope_scaling': YARN}
GPT_OSS |= {'attention_bias': True, 'rope_theta': 150_000, 'router_aux_loss_coef': 0.9}
NEOX = {'rotary_emb_base': 10_000, 'rotary_pct': 1.0, 'use_parallel_residual': False}
SMOLLM = {'is_llama_config': True, 'rope_interleaved': False, 'tie_word_embeddings': True}
SMOLLM |= {'rope_theta': 100_000, 'transformers.js_config': {'kv_cache_dtype': {'fp16': 'float16'}}}
# {model: (its SIZES, further fields, its parameters; 0: not counted here)}
READ = {
    'LLaMA 2 7B': (
        ('llama', 4096, 32, 32, 32, 11_008, 32_000),
        {'rope_scaling': None, 'pretraining_tp': 1, 'torch_dtype': 'float16', 'pad_token_id': 0},
        6_738_415_616,
    ),
    'LLaMA 2 70B': (('llama', 8192, 80, 64, 8, 28_672, 32_000), {}, 0),
    'Code Llama 34B': (('llama', 8192, 48, 64, 8, 22_016, 32_016), {'rope_theta': 1_000_000}, 0),
    'TinyLlama': (('llama', 2048, 22, 32, 4, 5632, 32_000), {'rope_theta': 10_000.0}, 0),
    'LLaMA 3.2 1B': (
        ('llama', 2048, 16, 32, 8, 8192, 128_256),
        {'head_dim': 64, 'rope_scaling': LLAMA3, 'rope_theta': 5e5, 'tie_word_embeddings': True},
        1_235_814_400,
    ),
    'SmolLM2 135M': (('llama', 576, 30, 9, 3, 1536, 49_152), SMOLLM, 134_515_008),
    'Mistral 7B': (
        ('mistral', 4096, 32, 32, 8, 14_336, 32_768),
        {'sliding_window': None, 'rope_theta': 1e6, 'max_position_embeddings': 32_768},
        0,
    ),
    'Mixtral 8x22B': (
        ('mixtral', 6144, 56, 48, 8, 16_384, 32_768),
        {'num_local_experts': 8, 'num_experts_per_tok': 2, 'sliding_window': None}
        | {'output_router_logits': False, 'router_aux_loss_coef': 0.001},
        0,
    ),
    'Qwen 2 0.5B': (('qwen2', 896, 24, 14, 2, 4864, 151_936), QWEN2, 494_032_768),
    'Qwen 2.5 3B': (
        ('qwen2', 2048, 36, 16, 2, 11_008, 151_936),
        QWEN2 | {'max_window_layers': 70},
        0,
    ),
    'Qwen 2.5 7B with its bias named': (
        ('qwen2', 3584, 28, 28, 4, 18_944, 152_064),
        QWEN2 | {'tie_word_embeddings': False, 'attention_bias': True},
        0,
    ),
    'Qwen 3 0.6B': (
        ('qwen3', 1024, 28, 16, 8, 3072, 151_936),
        QWEN3 | {'tie_word_embeddings': True},
        596_049_920,
    ),
    'Qwen 3 32B': (('qwen3', 5120, 64, 64, 8, 25_600, 151_936), QWEN3, 0),
    'Qwen 3 Coder 480B': (('qwen3_moe', 6144, 62, 96, 8, 8192, 151_936), CODER, 0),
    'OLMo 2 7B': (('olmo2', 4096, 32, 32, 32, 11_008, 100_352), {'rope_theta': 5e5}, 0),
    'OLMo 2 32B': (('olmo2', 5120, 64, 40, 8, 27_648, 100_352), {'rope_theta': 5e5}, 0),
    'Phi 3.5 mini': (('phi3', 3072, 32, 32, 32, 8192, 32_064), PHI, 0),
    'Phi 4 mini': (
        ('phi3', 3072, 32, 24, 8, 8192, 200_064),
        PHI
        | {'partial_rotary_factor': 0.75, 'full_attn_mod': 1, 'interpolate_factor': 1}
        | {'lm_head_bias': False, 'mlp_bias': False, 'tie_word_embeddings': True},
        0,
    ),
    'Gemma 2 2B': (
        ('gemma2', 2304, 26, 8, 4, 9216, 256_000),
        GEMMA
        | {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0}
        | {'sliding_window': 4096, 'hidden_act': 'gelu_pytorch_tanh'},
        2_614_341_888,
    ),
    'Gemma 3 1B': (
        ('gemma3_text', 1152, 26, 4, 1, 6912, 262_144),
        GEMMA
        | {'rope_local_base_freq': 10_000, 'rope_theta': 1_000_000, 'rope_scaling': None}
        | {'sliding_window': 512, 'sliding_window_pattern': 6, 'attn_logit_softcapping': None},
        999_885_952,
    ),
    # 80B-A3B, and 106B-A12B without the layer that predicts further tokens.
    'Qwen 3 Next 80B': (
        ('qwen3_next', 2048, 48, 16, 2, 5120, 151_936),
        {'decoder_sparse_step': 1, 'full_attention_interval': 4, 'head_dim': 256}
        | {'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 128, 'linear_num_key_heads': 16}
        | {'linear_num_value_heads': 32, 'linear_value_head_dim': 128, 'mlp_only_layers': []}
        | {'moe_intermediate_size': 512, 'norm_topk_prob': True, 'num_experts': 512}
        | {'num_experts_per_tok': 10, 'partial_rotary_factor': 0.25, 'rope_scaling': None}
        | {'rope_theta': 10_000_000, 'shared_expert_intermediate_size': 512},
        79_674_391_296,
    ),
    'gpt-oss 20B': (('gpt_oss', 2880, 24, 64, 8, 2880, 201_088), GPT_OSS, 20_914_757_184),
    'RedPajama 3B': (('gpt_neox', 2560, 32, 32, None, 10_240, 50_432), NEOX, 0),
}
GPT2 = {'model_type': 'gpt2', 'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'vocab_size': 50_257}
GPT2 |= {'n_positions': 1024, 'n_ctx': 1024, 'activation_function': 'gelu_new', 'n_special': 0}
GPT2 |= {'summary_type': 'cls_index', 'predict_special_tokens': True, 'resid_pdrop': 0.1}
# {model: (its fields, what the error says)}
UNREAD = {
    'Aya 23': ({'model_type': 'cohere', 'logit_scale': 0.0625}, 'factor of the logits'),
    'StableLM 2': ({'model_type': 'stablelm', 'use_qkv_bias': True}, 'a part of each head'),
    'StarCoder': ({'model_type': 'gpt_bigcode', 'multi_query': True}, 'multi-query attention'),
    'DeepSeek V3': ({'model_type': 'deepseek_v3', 'kv_lora_rank': 512}, 'latent attention'),
    'Kimi K2': ({'model_type': 'kimi_linear'}, 'a decay for each feature'),
    'LLaVA': ({'model_type': 'llava', 'intermediate_size': None}, 'an image encoder'),
    'InternLM 2': ({'model_type': 'internlm2'}, 'its code comes with the weights'),
    'RWKV 5': ({'model_type': 'rwkv5', 'intermediate_size': None}, 'its code comes with'),
}


def read_recipe(raw):
    """Returns the recipe of a config.json, checked as an import checks it."""
    check_fields(raw)
    family = find_family(raw)
    fields = family.read(family.rename_fields(raw))
    recipe = recipe_for(fields, default.get_config().to_dict(), 'ids:64,1,2')
    check(recipe)
    return recipe


@pytest.mark.parametrize('name', READ)
def test_published_config_is_read(name):
    """The sizes are those of the file, and the parameters as many as were published. Catches a
    field of these files that is not known, and a model with a matrix too many.
    """
    sizes, further, n_params = READ[name]
    recipe = read_recipe(dict(zip(SIZES, sizes, strict=True)) | further)
    assert (recipe.model.d_model, recipe.model.n_layers, recipe.model.n_heads) == sizes[1:4]
    if n_params:
        shapes = param_shapes(build_cpu_learner(recipe, sizes[-1]))
        assert sum(math.prod(x) for path, x in shapes.items() if path != SCALE) == n_params


def test_published_gpt2_is_read():
    shapes = param_shapes(build_cpu_learner(read_recipe(GPT2), 50_257))
    assert sum(map(math.prod, shapes.values())) == 124_439_808


@pytest.mark.parametrize(
    'name', [name for name, (raw, _) in UNREAD.items() if raw['model_type'] not in FAMILIES]
)
def test_published_config_says_what_lacks(tmp_path, name):
    """Catches an error about a field, such as a size that is null, of a model that is not read."""
    raw, message = UNREAD[name]
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        import_folder(tmp_path, {}, Path('run'))
