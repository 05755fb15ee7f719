"""Sends the records of runs to trackers: W&B, MLflow.

A follower (`follower`) reads the files of runs (`records`), notes beside them the last step that a
tracker has (`marks`), and sends the rest. A tracker is a file with a class as in `trackers`, and a
row there. No module imports JAX: a follower runs beside training.
"""
