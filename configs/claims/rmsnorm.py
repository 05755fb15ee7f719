"""RMSNorm is as good as LayerNorm.

Paper:    arXiv:1910.07467, Root Mean Square Layer Normalization
Says:     Leaving out the mean subtraction of LayerNorm does not reduce quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the two losses are within 0.03 nats of each other.
"""

from configs.claims import _shared

PART = 'norms'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'layernorm', 'model.placement': 'pre'},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, LayerNorm minus RMSNorm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
FIDELITY = {
    'RMSNorm': {
        'setting': (
            'a gain, no bias; eps 1e-6, AdamW with betas 0.9 and 0.95 and decay 0.1 of matrices '
            'and embeddings, its own tuned rate, warm-up of 20 of 200 steps and cosine to 0, 8 x '
            '128 tokens per step'
        ),
        'published': (
            'a gain, no bias, eps 1e-8 (in Nematus 1e-5); recurrent networks and a Transformer for '
            'translation; where its norms stand is not known here'
        ),
        'source': 'arXiv:1910.07467, table 4; bzhangGo/rmsnorm, rmsnorm_torch.py and README.md',
    },
    'LayerNorm': {
        'setting': 'a gain and a bias, eps 1e-6; trained as RMSNorm, at its own tuned rate',
        'published': (
            'a gain; a Transformer for translation has BLEU 26.6 and 27.7 on two test sets, and '
            '26.8 and 27.7 with RMSNorm; the settings are not known here'
        ),
        'source': 'arXiv:1910.07467, equation 2 and table 4',
    },
}
