"""Names of the files in a workdir, for readers that need nothing else of it. Imports nothing."""

CONFIG = 'config.json'
SWEEP = 'sweep.json'
SUMMARY = 'summary.json'
LOCK = '.lock'
FINAL = ('done', 'diverged')  # a cell of a sweep that failed is tried again
