"""Converts checkpoints: folding, merging, pruning, and import and export of Hugging Face models.

Folding writes norms and reparametrisations into the matrices, merging combines several checkpoints,
and pruning sets weights to 0.

Called by `python -m eval.convert` alone. Calls eval.load, lm.model and lm.training for models,
lm.record for files, and modules.norms.fold for the algebra of folding. `means` and `scores` hold
the algebra of merging and pruning, `families` the tables of tensor names, `hf_config` and
`hf_positions` the config fields, and `layouts`, `mxfp4` and `safetensors` the file formats.
"""
