"""Lion needs half of AdamW's state.

Paper:    arXiv:2302.06675, Symbolic Discovery of Optimization Algorithms
Says:     Lion stores only the momentum, which halves the memory that AdamW needs beside the
          weights.
Here:     The state is counted from array shapes, for models with 124 million and 1.3 billion
          parameters. Lion updates all parameters: with AdamW for embeddings, readout and vectors,
          the state would not be halved.
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
        'label': 'state of Lion over that of AdamW, llama_124m',
    },
    {
        'study': 'measure',
        'value': 'state_of_lion_over_adamw_of_llama_1b',
        'within': (0.495, 0.505),
        'label': 'state of Lion over that of AdamW, llama_1b',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'state_of_ademamix_over_adamw_of_llama_124m',
        'within': (1.495, 1.505),
        'label': 'state of AdEMAMix, which has three moments, over that of AdamW, llama_124m',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'state_of_hidden_lion_over_adamw_of_llama_124m',
        'within': (0.495, 0.505),
        'label': 'state with Lion for hidden matrices only over that of AdamW, llama_124m',
    },
    {
        'study': 'measure',
        'value': 'state_of_hidden_lion_over_adamw_of_llama_1b',
        'within': (0.495, 0.505),
        'label': 'state with Lion for hidden matrices only over that of AdamW, llama_1b',
    },
)
FIDELITY = {
    'Lion': {
        'setting': 'one momentum in float32 for every parameter',
        'published': 'only the momentum, for all parameters',
        'source': 'github.com/google/automl, lion/README.md',
    },
    'AdamW': {
        'setting': 'two moments in float32 for every parameter',
        'published': 'first and second moments, for all parameters',
        'source': 'github.com/google/automl, lion/README.md',
    },
}
