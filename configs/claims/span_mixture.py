"""Corrupted spans in half of the rows preserve the causal model.

Paper:    arXiv:2305.02309, CodeGen2
Says:     A mixture of causal language modelling and span corruption, half of each, preserves the
          performance of the causal model.
Here:     A 4-layer model with 0.26 million parameters is trained for 400 steps on 0.4 million
          tokens of Python source code. Its loss on unchanged text is compared with that of a
          causal model at equal tokens, of which the mixture predicts two thirds. The paper
          measures programs that pass tests, with a billion parameters.
Counts:   the loss on unchanged text is at most 0.03 nats above that of the causal model.
"""

from configs.claims import _shared

PART = 'data'
STUDIES = {
    'objectives': 'configs/studies/objectives_tuned.py',
}
HOLDS = (
    {
        'study': 'objectives',
        'arm': {'data.objective': 'causal:0.5+span_corruption:0.5'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, corrupted spans in half of the rows minus causal rows alone (nats '
            'per token)'
        ),
    },
)
CONTROL = _shared.OBJECTIVES_CONTROL
FIDELITY = {
    'mixture': {
        'setting': (
            'half of the rows, drawn by row after packing; 15 to 50% of a document in holes of 3 '
            'to 64 tokens, at most 8; the loss on the contents of holes alone; AdamW with betas '
            '0.9 and 0.95, decay 0.1, warm-up for a tenth of the steps, cosine to 0, batches of 8 '
            'x 128 tokens, its own tuned rate'
        ),
        'published': (
            'half of the sequences; uniform shares and lengths of holes, whose ranges are not '
            'known here, drawn for each file in a packed sequence; optimizer and schedule are not '
            'known here'
        ),
        'source': 'arXiv:2305.02309, as the cards of the released models and others describe it',
    },
    'causal model': {
        'setting': 'the same model without the special tokens of holes, and the same training',
        'published': 'the same model, trained on causal rows alone',
        'source': 'arXiv:2305.02309',
    },
}
