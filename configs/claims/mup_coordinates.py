"""Under muP the change made by a step does not grow as a model gets wider.

Paper:    arXiv:2203.03466, Tensor Programs V, appendix D.1
Says:     With muP, activations change equally at every width, so one learning rate suits all
          widths. With the standard rule the changes grow with the width.
Here:     Models with two layers and widths of 32 to 256, five steps of Adam at 0.003 on one random
          batch, five seeds. The test does not tell whether changes shrink.
Counts:   the largest slope of the log change over the log width is at most 0.15 under muP, and at
          least 0.3 under the standard rule.
"""

PART = 'scaling'
CAUTION = (
    'The control narrows the range of the second condition and is the same number, so that only '
    'the first condition and the broken method test muP.'
)
STUDIES = {
    'measure': 'measure:sizes_over_width',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'largest_slope_of_mup',
        'within': (None, 0.15),
        'label': 'largest slope of log change over log width, muP',
    },
    {
        'study': 'measure',
        'value': 'largest_slope_of_standard',
        'within': (0.3, None),
        'label': 'largest slope of log change over log width, standard',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'largest_slope_of_standard',
        'within': (0.7, 1.3),
        'label': 'largest slope of log change over log width, standard (1 expected)',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'largest_slope_of_mup_with_root_of_width',
        'within': (None, 0.15),
        'label': (
            'largest slope of log change over log width, muP with hidden rates over sqrt(width)'
        ),
    },
)
FIDELITY = {
    'muP': {
        'setting': (
            'base width 32; heads keep 16 features, so the scaling of attention logits is not '
            'tested; readout and queries start at random; Adam at a constant 0.003, decay 0.1, '
            'gradients clipped at 1, 8 rows of 128 tokens'
        ),
        'published': (
            'Adam at 0.001 for an MLP, a few steps, five seeds, widths of 64 to 1,024 in the '
            'example; attention logits q k 8 / d; starting readout and queries at 0 is advised'
        ),
        'source': 'arXiv:2203.03466, appendix D.1; github.com/microsoft/mup, README.md',
    },
    'standard': {
        'setting': (
            'one rate for all parameters, all matrices from N(0, 1 / fan_in), embeddings from '
            'N(0, 1 / width), logits over sqrt(16)'
        ),
        'published': 'PyTorch defaults with one rate, Adam at 0.001',
        'source': 'arXiv:2203.03466, appendix D.1; github.com/microsoft/mup, README.md',
    },
}
