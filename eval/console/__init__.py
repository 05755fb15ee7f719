"""Prints what train.py shows besides training: listings of parts, and a sweep as it goes.

Called by train.py and, for the sweep, lm.sweep.engines. Calls eval.tables, eval.report, lm.config,
lm.run and the parts' own declarations in modules.
"""
