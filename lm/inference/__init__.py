"""Inference: a checkpoint loaded as a model, its probes, and incremental decoding.

run and eval/ call it; it calls config, storage, data, model, training, devices and record.
"""
