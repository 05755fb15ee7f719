"""Families of models in transformers, and the places of their tensors in our tree.

A row describes a tensor of their files: its name, our path, and its layout
(`eval.convert.layouts`). {L} is the number of a layer and {E} the number of an expert; our arrays
are stacked along both. The letters are D model, N heads, K heads of keys, H features of a head,
F hidden features of the MLP, V vocabulary, T positions, E experts.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eval.convert.hf_config import (
    NOTES,
    AliasField,
    Biases,
    ChoiceField,
    ConfigFields,
    EvenHeadDim,
    FixedField,
    Flat,
    HeadDim,
    HiddenWidth,
    IgnoredField,
    MaxPositions,
    Mxfp4,
    NoDropout,
    QueryScalar,
    SharedField,
)
from eval.convert.hf_positions import NoRopeLayers, Rope, RopeByKind, Window
from eval.convert.layouts import Layout
from modules.choices import choose


class TensorRow(NamedTuple):
    """A tensor of a file.

    name: with {L} and {E}. paths: of the arrays that it holds. layout: of the arrays in the tensor.
    offset: our values minus the file's.
    """

    name: str
    paths: tuple[str, ...]
    layout: Layout
    offset: float = 0.0


def make_row(name: str, paths: str, axes: str, offset: float = 0.0) -> TensorRow:
    """Returns a row. The paths 'a/{b,c}' mean a/b and a/c.

    Args:
      name: of the tensor in the files.
      paths: of our arrays.
      axes: of the layout.
      offset: our values minus the file's.
    """
    stem, _, suffixes = paths.partition('{')
    names = suffixes.rstrip('}').split(',') if suffixes else ['']
    return TensorRow(name, tuple(stem + suffix for suffix in names), Layout(axes), offset)


def rows_with_bias(name: str, paths: str, axes: str, bias_axes: str) -> tuple[TensorRow, TensorRow]:
    """Returns the rows of a matrix, NAME.weight, and of its bias, NAME.bias.

    Args:
      name: of the module in their files.
      paths: of our matrices.
      axes: of the matrix.
      bias_axes: of the bias.
    """
    weight = make_row(f'{name}.weight', paths, axes)
    bias_paths = tuple(f'{path}_bias' for path in weight.paths)
    return weight, TensorRow(f'{name}.bias', bias_paths, Layout(bias_axes))


@dataclasses.dataclass(frozen=True)
class Family:
    """A model_type of transformers.

    architecture: the class. entries: of its config.json. constants: our fields that are the same in
    all models of the family. rows: its tensors. prefix: of tensor names; files of the model without
    its head lack it. unused_suffixes: of the names of tensors that hold no weights. aliases: other
    names of fields (attribute_map of its class) -> the names here.
    """

    architecture: str
    entries: tuple[Any, ...]
    constants: Mapping[str, Any]
    rows: tuple[TensorRow, ...]
    prefix: str = 'model.'
    unused_suffixes: tuple[str, ...] = ('.rotary_emb.inv_freq',)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rename_fields(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a config.json without aliases. Raises ValueError for two values of a field."""
        renamed = {name: value for name, value in raw.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            value = raw.get(alias)
            if value is None:
                continue
            if renamed.get(name) is None:
                renamed[name] = value
            elif renamed[name] != value:
                raise ValueError(
                    f'config.json has {alias}={value!r} and {name}={renamed[name]!r}, two names of '
                    f'one field of a {raw.get("model_type")}. Leave the wrong one out.'
                )
        return renamed

    def read(self, raw: Mapping[str, Any]) -> Flat:
        """Returns our fields of a config.json. Raises ValueError that names unknown fields."""
        fields, flat = ConfigFields(self.rename_fields(raw)), dict(self.constants)
        for entry in self.entries:
            flat |= entry.read(fields)
        if unread := fields.list_unread():
            raise ValueError(
                f'config.json has {", ".join(unread)}, which our models lack or the importer does '
                'not know'
            )
        notes = tuple(dict.fromkeys(fields.list_notes()))
        return flat | ({NOTES: notes} if notes else {})

    def write(self, flat: Flat) -> dict[str, Any]:
        """Returns the fields of config.json. The inverse of `read` for a model of this family."""
        written: dict[str, Any] = {}
        for entry in self.entries:
            written |= entry.write(flat)
        return written

    def list_tensors(self, paths: Mapping[str, Any], layers: int) -> Iterator['TensorPlace']:
        """Yields the tensors of a model with these parameters, {path: shape}."""
        for row in self.rows:
            if not all(path in paths for path in row.paths):
                continue
            experts = 1
            if '{E}' in row.name:
                experts = paths[row.paths[0]][1]
            for layer in range(layers if '{L}' in row.name else 1):
                for expert in range(experts):
                    index = (layer,) * ('{L}' in row.name) + (expert,) * ('{E}' in row.name)
                    yield TensorPlace(row.name.format(L=layer, E=expert), row, index)


class TensorPlace(NamedTuple):
    """A tensor of a layer and expert, at `index` in our stacked arrays."""

    name: str
    row: TensorRow
    index: tuple[int, ...]

    def shapes(self, paths: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the shapes of its arrays, given the shapes of all parameters."""
        return [paths[path][len(self.index) :] for path in self.row.paths]


ATTENTION, MLP = 'layers/attention/', 'layers/mlp/'

# The defaults of all families.
DECODER = {
    'model.norm': 'rmsnorm',
    'model.placement': 'pre',
    'model.attention': 'softmax',
    'model.qk_norm': 'none',
    'model.position': 'rope',
    'model.activation': 'swiglu',
    'model.mlp': 'dense',
    'model.bias': False,
    'model.qkv_bias': False,
    'model.embedding_scale': False,
    'model.logit_softcap': 0.0,
}


def size_entries(
    max_positions: int, kv_heads: int | None = None, eps: float = 1e-6, tied: bool = False
) -> tuple[Any, ...]:
    """Returns the entries that nearly all families have.

    Args:
      max_positions: default of the tokens in a row, as in their class; so are the other arguments.
      kv_heads: heads of keys; None: the number of query heads.
      eps: of the norms.
      tied: whether the embedding is the readout.
    """
    return (
        SharedField('hidden_size', 'model.d_model'),
        SharedField('num_hidden_layers', 'model.n_layers'),
        SharedField('num_attention_heads', 'model.n_heads'),
        SharedField('num_key_value_heads', 'model.n_kv_heads', kv_heads),
        SharedField('intermediate_size', 'model.d_ff'),
        SharedField('rms_norm_eps', 'norm.eps', eps),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', tied),
        MaxPositions(default=max_positions),
    )


SILU = FixedField('hidden_act', 'silu', ('swish',))
NO_BIAS = FixedField('attention_bias', False)

# transformers' 'gelu' is exact (erf), ours the tanh approximation.
GPT2_ACTIVATIONS = {
    'gelu_new': 'gelu',
    'gelu_pytorch_tanh': 'gelu',
    'gelu_fast': 'gelu',
    'gelu': 'gelu_exact',
    'gelu_python': 'gelu_exact',
    'relu': 'relu',
    'silu': 'silu',
    'swish': 'silu',
}


def norm_rows(
    name: str, path: str, offset: float = 0.0, bias: bool = False
) -> tuple[TensorRow, ...]:
    """Returns the rows of a norm's gain and, with `bias`, of its bias.

    Args:
      name: of the norm in the files.
      path: of the norm in our tree.
      offset: our gains minus the file's.
      bias: whether the norm has a bias.
    """
    rows = (make_row(f'{name}.weight', f'{path}/scale', 'D -> D', offset),)
    return rows + ((make_row(f'{name}.bias', f'{path}/bias', 'D -> D'),) if bias else ())


EMBEDDING = make_row('model.embed_tokens.weight', 'embedding', 'V D -> V D')
READOUT = make_row('lm_head.weight', 'readout', 'V D -> D V')
ENDS = (EMBEDDING, READOUT)
BLOCK = 'model.layers.{L}.'
SELF_ATTN = BLOCK + 'self_attn.'
QKV, QKV_BIASES = zip(
    rows_with_bias(SELF_ATTN + 'q_proj', ATTENTION + 'query', '(N H) D -> D N H', '(N H) -> N H'),
    rows_with_bias(SELF_ATTN + 'k_proj', ATTENTION + 'key', '(K H) D -> D K H', '(K H) -> K H'),
    rows_with_bias(SELF_ATTN + 'v_proj', ATTENTION + 'value', '(K H) D -> D K H', '(K H) -> K H'),
    strict=True,
)
OUT, OUT_BIASES = zip(
    rows_with_bias(SELF_ATTN + 'o_proj', ATTENTION + 'out', 'D (N H) -> N H D', 'D -> D'),
    strict=True,
)
GATED, GATED_BIASES = zip(
    rows_with_bias(BLOCK + 'mlp.gate_proj', MLP + 'gate', 'F D -> D F', 'F -> F'),
    rows_with_bias(BLOCK + 'mlp.up_proj', MLP + 'up', 'F D -> D F', 'F -> F'),
    rows_with_bias(BLOCK + 'mlp.down_proj', MLP + 'down', 'D F -> F D', 'D -> D'),
    strict=True,
)
PRE = (
    *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in'),
    *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/mlp_norm_in'),
    *norm_rows('model.norm', 'final_norm'),
)
QK_NORMS = (
    make_row(SELF_ATTN + 'q_norm.weight', ATTENTION + 'query_norm/scale', 'H -> H'),
    make_row(SELF_ATTN + 'k_norm.weight', ATTENTION + 'key_norm/scale', 'H -> H'),
)
LLAMA_ROWS = (*ENDS, *QKV, *OUT, *GATED, *PRE)


def four_norms(offset: float) -> tuple[TensorRow, ...]:
    """Returns the norms of Gemma 2 and 3: before and after each part."""
    return (
        *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in', offset),
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/attention_norm_out', offset),
        *norm_rows(BLOCK + 'pre_feedforward_layernorm', 'layers/mlp_norm_in', offset),
        *norm_rows(BLOCK + 'post_feedforward_layernorm', 'layers/mlp_norm_out', offset),
        *norm_rows('model.norm', 'final_norm', offset),
    )


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
        ChoiceField('activation_function', 'model.activation', GPT2_ACTIVATIONS, 'gelu_new'),
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
LLAMA = Family(
    'LlamaForCausalLM',
    (
        *size_entries(2048),
        HeadDim(),
        Rope(),
        SILU,
        Biases(),
        FixedField('rope_interleaved', False),
    ),
    DECODER,
    (*LLAMA_ROWS, *QKV_BIASES, *OUT_BIASES, *GATED_BIASES),
)
MISTRAL = Family(
    'MistralForCausalLM',
    (*size_entries(131_072, 8), HeadDim(), Rope(), Window(4096), SILU),
    DECODER,
    LLAMA_ROWS,
)
QWEN2 = Family(
    'Qwen2ForCausalLM',
    (
        *size_entries(32_768, 32),
        EvenHeadDim(),
        Rope(),
        Window(4096, has_types=True, has_use=True),
        SILU,
        FixedField('use_mrope', False),
    ),
    DECODER | {'model.qkv_bias': True},
    (*LLAMA_ROWS, *QKV_BIASES),
)
QWEN3 = Family(
    'Qwen3ForCausalLM',
    (
        *size_entries(32_768, 32),
        HeadDim(128),
        Rope(),
        Window(4096, has_types=True, has_use=True),
        SILU,
        NO_BIAS,
    ),
    DECODER | {'model.qk_norm': 'rmsnorm'},
    (*LLAMA_ROWS, *QK_NORMS),
)
OLMO2 = Family(
    'Olmo2ForCausalLM',
    (*size_entries(2048, eps=1e-5), EvenHeadDim(), Rope(), SILU, NO_BIAS),
    DECODER
    | {
        'model.placement': 'output',
        'model.qk_norm': 'rmsnorm',
        'attention.qk_norm_over': 'model',
    },
    (
        *ENDS,
        *QKV,
        *OUT,
        *GATED,
        *QK_NORMS,
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/attention_norm_out'),
        *norm_rows(BLOCK + 'post_feedforward_layernorm', 'layers/mlp_norm_out'),
        *norm_rows('model.norm', 'final_norm'),
    ),
)
PHI3 = Family(
    'Phi3ForCausalLM',
    (
        *size_entries(4096, eps=1e-5),
        EvenHeadDim(),
        Rope(
            is_partial=True,
            kinds=('default', 'longrope'),
            # Names in earlier files, which Phi3Config replaces (convert_rope_params_to_dict).
            kind_aliases={'su': 'longrope', 'yarn': 'longrope'},
            original_length=4096,
        ),
        Window(),
        SILU,
        NO_BIAS,
    ),
    DECODER,
    (
        *ENDS,
        make_row(
            SELF_ATTN + 'qkv_proj.weight',
            ATTENTION + '{query,key,value}',
            '(N|K|K H) D -> D N|K|K H',
        ),
        *OUT,
        make_row(BLOCK + 'mlp.gate_up_proj.weight', MLP + '{gate,up}', 'F|F D -> D F|F'),
        GATED[-1],
        *PRE,
    ),
)
GEMMA_ALWAYS = DECODER | {
    'model.placement': 'peri',
    'model.activation': 'geglu',
    'model.embedding_scale': True,
}
GEMMA_ACTIVATION = FixedField(
    'hidden_activation', 'gelu_pytorch_tanh', (None, 'gelu_new', 'gelu_fast')
)
# The norms of Gemma multiply by 1 + weight, so that our gains are the file's plus 1.
GEMMA2 = Family(
    'Gemma2ForCausalLM',
    (
        *size_entries(8192, 4, tied=True),
        HeadDim(256),
        QueryScalar(256),
        Rope(),
        Window(4096, period=2, has_types=True, is_needed=True),
        SharedField('final_logit_softcapping', 'model.logit_softcap', 30.0, null_value=0.0),
        SharedField('attn_logit_softcapping', 'attention.softcap', 50.0, null_value=0.0),
        GEMMA_ACTIVATION,
        FixedField('hidden_act', 'gelu_pytorch_tanh'),
        FixedField('use_bidirectional_attention', None, (False,)),
        NO_BIAS,
    ),
    GEMMA_ALWAYS,
    (*ENDS, *QKV, *OUT, *GATED, *four_norms(1.0)),
)

GEMMA3 = Family(
    'Gemma3ForCausalLM',
    (
        *size_entries(131_072, 4, tied=True),
        HeadDim(256),
        QueryScalar(256),
        RopeByKind(),
        Window(4096, period=6, has_types=True, is_needed=True, has_pattern=True),
        SharedField('final_logit_softcapping', 'model.logit_softcap', None, null_value=0.0),
        IgnoredField('attn_logit_softcapping', None),
        GEMMA_ACTIVATION,
        FixedField('hidden_act', 'gelu_pytorch_tanh'),
        FixedField('use_bidirectional_attention', None, (False,)),
        NO_BIAS,
    ),
    GEMMA_ALWAYS | {'model.qk_norm': 'rmsnorm'},
    (
        *ENDS,
        *QKV,
        *OUT,
        *GATED,
        *four_norms(1.0),
        *(row._replace(offset=1.0) for row in QK_NORMS),
    ),
)
SMOLLM3 = Family(
    'SmolLM3ForCausalLM',
    (
        *size_entries(32_768, 4, tied=True),
        EvenHeadDim(),
        Rope(2_000_000.0),
        NoRopeLayers(),
        Window(has_types=True, has_use=True, is_no_rope=True),
        SILU,
        NO_BIAS,
        FixedField('mlp_bias', False),
    ),
    DECODER,
    LLAMA_ROWS,
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
        ChoiceField('hidden_act', 'model.activation', GPT2_ACTIVATIONS, 'gelu'),
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
EXPERTS = DECODER | {'model.mlp': 'moe', 'mlp.gates': 'renormalised', 'mlp.router_noise': 0.0}
EXPERT_ALIASES = {'num_experts': 'num_local_experts'}
MIXTRAL_EXPERT = BLOCK + 'block_sparse_moe.experts.{E}.'
MIXTRAL = Family(
    'MixtralForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5),
        HeadDim(),
        Rope(1_000_000.0),
        Window(),
        SILU,
        SharedField('num_local_experts', 'mlp.n_experts', 8),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 2),
    ),
    EXPERTS,
    (
        *ENDS,
        *QKV,
        *OUT,
        *PRE,
        make_row(BLOCK + 'block_sparse_moe.gate.weight', MLP + 'router', 'E D -> D E'),
        make_row(MIXTRAL_EXPERT + 'w1.weight', MLP + 'gate', 'F D -> D F'),
        make_row(MIXTRAL_EXPERT + 'w3.weight', MLP + 'up', 'F D -> D F'),
        make_row(MIXTRAL_EXPERT + 'w2.weight', MLP + 'down', 'D F -> F D'),
    ),
    aliases=EXPERT_ALIASES,
)
QWEN_EXPERT = BLOCK + 'mlp.experts.{E}.'
QWEN3_MOE = Family(
    'Qwen3MoeForCausalLM',
    (
        *size_entries(32_768, 4),
        HeadDim(),
        Rope(),
        Window(4096, has_use=True),
        SILU,
        NO_BIAS,
        SharedField(
            'moe_intermediate_size', 'model.d_ff', 768
        ),  # of an expert: all layers have experts
        SharedField('num_local_experts', 'mlp.n_experts', 128, alias='num_experts'),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 8),
        ChoiceField('norm_topk_prob', 'mlp.gates', {True: 'renormalised', False: 'softmax'}, False),
        FixedField('decoder_sparse_step', 1),
        FixedField('mlp_only_layers', [], (None,)),
    ),
    EXPERTS | {'model.qk_norm': 'rmsnorm'},
    (
        *ENDS,
        *QKV,
        *QK_NORMS,
        *OUT,
        *PRE,
        make_row(BLOCK + 'mlp.gate.weight', MLP + 'router', 'E D -> D E'),
        make_row(QWEN_EXPERT + 'gate_proj.weight', MLP + 'gate', 'F D -> D F'),
        make_row(QWEN_EXPERT + 'up_proj.weight', MLP + 'up', 'F D -> D F'),
        make_row(QWEN_EXPERT + 'down_proj.weight', MLP + 'down', 'D F -> F D'),
    ),
)

GPT_OSS_ROPE = {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
}
GPT_OSS = Family(
    'GptOssForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5),
        HeadDim(64),
        Rope(150_000.0, default_parameters=GPT_OSS_ROPE),
        Window(128, period=2, has_types=True, is_needed=True),
        SILU,
        SharedField('num_local_experts', 'mlp.n_experts', 128),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 4),
        AliasField('experts_per_token', 'num_experts_per_tok'),
        FixedField('attention_bias', True),
        FixedField('swiglu_alpha', 1.702),
        FixedField('swiglu_limit', 7.0),
        Mxfp4(),
    ),
    EXPERTS | {'model.bias': True, 'model.activation': 'swiglu_oai', 'attention.sinks': 'learned'},
    (
        *ENDS,
        *QKV,
        *QKV_BIASES,
        *OUT,
        *OUT_BIASES,
        make_row(SELF_ATTN + 'sinks', ATTENTION + 'sinks', 'N -> N'),
        *PRE,
        *rows_with_bias(BLOCK + 'mlp.router', MLP + 'router', 'E D -> D E', 'E -> E'),
        make_row(BLOCK + 'mlp.experts.gate_up_proj', MLP + '{gate,up}', 'E D (F 2) -> E D F'),
        make_row(
            BLOCK + 'mlp.experts.gate_up_proj_bias', MLP + '{gate_bias,up_bias}', 'E (F 2) -> E F'
        ),
        make_row(BLOCK + 'mlp.experts.down_proj', MLP + 'down', 'E F D -> E F D'),
        make_row(BLOCK + 'mlp.experts.down_proj_bias', MLP + 'down_bias', 'E D -> E D'),
    ),
    aliases=EXPERT_ALIASES,
)

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
}


def find_family(raw: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ValueError, with the known types, for another."""
    if 'model_type' not in raw:
        raise ValueError('config.json lacks model_type')
    return choose(FAMILIES, str(raw['model_type']), 'model_type of config.json')


# Scripts of users import the earlier name.
family_of = find_family
