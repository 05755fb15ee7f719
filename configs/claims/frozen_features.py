"""MLPs of fixed random features take a fifth of the trained parameters.

Paper:    arXiv:2310.13225, Scalable Neural Network Kernels
Says:     layers whose weights act on random features of the input are trained with up to five times
          fewer parameters, at a quality that competes.
Here:     0.26 million parameters, 1.0 million tokens of Python sources, in 1,000 steps, from the
          start and in each MLP; the paper mostly puts such layers into the adapters and the last
          layers of models that are trained already. What is trained starts as any matrix, where the
          paper starts it at the features of weights. A learning rate of its own for every variant.
Counts:   with a fifth of the trained parameters in the MLPs the loss is at most 0.05 nats above
          that of MLPs that are trained whole.
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
    },
)
