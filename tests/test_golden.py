"""Golden: the recorded train steps, which a refactoring must not change."""

import json

import jax
import pytest

from tests import golden

RECORDED = json.loads(golden.FILE.read_text())


@pytest.mark.full
@pytest.mark.skipif(
    RECORDED['jax'] != jax.__version__, reason='recorded with another version of JAX'
)
@pytest.mark.parametrize('name', golden.STEPS)
def test_step_is_the_recorded_one(name):
    """If the change is meant: `python -m tests.golden --write`, and say in the commit why."""
    present = golden.describe_step(golden.lower_step(name))
    assert golden.list_differences(name, RECORDED['steps'][name], present) == []


def test_differences_name_the_operations():
    text = 'stablehlo.add %a, %b\nstablehlo.dot_general %a\n'
    recorded = golden.describe_step(text)
    assert recorded['operations'] == {'stablehlo.add': 1, 'stablehlo.dot_general': 1}
    longer = golden.describe_step(text + 'stablehlo.add %a, %a\n')
    assert golden.list_differences('x', recorded, recorded) == []
    assert golden.list_differences('x', recorded, longer) == ['x: stablehlo.add 1 -> 2']
    (line,) = golden.list_differences('x', recorded, golden.describe_step(text.replace('%b', '%c')))
    assert 'other values' in line
