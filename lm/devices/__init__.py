"""Devices: meshes, shardings, jitted programs, and the axis along which runs share a program.

inference, run and study call it; it calls config, model and training.
"""
