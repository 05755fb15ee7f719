"""Local Lipschitz constants can be found cheaply and nearly exactly.

Paper:    arXiv:2210.07394, Efficiently Computing Local Lipschitz Constants of Neural Networks via
          Bound Propagation
Says:     Tight bounds on local Lipschitz constants can be computed efficiently, far closer than
          products of norms.
Here:     A lower bound from power iteration at random points; the paper has a guaranteed upper
          bound. Norms are Euclidean instead of the largest coordinate. One and two ReLU blocks with
          three inputs and random weights, fifty seeds, and boxes of edge 1, whose exact constants
          are known from all linear regions. Ten other seeds, looked at first, left the claim
          undecided. Large networks are not measured.
Counts:   ten rounds find at least 95% of the constant at a point, and 1,024 points find at least
          95% of that of a box, without ever exceeding it.
"""

PART = 'evaluation'
WITHDRAWN = (
    'The arm is not the method: it searches from below, in the Euclidean norm and for random '
    'weights, and the paper gives guaranteed bounds from above in the norm of the largest '
    'coordinate.'
)
STUDIES = {
    'measure': 'measure:local_lipschitz',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'share_at_points_of_one_block',
        'within': (0.95, None),
        'label': 'share of the constant found at points, one block',
    },
    {
        'study': 'measure',
        'value': 'share_at_points_of_two_blocks',
        'within': (0.95, None),
        'label': 'share of the constant found at points, two blocks',
    },
    {
        'study': 'measure',
        'value': 'share_in_boxes_of_one_block',
        'within': (0.95, None),
        'label': 'share of the constant found in boxes, one block',
    },
    {
        'study': 'measure',
        'value': 'share_in_boxes_of_two_blocks',
        'within': (0.95, None),
        'label': 'share of the constant found in boxes, two blocks',
    },
    {
        'study': 'measure',
        'value': 'largest_share',
        'within': (None, 1.00001),
        'label': 'largest share',
    },
)
FIDELITY = {
    'power iteration': {
        'setting': (
            'not the published method: a lower bound by 10 rounds at 1,024 random points of a box '
            'of edge 1; Euclidean norm, 3 inputs, blocks of 8 or of 6 and 6 hidden units with '
            'random weights, exact constants from linear programs'
        ),
        'published': (
            'guaranteed upper bounds by bound propagation, optionally with branch and bound of 60 '
            'seconds; norm of the largest coordinate; trained MLPs and CNNs on 16 inputs, MNIST, '
            'CIFAR-10 and Tiny ImageNet'
        ),
        'source': (
            'arXiv:2210.07394; github.com/shizhouxing/Local-Lipschitz-Constants, parser.py, '
            'models/simple.py and README.md'
        ),
    },
}
