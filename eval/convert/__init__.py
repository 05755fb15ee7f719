"""Converts checkpoints: folding makes norms and reparametrisations part of the matrices, merging
makes one of several, pruning leaves weights out, and models of Hugging Face come in and go out.

Called by `python -m eval.convert` alone. Calls eval.load, lm.model and lm.training for the models,
lm.record for what is written, and modules.norms.fold for the algebra of folding; means and scores
have that of merging and pruning. hf_families has the tables of names, hf_config and
hf_positions their fields, layouts, mxfp4 and safetensors the bytes.
"""
