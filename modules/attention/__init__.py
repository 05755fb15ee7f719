"""Attention layers on flattened activations. A new one is a file here and a row in `ATTENTIONS`.

Each is a Linen class with the fields of `SoftmaxAttention`, called on (x [B*T, D], Sequence).
"""

from modules.attention.softmax import SoftmaxAttention

ATTENTIONS = {'softmax': SoftmaxAttention}
