"""Muon needs at most two thirds of the tokens of AdamW at 124 million parameters.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     For the loss that AdamW reaches after compute-optimal training, Muon needs about 52% of
          the FLOPs, at 400 million to 1.5 billion parameters.
Here:     A model with 124 million parameters is trained on 2.5 billion tokens of FineWeb-Edu, 20
          per parameter, in rows of 2,048 tokens. Both optimizers have their own tuned learning
          rate, whereas the paper uses AdamW's rate for both. The paper's models are 3 to 12 times
          as large.
Counts:   AdamW needs at least 1.5 times the tokens for the final loss of Muon.
"""

PART = 'optimizers'
CAUTION = (
    'The study has no control and no broken method yet, so that its runs alone would leave the '
    'claim "not checked".'
)
STUDIES = {'pod': 'configs/studies/muon_124m.py on v5e:4x4'}
HOLDS = (
    {
        'study': 'pod',
        'arm': {'optim.name': 'muon'},
        'speedup': (1.5, None),
        'label': 'tokens that AdamW needs for the final loss of Muon, over the tokens of Muon',
    },
)
FIDELITY = {
    'Muon': {
        'setting': (
            'momentum 0.95, Nesterov, five Newton-Schulz steps, factor sqrt(max(1, outputs / '
            'inputs)), decay 0.1 times the rate; hidden matrices only, at their own tuned '
            'rate; schedule and batch are those of AdamW here'
        ),
        'published': (
            'momentum 0.95, Nesterov, five steps in bfloat16, decay 0.1, but factor 0.2 '
            'sqrt(max(inputs, outputs)) at the rate of AdamW, which is not tuned for Muon and '
            'serves all parameters'
        ),
        'source': (
            'arXiv:2502.16982, section 2; github.com/MoonshotAI/Moonlight, examples/toy_train.py'
        ),
    },
    'AdamW': {
        'setting': (
            'b1 0.9, b2 0.95, decay 0.1 times the rate, clipping at 1; warm-up of 500 of 9,600 '
            'steps, cosine to a tenth, 128 x 2,048 tokens; tuned rate for hidden matrices, '
            '0.003 for the rest; also 1.5 and 2 times as long'
        ),
        'published': (
            'betas 0.9 and 0.95, decay 0.1; the rates of the scaling runs are not known here'
        ),
        'source': 'github.com/MoonshotAI/Moonlight, examples/toy_train.py',
    },
}
