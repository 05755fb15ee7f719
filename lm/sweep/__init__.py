"""The many runs of a config: cells of config.sweep, groups of one program, hosts, sweep.json.
`train.py`, eval and tpu may call this room; it calls lm.run and the rooms below.
"""
