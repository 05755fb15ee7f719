"""Families with LayerNorm and an MLP without gate: GPT-2, GPT-NeoX, StarCoder2 and Nemotron."""

from eval.convert.families.common import (
    ACTIVATIONS,
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
    MLP,
    OUT,
    OUT_BIASES,
    QKV,
    QKV_BIASES,
    READOUT,
    norm_rows,
)
from eval.convert.families.family import Family, make_row, rows_with_bias
from eval.convert.hf_config import (
    AliasField,
    Biases,
    ChoiceField,
    FixedField,
    HeadDim,
    HiddenWidth,
    IgnoredField,
    MaxPositions,
    NoDropout,
    SharedField,
)
from eval.convert.hf_positions import Rope, Window

# GPT-2 stores matrices as [in, out] (Conv1D), the other families as [out, in] (Linear).
H = 'transformer.h.{L}.'
GPT2 = Family(
    'GPT2LMHeadModel',
    (
        SharedField('n_embd', 'model.d_model'),
        SharedField('n_layer', 'model.n_layers'),
        SharedField('n_head', 'model.n_heads'),
        HiddenWidth('n_inner', 'n_embd'),
        MaxPositions('n_positions', 1024, is_table=True),
        SharedField('layer_norm_epsilon', 'norm.eps', 1e-5),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', True),
        ChoiceField('activation_function', 'model.activation', ACTIVATIONS, 'gelu_new'),
        FixedField('scale_attn_weights', True),
        FixedField('scale_attn_by_inverse_layer_idx', False),
        FixedField('add_cross_attention', False),
        NoDropout('resid_pdrop'),
        NoDropout('embd_pdrop'),
        NoDropout('attn_pdrop'),
    ),
    DECODER | {'model.norm': 'layernorm', 'model.position': 'learned', 'model.bias': True},
    (
        make_row('transformer.wte.weight', 'embedding', 'V D -> V D'),
        make_row('transformer.wpe.weight', 'positions/table', 'T D -> T D'),
        READOUT,
        *rows_with_bias(
            H + 'attn.c_attn',
            ATTENTION + '{query,key,value}',
            'D (3 N H) -> D N H',
            '(3 N H) -> N H',
        ),
        *rows_with_bias(H + 'attn.c_proj', ATTENTION + 'out', '(N H) D -> N H D', 'D -> D'),
        *rows_with_bias(H + 'mlp.c_fc', MLP + 'up', 'D F -> D F', 'F -> F'),
        *rows_with_bias(H + 'mlp.c_proj', MLP + 'down', 'F D -> F D', 'D -> D'),
        *norm_rows(H + 'ln_1', 'layers/attention_norm_in', bias=True),
        *norm_rows(H + 'ln_2', 'layers/mlp_norm_in', bias=True),
        *norm_rows('transformer.ln_f', 'final_norm', bias=True),
    ),
    prefix='transformer.',
    unused_suffixes=('.attn.bias', '.attn.masked_bias'),  # buffers of the causal mask
    aliases={
        'hidden_size': 'n_embd',
        'max_position_embeddings': 'n_positions',
        'num_attention_heads': 'n_head',
        'num_hidden_layers': 'n_layer',
    },
)

NEOX = 'gpt_neox.layers.{L}.'
GPT_NEOX = Family(
    'GPTNeoXForCausalLM',
    (
        SharedField('hidden_size', 'model.d_model'),
        SharedField('num_hidden_layers', 'model.n_layers'),
        SharedField('num_attention_heads', 'model.n_heads'),
        SharedField('intermediate_size', 'model.d_ff'),
        SharedField('layer_norm_eps', 'norm.eps', 1e-5),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', False),
        MaxPositions(),
        Rope(
            fraction=0.25,
            fraction_name='rotary_pct',
            base_name='rotary_emb_base',
            is_partial=True,
        ),
        ChoiceField(
            'use_parallel_residual', 'model.placement', {True: 'parallel', False: 'pre'}, True
        ),
        ChoiceField('hidden_act', 'model.activation', ACTIVATIONS, 'gelu'),
        FixedField('attention_bias', True),
    ),
    DECODER | {'model.norm': 'layernorm', 'model.bias': True},
    (
        make_row('gpt_neox.embed_in.weight', 'embedding', 'V D -> V D'),
        make_row('embed_out.weight', 'readout', 'V D -> D V'),
        *rows_with_bias(
            NEOX + 'attention.query_key_value',
            ATTENTION + '{query,key,value}',
            # Interleaved head by head; GPT-2 has all queries, then all keys, then all values.
            '(N 3 H) D -> D N H',
            '(N 3 H) -> N H',
        ),
        *rows_with_bias(NEOX + 'attention.dense', ATTENTION + 'out', 'D (N H) -> N H D', 'D -> D'),
        *rows_with_bias(NEOX + 'mlp.dense_h_to_4h', MLP + 'up', 'F D -> D F', 'F -> F'),
        *rows_with_bias(NEOX + 'mlp.dense_4h_to_h', MLP + 'down', 'D F -> F D', 'D -> D'),
        *norm_rows(NEOX + 'input_layernorm', 'layers/attention_norm_in', bias=True),
        *norm_rows(NEOX + 'post_attention_layernorm', 'layers/mlp_norm_in', bias=True),
        *norm_rows('gpt_neox.final_layer_norm', 'final_norm', bias=True),
    ),
    prefix='gpt_neox.',
    unused_suffixes=('.attention.bias', '.attention.masked_bias', '.rotary_emb.inv_freq'),
)

STARCODER2 = Family(
    'Starcoder2ForCausalLM',
    (
        SharedField('hidden_size', 'model.d_model'),
        SharedField('num_hidden_layers', 'model.n_layers'),
        SharedField('num_attention_heads', 'model.n_heads'),
        SharedField('num_key_value_heads', 'model.n_kv_heads', 2),
        SharedField('intermediate_size', 'model.d_ff'),
        SharedField('norm_epsilon', 'norm.eps', 1e-5),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', True),
        SharedField('use_bias', 'model.bias', True),
        MaxPositions(default=4096),
        HeadDim(),
        Rope(),
        Window(),
        ChoiceField('hidden_act', 'model.activation', ACTIVATIONS, 'gelu_pytorch_tanh'),
        # Fields of its files that their code does not read.
        AliasField('layer_norm_epsilon', 'norm_epsilon'),
        IgnoredField('mlp_type', 'default'),
        IgnoredField('norm_type', 'layer_norm'),
        IgnoredField('scale_attn_weights', True),
        IgnoredField('attention_softmax_in_fp32', True),
        IgnoredField('scale_attention_softmax_in_fp32', True),
    ),
    DECODER | {'model.norm': 'layernorm'},
    (
        *ENDS,
        *QKV,
        *QKV_BIASES,
        *OUT,
        *OUT_BIASES,
        *rows_with_bias(BLOCK + 'mlp.c_fc', MLP + 'up', 'F D -> D F', 'F -> F'),
        *rows_with_bias(BLOCK + 'mlp.c_proj', MLP + 'down', 'D F -> F D', 'D -> D'),
        *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in', bias=True),
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/mlp_norm_in', bias=True),
        *norm_rows('model.norm', 'final_norm', bias=True),
    ),
)

# The norms of Nemotron multiply by 1 + weight, so that our gains are the file's plus 1.
NEMOTRON = Family(
    'NemotronForCausalLM',
    (
        SharedField('hidden_size', 'model.d_model'),
        SharedField('num_hidden_layers', 'model.n_layers'),
        SharedField('num_attention_heads', 'model.n_heads'),
        SharedField('num_key_value_heads', 'model.n_kv_heads', None),
        SharedField('intermediate_size', 'model.d_ff'),
        SharedField('norm_eps', 'norm.eps', 1e-5),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', False),
        MaxPositions(default=4096),
        HeadDim(),
        Rope(fraction=0.5, is_partial=True),
        ChoiceField('hidden_act', 'model.activation', ACTIVATIONS, 'relu2'),
        Biases(),
    ),
    DECODER | {'model.norm': 'layernorm'},
    (
        *ENDS,
        *QKV,
        *QKV_BIASES,
        *OUT,
        *OUT_BIASES,
        *rows_with_bias(BLOCK + 'mlp.up_proj', MLP + 'up', 'F D -> D F', 'F -> F'),
        *rows_with_bias(BLOCK + 'mlp.down_proj', MLP + 'down', 'D F -> F D', 'D -> D'),
        *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in', 1.0, bias=True),
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/mlp_norm_in', 1.0, bias=True),
        *norm_rows('model.norm', 'final_norm', 1.0, bias=True),
    ),
)
