"""Converts checkpoints: folding makes norms and reparametrisations part of the matrices.

Called by `python -m eval.convert` alone. Calls eval.load, lm.model and lm.training for the models,
lm.record for what is written, and modules.norms.fold for the algebra.
"""
