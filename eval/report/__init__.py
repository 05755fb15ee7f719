"""The page of a run or of sweeps: tables, plots that the browser draws, and figures for papers.

Called by `python -m eval.report`, and by eval.console at the end of a sweep. Uses lm.study.tables
for records and the texts of variants, lm.record and lm.run.warnings.
"""
