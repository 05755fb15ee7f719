"""The language model: its transformer, parameters, objectives, base sizes, and checks of a recipe.

training, devices, inference, run, sweep, eval/ and tpu/ may call it; it calls config.
"""
