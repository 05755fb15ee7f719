"""Sends the records of runs to trackers: W&B, MLflow.

A follower (`follower`) reads the files of runs (`records`), notes beside them what a tracker has
(`marks`), and sends the rest. A tracker is a file with a class as in `trackers`, and a row there.
Nothing here imports JAX: a follower runs beside training.
"""
