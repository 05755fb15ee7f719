"""In Peri-LN the variance of the stream grows linearly, however large the weights are.

Paper:    arXiv:2502.02732, Peri-LN
Says:     With norms before and after each sublayer, a sublayer adds a variance that does not depend
          on its weights, so the stream grows linearly with depth. In pre-norm it adds more as the
          weights grow, which leads to massive activations.
Here:     Causal models of width 64 with 36 layers at initialisation, random tokens, embeddings with
          a standard deviation of 1, five seeds. Instead of training, the hidden matrices are
          multiplied by four.
Counts:   the slope of the log variance added by the blocks over the log depth is within 0.1 of 1.
          With larger matrices that variance changes by at most 10% in Peri-LN, and grows at least
          fourfold in pre-norm.
"""

PART = 'placements'
CAUTION = (
    'The condition on weights that are four times as large holds nearly by construction, since '
    'the norm after a sublayer removes the factor.'
)
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_peri',
        'within': (0.9, 1.1),
        'label': 'slope of log added variance over log depth, Peri-LN',
    },
    {
        'study': 'measure',
        'value': 'added_by_grown_of_peri',
        'within': (0.9, 1.1),
        'label': 'added variance with 4x matrices over that without, Peri-LN',
    },
    {
        'study': 'measure',
        'value': 'added_by_grown_of_pre',
        'within': (4.0, None),
        'label': 'added variance with 4x matrices over that without, pre-norm',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'added_by_larger_gains_of_peri',
        'within': (1.1, None),
        'label': (
            'added variance with gains behind sublayers 1.1x as large over that without, '
            'Peri-LN (1.21 expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'added_by_grown_of_peri_of_attention_only',
        'within': (0.9, 1.1),
        'label': (
            'added variance with 4x matrices over that without, Peri-LN without the norms '
            'behind MLPs'
        ),
    },
    {
        'study': 'measure',
        'value': 'slope_of_peri_of_attention_only',
        'within': (0.9, 1.1),
        'label': (
            'slope of log added variance over log depth, Peri-LN without the norms behind MLPs'
        ),
    },
)
FIDELITY = {
    'Peri-LN': {
        'setting': (
            'RMSNorm with gains of 1, no norm of the embeddings, 36 untrained blocks, matrices '
            'with deviations of 1 / sqrt(fan_in) and of four times that'
        ),
        'published': (
            'learned gains and an optional norm of the embeddings, in trained models with 0.4 to '
            '3.2 billion parameters; the rest is not known here'
        ),
        'source': 'arXiv:2502.02732, read in notes of others',
    },
    'pre-norm': {
        'setting': 'the same with a norm before each sublayer only',
        'published': (
            'the same trained models; massive activations exceed the range of fp16 after about 0.5 '
            'billion tokens'
        ),
        'source': 'arXiv:2502.02732, figure 11, read in notes of others',
    },
}
