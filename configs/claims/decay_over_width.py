"""Weight decay that grows as the square root of the width keeps singular values the same.

Paper:    arXiv:2510.15262, Robust Layerwise Scaling Rules by Proper Weight Decay Tuning
Says:     In steady state the largest singular value of a hidden matrix is proportional to sqrt(rate
          / decay) and width^0.75. With a learning rate of 1 / width, a decay of sqrt(width)
          therefore keeps it constant.
Here:     One layer of width 32, 64 and 128 is trained on a Markov chain of 63 tokens for three
          times the decay time, 120 to 480 steps, at the high rate of 0.02 and a decay of 1.25, five
          seeds. The paper trains far wider models with many layers on text, and does not decay
          vectors and embeddings; here embeddings decay.
Counts:   the slope over the log width is within 0.08 of 1/4 with a constant decay, of 0 with a
          decay of sqrt(width), and of -1/4 with a decay proportional to the width. The slope over
          log rate / decay is within 0.08 of 1/2.
"""

PART = 'scaling'
STUDIES = {
    'measure': 'measure:decayed_norms',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_over_width_of_constant',
        'within': (0.17, 0.33),
        'label': 'slope of log singular value over log width, constant decay',
    },
    {
        'study': 'measure',
        'value': 'slope_over_width_of_sqrt_width',
        'within': (-0.08, 0.08),
        'label': 'slope of log singular value over log width, decay of sqrt(width)',
    },
    {
        'study': 'measure',
        'value': 'slope_over_width_of_linear_width',
        'within': (-0.33, -0.17),
        'label': 'slope of log singular value over log width, decay of width',
    },
    {
        'study': 'measure',
        'value': 'slope_over_rate_over_decay',
        'within': (0.42, 0.58),
        'label': 'slope of log singular value over log (rate / decay)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'slope_over_rate_over_decay_for_noise',
        'within': (0.42, 0.58),
        'label': (
            'slope of log singular value over log (rate / decay), random gradients (1/2 expected)'
        ),
    },
    {
        'study': 'measure',
        'value': 'slope_over_width_of_sqrt_width_for_noise',
        'within': (-0.33, -0.17),
        'label': (
            'slope of log singular value over log width, random gradients, decay of '
            'sqrt(width) (-1/4 expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_over_width_of_constant',
        'within': (-0.08, 0.08),
        'label': (
            'slope of log singular value over log width, decay of sqrt(width) without this factor'
        ),
    },
)
FIDELITY = {
    'decay of sqrt(width)': {
        'setting': (
            'at width 32 m muP with Adam at a constant 0.02 / m and decay 1.25 sqrt(m) for hidden '
            'matrices, 1.25 for embeddings and readout, none for vectors; 120 sqrt(m) steps of 4 '
            'rows of 32 tokens'
        ),
        'published': (
            'AdamW with matrix rates of 1 / width and decay of sqrt(width), vectors at a constant '
            'rate without decay; LLaMA-style transformers and a synthetic task; widths and rates '
            'are not known here'
        ),
        'source': 'arXiv:2510.15262, abstract',
    },
    'constant decay and decay of width': {
        'setting': 'the same with decay 1.25 or 1.25 m, 120 m or 120 steps',
        'published': (
            'the exponents follow from sqrt(rate / decay) width^0.75; which rules they train is '
            'not known here'
        ),
        'source': 'arXiv:2510.15262, abstract',
    },
}
