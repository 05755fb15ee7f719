"""MLPs with fixed random features need a fifth of the trained parameters.

Paper:    arXiv:2310.13225, Scalable Neural Network Kernels
Says:     Layers whose weights act on random features of the input train with up to five times fewer
          parameters, at competitive quality.
Here:     A model with 0.26 million parameters is trained from scratch for 1,000 steps on 1.0
          million tokens of Python source code, with random features in every MLP. The paper mostly
          puts such layers into adapters and the last layers of pretrained models. Trained weights
          start like any matrix, whereas the paper starts them at the features of weights.
Counts:   with a fifth of the trained parameters in the MLPs, the loss is at most 0.05 nats above
          that of fully trained MLPs.
"""

PART = 'weights'
STUDIES = {
    'frozen': 'configs/studies/frozen_tuned.py',
}
HOLDS = (
    {
        'study': 'frozen',
        'arm': {'model.mlp': 'random_features', 'model.d_ff': 102},
        'difference': (None, 0.05),
        'label': 'loss difference, random features minus trained MLPs (nats per token)',
    },
)
