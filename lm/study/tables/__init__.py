"""Run records as tables: columns and types, records of runs and sweeps, SQL, text; and comparisons
of the variants of a sweep.

Called by eval.runs, eval.compare, eval.report, eval.fit and eval.console. Calls lm.record,
lm.study.train.ledger and lm.config, DuckDB and Arrow.
"""
