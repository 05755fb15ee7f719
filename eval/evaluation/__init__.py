"""Evaluates checkpoints by suites: what is asked for, of which checkpoints, and what is kept of it;
statistics over checkpoints and seeds, paired comparison, and the page.

Called by `python -m eval` and `python -m eval.compare`. Calls eval.suites, eval.load, eval.charts,
lm.study.tables and lm.record.
"""
