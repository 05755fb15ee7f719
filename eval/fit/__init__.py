"""Scaling laws and laws of loss curves, fitted to runs or to a table of numbers.

Called by `python -m eval.fit` alone. Calls lm.study.tables for the runs, SciPy for the fits, and
eval.charts for the look of figures.
"""
