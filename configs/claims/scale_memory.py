"""SCALE needs 35 to 45% of the memory of Adam.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     Weights and state of SCALE take 35 to 45% of those of Adam: 0.15 instead of 0.35 GB at 60
          million parameters, 0.32 instead of 0.81 at 130 million, 0.80 instead of 2.21 at 350
          million, and 2.81 instead of 8.04 at 1,300 million.
Here:     The memory is counted from array shapes, for the paper's four models and two of ours,
          which have fewer key heads. SCALE updates all parameters: with AdamW for embeddings and
          readout it would need more. Gradients and activations are not counted. The loss reached
          with this memory is a separate claim.
Counts:   the ratio is between 0.345 and 0.455 at each of the six sizes.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:memory_of_optimizers',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_60m',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, 60M model',
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_130m',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, 130M model',
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_350m',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, 350M model',
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_1b',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, 1.3B model',
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_llama_124m',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, llama_124m',
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_llama_1b',
        'within': (0.345, 0.455),
        'label': 'weights and state of SCALE over those of AdamW, llama_1b',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'weights_and_state_without_momentum_over_adamw_of_1b',
        'within': (None, 0.345),
        'label': (
            'weights and state of an optimizer without momentum over those of AdamW, 1.3B model'
        ),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_hidden_scale_over_adamw_of_60m',
        'within': (0.455, None),
        'label': (
            'weights and state with SCALE for hidden matrices only over those of AdamW, 60M model'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_and_momentum_of_embeddings_over_adamw_of_60m',
        'within': (0.345, 0.455),
        'label': (
            'weights and state of SCALE with momentum of embeddings too over those of '
            'AdamW, 60M model'
        ),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_and_momentum_of_embeddings_over_adamw_of_1b',
        'within': (0.345, 0.455),
        'label': (
            'weights and state of SCALE with momentum of embeddings too over those of '
            'AdamW, 1.3B model'
        ),
    },
)
FIDELITY = {
    'SCALE': {
        'setting': (
            'no state for hidden matrices and embeddings, one momentum for the readout, two '
            'moments for vectors; vocabulary 32,000, or 32,768 for our models; weights and '
            'state in float32'
        ),
        'published': (
            'the same state; vocabulary 32,000; weights and state in bfloat16, which does not '
            'change the ratio'
        ),
        'source': (
            'github.com/OptimAI-Lab/Minimalist_LLM_Pretraining, README.md, '
            'scripts/60m_scale.sh and mem_eff_pt/pt_scale/scale_optimizer.py'
        ),
    },
    'AdamW': {
        'setting': 'two moments for every parameter, in float32',
        'published': 'two moments for every parameter, in bfloat16',
        'source': 'github.com/OptimAI-Lab/Minimalist_LLM_Pretraining, README.md',
    },
}
