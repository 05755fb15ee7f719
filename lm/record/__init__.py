"""Records of a run in its workdir: config, checkpoints, metrics, and the machine that made them.

lm.run, lm.study, lm.inference and eval may call this room. It may call lm.config, lm.storage,
lm.launch and lm.training; it may not call its own room `remote`, nor lm.inference.
"""
