"""A hole in half of the rows costs nothing from left to right.

Paper:    arXiv:2207.14255
Says:     A large share of documents, one part of which is moved to the end, does not harm the
          left-to-right model.
Here:     A 4-layer model with 0.26 million parameters is trained for 400 steps on 0.4 million
          tokens of Python source code. Its loss on unchanged text is compared with that of a
          model without holes. The paper trains models with up to 6.9 billion parameters.
Counts:   the loss on unchanged text is at most 0.03 nats above that without holes.
"""

from configs.claims import _shared

PART = 'data'
STUDIES = {
    'objectives': 'configs/studies/objectives_tuned.py',
}
HOLDS = (
    {
        'study': 'objectives',
        'arm': {'data.objective': 'causal:0.5+infill:0.5'},
        'difference': (None, 0.03),
        'label': 'loss difference, a hole in half of the rows minus none (nats per token)',
    },
)
CONTROL = _shared.OBJECTIVES_CONTROL
TWIN = (
    {
        'study': 'objectives',
        'arm': {'data.objective': 'infill'},
        'difference': (None, 0.03),
        'label': 'loss difference, a hole in all rows minus none (nats per token)',
    },
)
FIDELITY = {
    'holes': {
        'setting': (
            'in half of the rows, drawn by row after packing; one hole of a uniform place and '
            'length, cut between tokens; prefix, suffix, middle, each behind its special token; '
            'AdamW with betas 0.9 and 0.95, decay 0.1, warm-up for a tenth of the steps, cosine to '
            '0, batches of 8 x 128 tokens, its own tuned rate'
        ),
        'published': (
            'in half of the documents by default, and in up to 90% without harm; cut between '
            'characters, in both orders (prefix first or suffix first); optimizer and schedule are '
            'not known here'
        ),
        'source': 'arXiv:2207.14255, abstract, and pages that describe it',
    },
    'no holes': {
        'setting': 'the same model without the five special tokens, and the same training',
        'published': 'the same models, trained on the same number of tokens',
        'source': 'arXiv:2207.14255, abstract, and pages that describe it',
    },
}
