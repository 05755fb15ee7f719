"""Under muP the change made by a step keeps its size as a model gets wider.

Paper:    arXiv:2203.03466, Tensor Programs V, appendix D.1
Says:     With muP, activations change equally at every width, so one learning rate suits all
          widths. With the standard rule the changes grow with the width.
Here:     Models with two layers and widths of 32 to 256, five steps of Adam at 0.003 on one random
          batch, five seeds.
Counts:   the largest slope of the log change over the log width is at most 0.15 under muP, and at
          least 0.3 under the standard rule.
"""

PART = 'scaling'
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
