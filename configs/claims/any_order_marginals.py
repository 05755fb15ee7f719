"""One number of one pass stands in for the sum of conditionals of any part of a row.

Paper:    arXiv:2310.12920, Generative Marginalization Models
Says:     trained to agree with conditionals in any order, a network gives the probability of any
          part of a row accurately in one pass, where the sum of conditionals takes a pass for
          each token, and so is faster by orders of magnitude.
Here:     rows of 8 symbols from 4 of a drawn Markov chain, whose marginals are known, a model of
          25,000 weights and a head of 49,000, five seeds; the paper has text of 250 characters,
          molecules, images and spins. The head reads the activations of all places, and not their
          mean, as it does in the code of the paper, which has 768 features where there are 32 here;
          it learns from drawn rows alone, and not by half from rows of the model. That code
          compares rows whose probabilities lie 10 nats or more apart; here all drawn rows count,
          and parts of one size. Not asked: learning from an energy without data, and seconds; 8
          passes become one.
Counts:   the rank correlation of the number with the sum of conditionals, whose probability is the
          mean over five orders, is at least 0.95, of whole rows and of random halves of them; and
          so is that with the known probability.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:any_order_marginals',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_conditionals_of_rows',
        'within': (0.95, None),
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_conditionals_of_halves',
        'within': (0.95, None),
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_exact_of_rows',
        'within': (0.95, None),
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_exact_of_halves',
        'within': (0.95, None),
    },
)
