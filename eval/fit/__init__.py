"""Scaling laws and laws of loss curves, fitted to runs or to a table of numbers.

Called only by `python -m eval.fit`. Uses lm.study.tables to read runs, SciPy for the fits, and
eval.charts for the style of figures.
"""
