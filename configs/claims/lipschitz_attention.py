"""Attention by products is not Lipschitz, and attention by distances is.

Paper:    arXiv:2006.04710, The Lipschitz Constant of Self-Attention
Says:     the Jacobian of dot-product attention grows without bound with the inputs, and that of L2
          attention with one matrix for queries and keys does not.
Here:     one causal head as wide as the model, 8 features and 8 tokens, Gaussian matrices, fifty
          seeds; ten others, looked at first, left it undecided. Values have a matrix of their own,
          where the paper's come from that of the queries, and distances are halved. The largest
          singular value is searched for in 66 rows a scale, of sizes 4 to 64, so that the second
          half is no proof.
Counts:   over the size of the input the slope of the log of the largest singular value is at least
          1.5 for products (2 in theory), and at most 0.2 for distances.
"""

PART = 'attention'
STUDIES = {
    'measure': 'measure:lipschitz_attention',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_products', 'within': (1.5, None)},
    {'study': 'measure', 'value': 'slope_of_tied_distances', 'within': (None, 0.2)},
)
