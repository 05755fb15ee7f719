"""Papers without a claim on the board, with the reason: out of scope, or not yet tested.

A paper is listed by its title. If only a part of it is tested, the other part is listed here.
"""

from collections.abc import Mapping

OUT_OF_SCOPE: Mapping[str, str] = {
    'Mitigating the Accuracy-Robustness Trade-off via Multi-Teacher Adversarial Distillation': (
        'attacks are on images, as tokens have no small change; its two balances have a claim'
    ),
    'PA&DA: Jointly Sampling Path and Data': (
        'paths are of a search over architectures; rows that are drawn have a claim'
    ),
    'Scaling Laws for Neural Machine Translation': (
        'a decoder has no encoder to trade its size for; the form of its law is one of eval.fit'
    ),
    'What are the Desired Characteristics of Calibration Sets?': (
        'it ranks summaries by a metric of reference texts, and there is no summariser here'
    ),
    'Efficiently Computing Local Lipschitz Constants of Neural Networks via Bound Propagation': (
        'attention has no bounds that propagate; estimates from below have a claim'
    ),
    'EnsLoss: Stochastic Calibrated Loss Ensembles': (
        'slopes are calibrated for two classes, of which there is a claim, and not for a vocabulary'
    ),
    'HELM: Hyperbolic Large Language Models': (
        'layers of hyperbolic space throughout are another model; its norm alone is RMSNorm and a '
        'constant coordinate'
    ),
}
NOT_YET_TESTED: Mapping[str, str] = {
    'Scaling Laws for Multilingual NMT': 'five widths at three shares; its law is one of eval.fit',
    'PowerNorm; Unified Normalization': '4 arms, 4,000 steps past the plateau of token frequencies',
    "Transformers Don't Need LayerNorm at Inference Time": 'bases of three sizes, 5,000 steps each',
    'Weight Compander': '40 epochs of 0.5 million tokens, against a tuned decay',
    'Go Wider Instead of Deeper': '8 layers at equal operations',
    'Predictable Scale': '120 runs over rate, rows of a batch and tokens',
    'Languini Kitchen': 'four classes of time, and a machine that does nothing else',
    'One Epoch Is All You Need': 'repeated text costs more than noise at larger sizes alone',
    'Small-scale proxies for large-scale Transformer training instabilities': (
        '56 runs of 5,000 steps, at rates up to 1'
    ),
    'Quantifying Variance in Evaluation Benchmarks': 'ten seeds of ten checkpoints, and BLiMP',
    'Investigating generalization by loss landscapes and Hessian analysis': (
        'twelve checkpoints of four sources, and the sharpness of each, which is a suite'
    ),
    'Efficient Training of Language Models to Fill in the Middle; CodeGen2': (
        'a rate for each mixture; a study with one for all is in configs/studies/results'
    ),
    'Stabilizing Transformer Training by Preventing Attention Entropy Collapse': (
        'training without norms and warm-up; its other sentences have claims'
    ),
}
