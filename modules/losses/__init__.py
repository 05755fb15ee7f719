"""Token losses. A new one is a file here and a row in `LOSSES`.

Each maps (logits [M, V], labels [M], label_smoothing) to TokenLoss; the step weighs and sums
tokens.
"""

from modules.losses.cross_entropy import cross_entropy

LOSSES = {'cross_entropy': cross_entropy}
