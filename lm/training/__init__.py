"""Training: the state of a run, its train and evaluation steps, diagnostics and FLOPs.

devices, record, inference, run, eval/ and tpu/ may call it; it calls config and model.
"""
