"""Workdirs in object storage: trained and read through a local folder that is kept the same.

lm.run, lm.inference, eval and train.py may call this room. It may call lm.record, lm.storage and
lm.launch.
"""
