"""Gradients of the last layer shrink with depth in pre-norm but not in post-norm.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     At initialisation the gradient of the last layers is of order 1 in post-norm at any depth,
          and falls as 1 / sqrt(depth) in pre-norm. Post-norm therefore needs a warm-up.
Here:     Causal models of width 64 with 2 to 16 layers at initialisation, on one batch of random
          tokens, five seeds. The theorem is about one linear layer after each sublayer.
Counts:   the slope of the log gradient over the log depth is closer to -1/2 than to 0 in pre-norm,
          and closer to 0 in post-norm.
"""

PART = 'placements'
STUDIES = {
    'measure': 'measure:gradients_at_the_start',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_pre_norm',
        'within': (None, -0.25),
        'label': 'slope of log gradient over log depth, pre-norm',
    },
    {
        'study': 'measure',
        'value': 'slope_of_post_norm',
        'within': (-0.25, None),
        'label': 'slope of log gradient over log depth, post-norm',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'slope_of_peri_norm',
        'within': (None, -0.25),
        'label': (
            'slope of log gradient over log depth, Peri-LN, whose blocks each add a variance '
            'of 2 (-0.45 expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_of_pre_norm_without_final_norm',
        'within': (None, -0.25),
        'label': 'slope of log gradient over log depth, pre-norm without the final norm',
    },
    {
        'study': 'measure',
        'value': 'slope_of_post_norm_of_sublayer',
        'within': (-0.25, None),
        'label': (
            'slope of log gradient over log depth, post-norm of the sublayer in place of the sum'
        ),
    },
)
FIDELITY = {
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, causal attention with 4 heads, GELU, separate readout, '
            'initial deviations of 1 (embeddings) and 1 / sqrt(fan_in) (matrices), 2 to 16 layers'
        ),
        'published': (
            'theorem: LayerNorm, one head with W_Q = W_K = 0, ReLU, square matrices, readout tied '
            'to Gaussian embeddings; test: encoder-decoders of 6-6 to 14-14 layers for '
            'translation, Xavier, ten seeds'
        ),
        'source': 'arXiv:2002.04745, sections 3.3 and 3.4',
    },
    'post-norm': {
        'setting': 'the same with the norm after each residual sum and no final norm',
        'published': 'the same models with the norm after each residual sum',
        'source': 'arXiv:2002.04745, sections 3.3 and 3.4',
    },
}
