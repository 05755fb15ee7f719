"""Evaluates checkpoints by suites: requests, targets, stored results, traces, comparisons, pages.

Called by `python -m eval` and `python -m eval.compare`. Calls eval.suites, eval.load, eval.charts,
lm.study.tables and lm.record.
"""
