"""Suites: each row maps a loaded checkpoint to a `Result`.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation, lm.inference and lm.data.
"""

from eval.suites.base import Suite
from eval.suites.calibration import calibration
from eval.suites.layers import layers
from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity
from eval.suites.sharpness import sharpness

SUITES = {
    'calibration': Suite(calibration, score='nll', weight='tokens'),
    'layers': Suite(layers),
    'ngram': Suite(ngram),
    'perplexity': Suite(perplexity),
    'sharpness': Suite(sharpness),
}
