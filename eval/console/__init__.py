"""Prints what train.py shows besides training: listings of parts, configs and schedules."""
