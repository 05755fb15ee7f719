"""Names of the files in a workdir, for readers that need nothing else from it. Imports nothing."""

CONFIG = 'config.json'
SWEEP = 'sweep.json'
SUMMARY = 'summary.json'
STARTS = 'starts.jsonl'  # a line for each start of the command that trains
PARAMETERS = 'parameters.txt'  # shape and settings of each, for people
PARAMETER_ROWS = 'parameters.json'  # the same, for programs
PROFILE = 'profile'  # a folder: traced steps and their summary
BRANCH = 'branch.json'  # the ancestors of a branch, and their losses
CHECKPOINTS = 'checkpoints'  # a folder: STEP/
DAMAGED_FOLDER = 'checkpoints_damaged'  # those that could not be read
EVALUATIONS = 'evaluations'  # a folder: results of suites
LOCK = '.lock'
FINAL = ('done', 'diverged')  # a failed cell of a sweep is tried again
