"""Without its norms a transformer has a higher loss.

Paper:    arXiv:1910.07467 and arXiv:2503.10622, which compare with models that have no norms
Says:     With the norms removed and nothing in their place, training fails or ends worse. With
          another remedy (Dynamic Tanh, sigmaReparam) norms are not needed.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss without norms is more than 0.03 nats above that of RMSNorm.
"""

from configs.claims import _shared

PART = 'norms'
CAUTION = (
    'The sign depends on the initial scale of the embeddings: at 1/8 a model without norms is 0.32 '
    'nats better than one with RMSNorm in pre-norm (configs/studies/results/nuisances.md).'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'none', 'model.placement': 'pre'},
        'difference': (0.03, None),
        'label': 'loss difference, no norms minus RMSNorm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'no norms': {
        'setting': (
            'no norm in the blocks, none before the readout, nothing in its place; initial weights '
            'and residual connections as with norms; its own tuned rate'
        ),
        'published': (
            'a Transformer for translation without norms fails to train; Dynamic Tanh without the '
            'tanh diverges; ViT-B with Fixup or SkipInit is 5 to 8 points less accurate than with '
            'LayerNorm, but not with sigmaReparam'
        ),
        'source': 'arXiv:1910.07467, table 4; arXiv:2503.10622, tables 7 and 9',
    },
    'RMSNorm': {
        'setting': (
            'eps 1e-6, AdamW with betas 0.9 and 0.95 and decay 0.1 of matrices and embeddings, its '
            'own tuned rate, warm-up of 20 of 200 steps and cosine to 0, 8 x 128 tokens per step'
        ),
        'published': (
            'LayerNorm or RMSNorm in Transformers for translation; LayerNorm in ViT; the rates of '
            'the comparisons are not known here'
        ),
        'source': 'arXiv:1910.07467, table 4; arXiv:2503.10622, table 9',
    },
}
