"""Muon needs half of the state of AdamW for the matrices that it has.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     it has one momentum where AdamW has two moments, and so half of the memory beside weights.
Here:     shapes alone, of the hidden matrices of models of 124 million and 1.3 billion parameters;
          embeddings, readout and vectors have AdamW, whose state is not halved.
Counts:   the state of hidden matrices is between 0.495 and 0.505 of AdamW's at both sizes.
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
    },
    {
        'study': 'measure',
        'value': 'state_of_muon_over_adamw_of_matrices_of_llama_1b',
        'within': (0.495, 0.505),
    },
)
