"""Label smoothing worsens the likelihood.

Paper:    arXiv:1706.03762
Says:     smoothing of 0.1 hurts perplexity, as the model learns to be less sure.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   cross-entropy is higher than without.
"""

PART = 'losses'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = ({'study': 'recipes', 'arm': {'loss.label_smoothing': 0.1}, 'difference': (0.0, None)},)
