"""A run of a config, alone or side by side with others in one program: start, steps, records, end.

`train.py`, lm.study, eval and tpu may call this room; it calls all rooms of lm but lm.study.
"""
