"""Softmax cross-entropy over logits: in plain operations, and as kernels."""
