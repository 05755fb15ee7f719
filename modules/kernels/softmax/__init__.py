"""Softmax and log of a sum of exponentials over the last axis."""
