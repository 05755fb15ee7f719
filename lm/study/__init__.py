"""Studies, which are of many runs: plans them (`plan`), trains them (`train`), knows what they say
(`arm`, `statistics`, `tables`). `train.py`, eval and tpu may call this room; it calls lm.run and
the rooms below.
"""
