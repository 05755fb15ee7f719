"""Warnings, from rows alone: each kind is given once for a layer; a healthy run has none."""

import ast
import dataclasses
import json

import numpy as np
import pytest

from lm.config.fields import FIELDS
from lm.config.resolve import flatten, resolve
from lm.model.check import check
from lm.run import remedies
from lm.run.journal import Counters
from lm.run.remedies import REMEDIES, list_remedies
from lm.run.warnings import FEWEST_UPDATES, Detector, format_warning
from modules.options import coerce_type
from tests.helpers import tiny_config, tiny_raw

CHANGES = {
    'loss.z_loss': 0.0,
    'optim.warmup_steps': 2,
    'kernels.matmul': 'simulated',
    'kernels.g_scale': 'none',
}
CONFIG = tiny_config(CHANGES)


def healthy(step):
    """Returns a row of a healthy run.

    It has two layers of two heads; entropy falls slowly, streams grow, and one head is low from the
    start. Layer 2 has a branch that starts at 0.
    """
    return {
        'step': step,
        'attention_entropy_share': [[0.9 - 2e-4 * step, 0.7], [0.5, 0.04]],
        'attention_largest_logit': [[3.0, 4.0], [9000.0, 2.0]],
        'attention_output_rms': [0.1, 0.2],
        'mlp_output_rms': [0.1, 0.0 if step == 0 else 0.1],
        'residual_rms': [1.0 + step / 10, 2.0 + step],
        'residual_largest': [4.0 + step, None if step is None else 9.0],
        'layer_grad_norm': [0.1, 0.0 if step == 0 else 0.2],
        'log_z_mean': 2.8 + step / 100,
        'rounding_error_g_up': [0.02, None],
        'rounding_error_g_out': [0.3, 0.4],
    }


def detect_warnings(*rows, config=CONFIG, previous=()):
    detector = Detector(config, list(previous))
    return [warning for row in rows for warning in detector.detect(row)]


def kinds(warnings):
    return [(w['kind'], w['step'], w['layer'], w['head']) for w in warnings]


def test_healthy_run_has_no_warnings():
    rows = [healthy(step) for step in range(0, 600, 50)]
    rows += [{'step': s, 'update_norm': 1 + s % 3, 'loss': None} for s in range(600, 700)]
    assert not detect_warnings(*rows)


# What changes in the row of step 200, and the warning of it.
BREAKS = {
    'a head collapses': (
        {'attention_entropy_share': [[0.85, 0.6], [0.01, 0.03]]},
        ('entropy_collapse', 200, 2, 1),
        ('layer 2, head 1', '0.01 of', '0.5'),
    ),
    'a mean falls': (
        {'attention_entropy_share': [[0.2, 0.15], [0.5, 0.04]]},
        ('entropy_collapse', 200, 1, 2),
        ('layer 1 fell from 0.79 ', 'at step 100', '0.175', 'head 2'),
    ),
    'a logit': (
        {'attention_largest_logit': [[3.0, 10001.0], [None, 9e3]]},
        ('largest_logit', 200, 1, 2),
        ('layer 1, head 2', '1e+04'),
    ),
    'log Z': ({'log_z_mean': -40.0}, ('log_z_drift', 200, None, None), ('2.8', '-40')),
    'a dead output': (
        {'mlp_output_rms': [1e-9, 0.1]},
        ('dead_layer', 200, 1, None),
        ('mlp output rms of layer 1 is 1e-09',),
    ),
    'no gradient': (
        {'layer_grad_norm': [0.1, 0.0]},
        ('dead_layer', 200, 2, None),
        ('layer 2 has no gradient',),
    ),
    'a stream explodes': (
        {'residual_rms': [1.0, 2001.0]},
        ('exploding_layer', 200, 2, None),
        ('residual rms of layer 2 grew from 2 to 2e+03', '1000 times'),
    ),
    'a coordinate explodes': (
        {'residual_largest': [4e4 + 9, 9.0]},
        ('exploding_layer', 200, 1, None),
        ('residual largest of layer 1',),
    ),
    'a stream is not finite': (
        {'residual_rms': [float('nan'), 3.0]},
        ('exploding_layer', 200, 1, None),
        ('not finite at step 200',),
    ),
    'a gradient is lost': (
        {'rounding_error_g_up': [0.75, None]},
        ('lost_gradient', 200, 1, None),
        ('output of up in layer 1', '0.75 of its norm', 'above 0.5'),
    ),
}


@pytest.mark.parametrize('name', BREAKS)
def test_warning_kind_is_given_once_per_layer(name):
    """Catches another layer or head, a threshold that is crossed unnoticed, a warning that is given
    again, and one that was given before the run was resumed.
    """
    change, expected, texts = BREAKS[name]
    rows = [*map(healthy, (0, 100, 150)), healthy(200) | change, healthy(250) | change]
    warnings = detect_warnings(*rows)
    assert kinds(warnings) == [expected]
    for text in texts:
        assert text in warnings[0]['seen']
    assert json.loads(json.dumps(warnings)) == warnings
    assert not detect_warnings(*rows, previous=warnings)
    assert f'{warnings[0]["seen"]}. Known to help: --config.' in format_warning(warnings[0])


def test_stochastic_gradients_are_not_lost():
    """They are unbiased, however large the error of one step."""
    config = tiny_config(CHANGES | {'kernels.g_rounding': 'stochastic'})
    assert not detect_warnings({'step': 50, 'rounding_error_g_up': [1.0, 1.0]}, config=config)


def test_second_layer_has_its_warning():
    low, lower = [[0.01, 0.7], [0.5, 0.04]], [[0.01, 0.7], [0.5, 0.03]]
    rows = [healthy(0), *({'step': s, 'attention_entropy_share': low} for s in (300, 500))]
    rows.append({'step': 900, 'attention_entropy_share': [lower[0], [0.02, 0.03]]})
    assert kinds(detect_warnings(*rows)) == [
        ('entropy_collapse', 300, 1, 1),
        ('entropy_collapse', 900, 2, 1),
    ]


def test_slow_decline_is_no_collapse():
    """The decline takes more than FALL_STEPS: catches a comparison with all earlier steps."""
    shares = (0.9, 0.7, 0.5, 0.34, 0.25)
    rows = [
        {'step': 100 * i, 'attention_entropy_share': [[share, share]]}
        for i, share in enumerate(shares)
    ]
    assert not detect_warnings(*rows)
    assert kinds(detect_warnings(*({**row, 'step': row['step'] // 2} for row in rows)))[0][:2] == (
        'entropy_collapse',
        150,
    )


def test_update_jump_gives_a_warning():
    rows = [{'step': s, 'update_norm': 1.0 + 0.1 * (s % 5)} for s in range(40)]
    assert not detect_warnings(*rows, {'step': 41, 'update_norm': 5.9})
    (warning,) = detect_warnings(
        *rows, {'step': 41, 'update_norm': 6.2}, {'step': 42, 'update_norm': 9.0}
    )
    assert warning['kind'] == 'update_jump' and '6.2 at step 41' in warning['seen']
    assert not detect_warnings(*rows[: FEWEST_UPDATES - 1], {'step': 41, 'update_norm': 100.0})


def test_observed_rows_count_like_detected_rows():
    """A run that resumes knows its start and its last updates."""
    rows = [healthy(0), *({'step': s, 'update_norm': 1.0} for s in range(1, 20))]
    detector = Detector(CONFIG, [])
    for row in json.loads(json.dumps(rows)):
        detector.observe(row)
    assert kinds(detector.detect({'step': 21, 'update_norm': 7.0})) == [
        ('update_jump', 21, None, None)
    ]
    assert (
        kinds(detector.detect({'step': 22, 'residual_rms': [1.0, 3000.0]}))[0][0]
        == 'exploding_layer'
    )


def test_old_counters_have_no_warnings():
    stored = {
        name: value for name, value in dataclasses.asdict(Counters()).items() if name != 'warnings'
    }
    assert Counters(**stored).warnings == []


@pytest.mark.parametrize('kind', REMEDIES)
def test_config_lines_are_accepted(kind):
    """Parses each line as train.py would; catches a field or a row that does not exist."""
    lines = list_remedies(kind, CONFIG)
    assert lines
    for line, source in lines:
        path, value = line.removeprefix('--config.').split('=')
        parsed = coerce_type(
            path, ast.literal_eval(value) if value[0].isdigit() else value, FIELDS[path].types
        )
        config = resolve(tiny_raw({**CHANGES, path: parsed}))
        check(config)
        assert flatten(config)[path] == parsed != flatten(CONFIG)[path]
        assert source.startswith('arXiv:')


def test_present_settings_are_not_advised():
    paths = {line.split('=')[0] for line, _ in list_remedies('entropy_collapse', CONFIG)}
    assert '--config.model.qk_norm' in paths
    config = tiny_config({'model.qk_norm': 'layernorm'})
    assert 'qk_norm' not in str(list_remedies('entropy_collapse', config))
    assert 'z_loss' in str(list_remedies('log_z_drift', CONFIG))
    assert 'z_loss' not in str(list_remedies('log_z_drift', tiny_config({'loss.z_loss': 1e-3})))
    assert 'clip_norm' not in str(
        list_remedies('update_jump', tiny_config({'optim.clip_norm': 0.5}))
    )


def test_remedies_name_fields():
    """Checks remedies without using them: catches a misspelt path, which would never be advised."""
    named = {r.path for r in vars(remedies).values() if isinstance(r, remedies.Remedy)}
    assert named <= FIELDS.keys()
    assert np.all([len(REMEDIES[kind]) for kind in REMEDIES])
