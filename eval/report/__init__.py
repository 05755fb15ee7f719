"""The page of a run or of sweeps: tables, plots that the browser draws, and figures for papers.

Called by `python -m eval.report`, and by eval.console at the end of a sweep. Calls
lm.study.tables for records and what is said of variants, lm.record and lm.run.warnings.
"""
