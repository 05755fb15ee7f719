"""Fields of config.json on which no number of a model depends, each with its reason.

A field is listed only for a reason: transformers removes it before it builds a model, or it is
about the file, training, generation or speed. A field without a known reason may change the model:
it is not listed, and an import refuses it by name.
"""

from typing import Any

# Attributes of all configs of transformers and of single classes. Nearly every file has some, so
# that no note mentions them.
_CLASS_FIELDS = (
    'architectures bos_token_id chunk_size_feed_forward dtype eos_token_id '
    'gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder '
    'label2id model_type n_ctx output_router_logits pad_token_id pretraining_tp '
    'problem_type reorder_and_upcast_attn return_dict router_aux_loss_coef router_jitter_noise '
    'tokenizer_class torch_dtype transformers_version unk_token_id '
    'use_cache cache_implementation task_specific_params vocab_size '
    'initial_context_length original_max_position_embeddings output_attentions '
    'output_hidden_states sliding_window_size'
)
IGNORED_FIELDS: frozenset[str] = frozenset(_CLASS_FIELDS.split())
# Private attributes of transformers, and the head of GPT-2 that classifies.
IGNORED_PREFIXES = ('_', 'summary_')

# Reason -> names of fields that other programs, or earlier versions of transformers, write.
_NOTED_FIELDS = {
    'of a training program': (
        'finetuning_task is_llama_config loss_type model_name neftune_noise_alpha'
    ),
    'code that comes with the weights, which is not run': 'auto_map custom_pipelines',
    'other formats of the model': 'transformers.js_config',
    # transformers removes these from a config (GenerationConfig._get_default_generation_params).
    'generation, which generation_config.json determines': (
        'bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping '
        'encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id '
        'forced_eos_token_id length_penalty max_length max_new_tokens min_length min_new_tokens '
        'min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores '
        'penalty_alpha remove_invalid_values renormalize_logits repetition_penalty '
        'return_dict_in_generate stop_strings suppress_tokens temperature top_k top_p typical_p'
    ),
    'kernels and data types': (
        'attn_implementation experts_implementation output_past tf_legacy_loss torchscript '
        'use_bfloat16 use_flash_attention use_flash_attention_2 use_flash_attn'
    ),
    'lengths that transformers ignores': (
        'max_seq_len max_seq_length max_sequence_length model_max_length seq_length '
        'tokenizer_model_max_length'
    ),
    'of the tokenizer': (
        'bos_token cls_token_id decoder_start_token_id eos_token mask_token_id pad_token prefix '
        'sep_token_id tokenizer_padding_side unk_token'
    ),
    'heads and encoders that the model does not have': (
        'n_special num_labels predict_special_tokens tie_encoder_decoder'
    ),
    'name and license of the model': 'license name_or_path',
}
NOTED_FIELDS: dict[str, str] = {
    name: reason for reason, names in _NOTED_FIELDS.items() for name in names.split()
}
NOTED_PREFIXES = {'unsloth_': 'of a training program'}

# Fields that some models read: without effect only with the value that turns their part off. A
# family that reads a field takes it, and its entry decides.
NEUTRAL_VALUES: dict[str, Any] = {
    'add_cross_attention': False,
    'attention_bias': False,
    'full_attn_mod': 1,  # and interpolate_factor, of Phi-4 mini
    'interpolate_factor': 1,
    'is_causal': True,
    'lm_head_bias': False,
    'mlp_bias': False,
    'pruned_heads': {},
    'qkv_bias': False,
    'rope_interleaved': False,
    'shared_expert_intermediate_size': 0,
    'use_mrope': False,
}


def find_reason(name: str) -> str | None:
    """Returns why no number of a model depends on a field; None for an unknown field."""
    prefixes = (prefix for prefix in NOTED_PREFIXES if name.startswith(prefix))
    return NOTED_FIELDS.get(name) or NOTED_PREFIXES.get(next(prefixes, ''))


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field has the value that turns its part off."""
    neutral = NEUTRAL_VALUES.get(name)
    # 0 == False, and 1 == True.
    return neutral is not None and type(value) is type(neutral) and value == neutral
