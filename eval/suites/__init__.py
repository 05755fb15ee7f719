"""Suites: each row maps a loaded checkpoint to a `SuiteResult`.

Called by `python -m eval` and tests, as `from eval import perplexity`. Calls eval.load, lm.run's
evaluation, lm.inference and lm.data.
"""

import math

from eval.suites.ablate import ablate
from eval.suites.base import Suite
from eval.suites.bytes import bytes_
from eval.suites.calibration import calibration
from eval.suites.harness import harness
from eval.suites.in_context import in_context
from eval.suites.influence import influence
from eval.suites.layers import layers
from eval.suites.minimal_pairs import minimal_pairs, read_for_training
from eval.suites.neural_collapse import neural_collapse
from eval.suites.ngram import ngram
from eval.suites.perplexity import perplexity
from eval.suites.sharpness import sharpness

SUITES = {
    'ablate': Suite(ablate),
    'bytes': Suite(
        bytes_, score='bits', weight='bytes', unit='bits per byte', item_noun='documents'
    ),
    'calibration': Suite(
        calibration, score='nll', weight='tokens', unit='nats per token', item_noun='rows'
    ),
    'harness': Suite(
        harness,
        argument='tasks',
        score='value',
        lower_is_better=False,
        unit='in the metric',
        refusal='another library reads its tasks, and generates and scores their answers',
    ),
    'in_context': Suite(in_context, score='squared error', unit='squared error'),
    'influence': Suite(
        influence, refusal='it compares gradients of training documents at several checkpoints'
    ),
    'layers': Suite(layers),
    'minimal_pairs': Suite(
        minimal_pairs,
        argument='path',
        score='is_right',
        lower_is_better=False,
        unit='in accuracy',
        item_noun='pairs',
        reader=read_for_training,
    ),
    'neural_collapse': Suite(neural_collapse),
    'ngram': Suite(ngram, refusal='its numbers do not depend on the weights'),
    'perplexity': Suite(
        perplexity,
        argument='stride',
        score='nats',
        weight='bytes',
        unit='bits per byte',
        scale=1 / math.log(2),
        item_noun='documents',
    ),
    'sharpness': Suite(
        sharpness, refusal='it reads the moments of the optimizer from a stored checkpoint'
    ),
}
