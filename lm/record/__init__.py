"""Records of a run in its workdir: config, checkpoints, metrics, and the machine they are from.

lm.run, lm.study, lm.inference and eval may call this room. It may call lm.config, lm.storage,
lm.launch and lm.training; not its own room `remote`, and not lm.inference.
"""
