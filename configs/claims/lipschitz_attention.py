"""Dot-product attention is not Lipschitz, and attention from distances is.

Paper:    arXiv:2006.04710, The Lipschitz Constant of Self-Attention
Says:     The Jacobian of dot-product attention grows without bound with the inputs. That of L2
          attention with one matrix for queries and keys does not.
Here:     One causal head as wide as the model, with 8 features, 8 tokens and Gaussian matrices,
          fifty seeds. Values have their own matrix, whereas the paper derives it from that of the
          queries, and distances are halved. The largest singular value is searched in the same 66
          rows at sizes from 4 to 64, so the second half of the claim is not proved. An earlier
          version of this test left the claim undecided: each size had other rows, and one row of
          each was of no definite size.
Counts:   the slope of the log of the largest singular value over the log input size is at least 1.5
          for dot products (2 in theory), and at most 0.2 for distances.
"""

PART = 'attention'
STUDIES = {
    'measure': 'measure:lipschitz_attention',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_products',
        'within': (1.5, None),
        'label': 'slope of log singular value over log input size, dot products',
    },
    {
        'study': 'measure',
        'value': 'slope_of_tied_distances',
        'within': (None, 0.2),
        'label': 'slope of log singular value over log input size, distances',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'slope_of_untied_distances',
        'within': (0.5, None),
        'label': (
            'slope of log singular value over log input size, distances with a matrix for queries '
            'and another for keys'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_of_tied_distances_with_one_term_scaled',
        'within': (None, 0.2),
        'label': (
            'slope of log singular value over log input size, distances whose product of query '
            'and key is not divided by sqrt(8)'
        ),
    },
)
FIDELITY = {
    'dot products': {
        'setting': (
            'one causal head, 8 features, 8 tokens, matrices from N(0, 1/8), scores over sqrt(8); '
            'inputs of sizes 4 to 64, one row with the last token at 0'
        ),
        'published': (
            'proof for any sizes and matrices that there is no constant, with an example in which '
            'a token is 0'
        ),
        'source': 'arXiv:2006.04710, theorem 3.1',
    },
    'distances': {
        'setting': (
            'queries share the matrix of the keys, scores -|q - k|^2 / (2 sqrt(8)), values have a '
            'free matrix; 66 rows for each size, 100 rounds of power iteration, a lower bound'
        ),
        'published': (
            'shared matrix, scores -|q - k|^2 / sqrt(H), values derived from that matrix; an '
            'upper bound is proved, and experiments suggest that it is tight asymptotically'
        ),
        'source': 'arXiv:2006.04710',
    },
}
