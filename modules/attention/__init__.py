"""Attention layers. A new one is a file here and a row in `ATTENTIONS`.

Each is a Linen class called on (x [B, T, D], Sequence). Of the fields of `SoftmaxAttention` it has
those that it needs; what its kernel has to know of its scores it says in a `Scores`.
"""

from modules.attention.softmax import SoftmaxAttention

ATTENTIONS = {'softmax': SoftmaxAttention}
