"""Studies train and compare many runs.

`plan` plans the runs, `train` trains them, and `arm`, `statistics`, `verdicts` and `tables` draw
conclusions from them. `train.py`, eval and tpu may import this package; it imports lm.run and the
packages below it.
"""
