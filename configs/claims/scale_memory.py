"""SCALE needs 35 to 45% of the memory of Adam.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     weights and state of SCALE are 35 to 45% of those of Adam: 0.15 for 0.35 GB at 60 million
          parameters, 0.32 for 0.81 at 130, 0.80 for 2.21 at 350, 2.81 for 8.04 at 1,300.
Here:     shapes alone, of the four models of the paper and of two of ours with fewer key heads; the
          loss that this memory reaches is another claim. Gradients and activations do not count.
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
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_130m',
        'within': (0.345, 0.455),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_350m',
        'within': (0.345, 0.455),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_1b',
        'within': (0.345, 0.455),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_llama_124m',
        'within': (0.345, 0.455),
    },
    {
        'study': 'measure',
        'value': 'weights_and_state_with_scale_over_adamw_of_llama_1b',
        'within': (0.345, 0.455),
    },
)
