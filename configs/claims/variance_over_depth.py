"""Dividing each norm by the square root of its depth keeps the variance of deep layers small.

Paper:    arXiv:2502.05795, The Curse of Depth in Large Language Models
Says:     In pre-norm the variance of the stream grows with depth, at least linearly and at most
          exponentially. Dividing the output of each norm by the square root of its depth limits
          that growth.
Here:     Causal models of width 64 with 36 layers at initialisation, random tokens, embeddings with
          a standard deviation of 1, five seeds. The paper studies trained models, in which the
          variance grows faster.
Counts:   the slope of the log variance added by the blocks over the log depth is at least 0.8 in
          pre-norm, and at most 0.5 with LayerNorm Scaling.
"""

PART = 'placements'
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_pre',
        'within': (0.8, None),
        'label': 'slope of log added variance over log depth, pre-norm',
    },
    {
        'study': 'measure',
        'value': 'slope_of_layernorm_scaling',
        'within': (None, 0.5),
        'label': 'slope of log added variance over log depth, LayerNorm Scaling',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'slope_of_peri',
        'within': (0.8, None),
        'label': (
            'slope of log added variance over log depth, Peri-LN, whose blocks each add a '
            'variance of 2 (1 expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_of_scaling_by_depth',
        'within': (None, 0.5),
        'label': (
            'slope of log added variance over log depth, LayerNorm Scaling by the number of '
            'all blocks'
        ),
    },
)
FIDELITY = {
    'pre-norm': {
        'setting': (
            'untrained, RMSNorm with gains of 1, GELU, initial deviations of 1 (embeddings) and 1 '
            '/ sqrt(fan_in) (matrices)'
        ),
        'published': (
            'a lemma for independent normal inputs and weights; a LLaMA with 12 blocks after up to '
            '10,000 steps, RMSNorm, SwiGLU, initial deviations of 0.02'
        ),
        'source': (
            'arXiv:2502.05795, lemma 3.2 and figure 4; lmsdss/LayerNorm-Scaling, '
            'peft_pretraining/modeling_llama.py'
        ),
    },
    'LayerNorm Scaling': {
        'setting': 'the same, with each norm in block l times 1 / sqrt(l), l = 1 to 36',
        'published': 'the same trained model, with the same factor in both norms of each block',
        'source': (
            'arXiv:2502.05795, figure 4; lmsdss/LayerNorm-Scaling, '
            'peft_pretraining/modeling_llama.py'
        ),
    },
}
