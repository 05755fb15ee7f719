"""Workdirs in object storage, trained and read through a synchronised local folder.

lm.run, lm.inference, eval and train.py may call this room. It may call lm.record, lm.storage and
lm.launch.
"""
