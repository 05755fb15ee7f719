"""One network output replaces the sum of conditionals for any part of a row.

Paper:    arXiv:2310.12920, Generative Marginalization Models
Says:     A network trained to agree with conditionals in any order gives the probability of any
          part of a row accurately in one pass. The sum of conditionals needs one pass per token, so
          the network is faster by orders of magnitude.
Here:     Rows of 8 symbols out of 4 come from a random Markov chain with known marginals. The model
          has 25,000 weights and the head 49,000; five seeds. The paper has text of 250 characters,
          molecules, images and spins. Here the head reads the activations of all positions; the
          paper's code reads their mean, but with 768 features instead of 32. Our head learns only
          from the data, the paper's also from rows of the model, half of each. The paper's code
          compares rows whose probabilities are at least 10 nats apart; here all rows count, and
          parts of one size. Learning from an energy without data and run time are not tested: 8
          passes become one.
Counts:   the rank correlation of the output with the sum of conditionals, whose probability is the
          mean over five orders, is at least 0.95 for whole rows and for random halves, and so is
          its rank correlation with the exact probability.
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
        'label': 'rank correlation with conditionals, whole rows',
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_conditionals_of_halves',
        'within': (0.95, None),
        'label': 'rank correlation with conditionals, halves',
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_exact_of_rows',
        'within': (0.95, None),
        'label': 'rank correlation with exact probabilities, whole rows',
    },
    {
        'study': 'measure',
        'value': 'rank_correlation_of_f_with_exact_of_halves',
        'within': (0.95, None),
        'label': 'rank correlation with exact probabilities, halves',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'rank_correlation_of_supervised_f_with_exact_of_rows',
        'within': (0.95, None),
        'label': (
            'rank correlation with exact probabilities, whole rows, of a head trained on exact ones'
        ),
    },
)
TWIN = (
    *(
        {
            'study': 'measure',
            'value': f'rank_correlation_of_f_of_all_hidden_with_{_reference}_of_{_part}',
            'within': (0.95, None),
            'label': (
                f'rank correlation with {_reference_name}, {_part_name}, of a head trained on the '
                'conditionals of all hidden places instead of the next'
            ),
        }
        for _part, _part_name in (('rows', 'whole rows'), ('halves', 'halves'))
        for _reference, _reference_name in (
            ('conditionals', 'conditionals'),
            ('exact', 'exact probabilities'),
        )
    ),
)
FIDELITY = {
    'marginal head': {
        'setting': (
            'two hidden layers of 128 on the activations of all 8 places, the rest frozen; Adam '
            'at 3e-3 falling by a cosine for 2,500 steps of 64 fresh rows, all from the data'
        ),
        'published': (
            'two hidden layers of 3,072 on the mean over 250 places, the rest frozen; Adam at a '
            'constant 5e-4, batch 512, 200 epochs, gradients clipped at 0.25, half of the loss on '
            'rows of the model, refreshed by 4 Gibbs steps'
        ),
        'source': (
            'github.com/PrincetonLIPS/MaM, mam/config/config_text.yaml, mam/text_runner.py, '
            'mam/models/mam.py and transformer.py'
        ),
    },
    'conditionals': {
        'setting': (
            'two blocks of width 32 without a causal mask; Adam at 5e-3 falling by a cosine for '
            '1,500 steps of 64 fresh rows, the loss on all hidden places; compared with the mean '
            'of 5 orders'
        ),
        'published': (
            '12 blocks of width 768, rate 5e-4, batch 16, the loss on all hidden places; compared '
            'with the mean of 5 orders, for rows whose probabilities differ by at least 10 nats'
        ),
        'source': (
            'github.com/PrincetonLIPS/MaM, ao_arm/conf/config_text.yaml, ao_arm/text_model.py and '
            'mam/config/config_text.yaml'
        ),
    },
}
