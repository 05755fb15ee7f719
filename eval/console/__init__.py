"""Listings that train.py prints in place of training: parts, configs and schedules."""
