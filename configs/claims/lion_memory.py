"""Lion needs half of the state of AdamW.

Paper:    arXiv:2302.06675, Symbolic Discovery of Optimization Algorithms
Says:     it tracks the momentum alone, which halves the memory that AdamW needs beside the weights.
Here:     shapes alone, of models of 124 million and 1.3 billion parameters; Lion has all of them.
Counts:   the state is between 0.495 and 0.505 of AdamW's at both sizes.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:memory_of_optimizers',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'state_of_lion_over_adamw_of_llama_124m',
        'within': (0.495, 0.505),
    },
    {
        'study': 'measure',
        'value': 'state_of_lion_over_adamw_of_llama_1b',
        'within': (0.495, 0.505),
    },
)
