"""Dividing blocks by the square root of the depth keeps the stream the same size at every depth.

Paper:    arXiv:2310.02244, Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks
Says:     Multiplying residual branches by 1 / sqrt(depth) (Depth-muP) keeps features stable as
          depth grows; without the factor their size grows with depth.
Here:     Pre-norm causal transformers of width 64 with 4 to 36 layers at initialisation, random
          tokens, embeddings with a standard deviation of 1, five seeds. The theory in the paper is
          about blocks of one layer; for deeper blocks, as here, the paper says that no such rule
          serves training as well.
Counts:   the slope over the log depth is within 0.1 of 0 under Depth-muP, for the log root mean
          square of the stream, and for that of the sum that the blocks add to it. Without the
          factor the slope for the stream is at least 0.3.
"""

PART = 'scaling'
CAUTION = (
    'Before training, the result follows from the independence of the blocks, whose outputs add up '
    'like random vectors.'
)
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_size_of_depth_mup',
        'within': (-0.1, 0.1),
        'label': 'slope of log stream size over log depth, Depth-muP',
    },
    {
        'study': 'measure',
        'value': 'slope_of_added_size_of_depth_mup',
        'within': (-0.1, 0.1),
        'label': 'slope of log size of what the blocks add over log depth, Depth-muP',
    },
    {
        'study': 'measure',
        'value': 'slope_of_size_of_standard',
        'within': (0.3, None),
        'label': 'slope of log stream size over log depth, standard',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'slope_of_size_of_peri',
        'within': (0.3, None),
        'label': (
            'slope of log stream size over log depth, Peri-LN, whose blocks each add a mean '
            'square of 2 (0.48 expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_of_added_size_of_depth_mup_divided_again',
        'within': (-0.1, 0.1),
        'label': (
            'slope of log size of what the blocks add over log depth, blocks divided by the depth'
        ),
    },
    {
        'study': 'measure',
        'value': 'slope_of_size_of_depth_mup_divided_again',
        'within': (-0.1, 0.1),
        'label': 'slope of log stream size over log depth, blocks divided by the depth',
    },
)
FIDELITY = {
    'Depth-muP': {
        'setting': (
            'attention and MLP outputs over sqrt(depth), width 64 throughout, depths 4, 12 and '
            '36, no training, RMSNorm in pre-norm, matrices from N(0, 1 / fan_in)'
        ),
        'published': (
            'block outputs times a constant over sqrt(depth), Adam rates over sqrt(depth); proved '
            'for blocks of one layer in the limit of width, then depth; for deeper blocks they '
            'show limits of all such rules, also on a Megatron transformer'
        ),
        'source': 'arXiv:2310.02244, abstract',
    },
    'standard': {
        'setting': (
            'the same without the factor, and without smaller output matrices for more depth'
        ),
        'published': 'residual networks without a factor, whose features grow with depth',
        'source': 'arXiv:2310.02244, section 1',
    },
}
