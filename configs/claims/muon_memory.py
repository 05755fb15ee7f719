"""Muon needs half of AdamW's state for the matrices that it updates.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     Muon stores one momentum instead of AdamW's two moments, so it needs half of the memory
          beside the weights.
Here:     The state of the hidden matrices is counted from array shapes, for models with 124 million
          and 1.3 billion parameters. AdamW updates embeddings, readout and vectors; its state is
          not halved.
Counts:   the state of the hidden matrices is between 0.495 and 0.505 of AdamW's at both sizes.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:memory_of_optimizers',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'state_of_muon_over_adamw_of_matrices_of_llama_124m',
        'within': (0.495, 0.505),
        'label': 'state of Muon over that of AdamW, hidden matrices of llama_124m',
    },
    {
        'study': 'measure',
        'value': 'state_of_muon_over_adamw_of_matrices_of_llama_1b',
        'within': (0.495, 0.505),
        'label': 'state of Muon over that of AdamW, hidden matrices of llama_1b',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'state_of_ademamix_over_adamw_of_matrices_of_llama_124m',
        'within': (1.495, 1.505),
        'label': (
            'state of AdEMAMix, which has three moments, over that of AdamW, hidden '
            'matrices of llama_124m'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'state_of_muon_with_another_momentum_over_adamw_of_matrices_of_llama_124m',
        'within': (0.495, 0.505),
        'label': (
            'state of Muon behind another momentum over that of AdamW, hidden matrices of '
            'llama_124m'
        ),
    },
)
FIDELITY = {
    'Muon': {
        'setting': 'one momentum in float32 for each hidden matrix',
        'published': 'one momentum for each matrix; AdamW for embeddings, readout and vectors',
        'source': (
            'arXiv:2502.16982, section 2; github.com/MoonshotAI/Moonlight, examples/toy_train.py'
        ),
    },
    'AdamW': {
        'setting': 'two moments in float32 for each hidden matrix',
        'published': 'two moments for each parameter',
        'source': 'github.com/MoonshotAI/Moonlight, examples/toy_train.py',
    },
}
