"""Papers that were considered for the board and have no claim: out of scope, or not yet tested.

A paper is listed by its title, with the reason. If only a part of it is tested, the rest is here.
"""

from collections.abc import Mapping

OUT_OF_SCOPE: Mapping[str, str] = {
    'Mitigating the Accuracy-Robustness Trade-off via Multi-Teacher Adversarial Distillation': (
        'its attacks change images slightly, which tokens do not allow; its balancing has a claim'
    ),
    'PA&DA: Jointly Sampling Path and Data': (
        'paths belong to a search over architectures; drawing rows has a claim'
    ),
    'Scaling Laws for Neural Machine Translation': (
        'it trades encoder size for decoder size; eval.fit has the form of its law'
    ),
    'What are the Desired Characteristics of Calibration Sets?': (
        'it ranks summaries by reference texts, and the project has no summarisation'
    ),
    'Efficiently Computing Local Lipschitz Constants of Neural Networks via Bound Propagation': (
        'its bounds do not propagate through attention; a claim on lower bounds is withdrawn'
    ),
    'EnsLoss: Stochastic Calibrated Loss Ensembles': (
        'its losses are calibrated for two classes, which has a claim, but not for a vocabulary'
    ),
    'HELM: Hyperbolic Large Language Models': (
        'hyperbolic layers throughout are a different model; its norm alone is RMSNorm plus a '
        'constant coordinate'
    ),
}
NOT_YET_TESTED: Mapping[str, str] = {
    'Scaling Laws for Multilingual NMT': 'needs five widths at three shares; eval.fit has the law',
    'PowerNorm; Unified Normalization': 'needs 4 arms of 4,000 steps beyond the unigram plateau',
    "Transformers Don't Need LayerNorm at Inference Time": (
        'needs base models of three sizes, 5,000 steps each'
    ),
    'Weight Compander': 'needs 40 epochs of 0.5 million tokens, against a tuned weight decay',
    'Go Wider Instead of Deeper': 'needs 8 layers at equal FLOPs',
    'Predictable Scale': 'needs 120 runs over learning rate, batch size and tokens',
    'Languini Kitchen': 'needs four compute classes, and an idle machine',
    'One Epoch Is All You Need': 'repeated text costs more than noise only at larger sizes',
    'Small-scale proxies for large-scale Transformer training instabilities': (
        'needs 56 runs of 5,000 steps, at learning rates up to 1'
    ),
    'Quantifying Variance in Evaluation Benchmarks': 'needs ten seeds of ten checkpoints and BLiMP',
    'Investigating generalization by loss landscapes and Hessian analysis': (
        'needs twelve checkpoints from four sources, and the sharpness suite on each'
    ),
    'Stabilizing Transformer Training by Preventing Attention Entropy Collapse': (
        'training without norms and warm-up is not tested; its other statements have claims'
    ),
}
