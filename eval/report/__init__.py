"""The page of a run or of sweeps: tables, plots that the browser draws, and figures for papers.

Called by `python -m eval.report`, and by eval.console at the end of a sweep. Calls eval.compare for
what is said of variants, eval.tables for records, lm.record and lm.run.warnings.
"""
