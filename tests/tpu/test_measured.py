"""Published steps: a rate in seconds, and the steps behind a prediction."""

import json

import pytest

from tests import ROOT
from tests.bench.public_steps import ROWS, chip_lines, lines, seconds_at
from tpu.measured import FILE, held_out_errors, nearest_ratio

V6E = (1.3, 1.1, 2.0)


def count_llama(d_model, d_ff, n_layers, n_heads):
    """Returns weights that multiply a token, and attention's operations, of Llama 3.1 at T
    = 8,192.
    """
    layer = 2 * d_model * (n_heads + 8) * 128 + 3 * d_model * d_ff
    return n_layers * layer + 128_256 * d_model, 6 * n_layers * 8192 * n_heads * 128


@pytest.mark.parametrize(
    'sizes, tflops, rows, seconds',
    [
        ((8192, 28_672, 80, 64), 1207.05, 4, 12.20),
        ((16_384, 53_248, 126, 128), 1261.40, 6, 98.34),
    ],
)
def test_published_flops_match_published_seconds(sizes, tflops, rows, seconds):
    """Two rows of tpu-recipes c8cfe2f, training/ironwood/README.md: it counts causal attention, and
    no input table.
    """
    assert seconds_at(tflops, rows * 8192, *count_llama(*sizes)) == pytest.approx(seconds, rel=1e-3)


def test_ratio_is_chip_median():
    ratio = nearest_ratio('v6e', {'v6e': V6E, 'v5e': (3.0,)})
    assert ratio == (1.3, 'v6e', 3, 1.1, 2.0)
    assert (
        ratio.description
        == '1.30 times the estimate, the median of 3 measured steps on v6e (1.10 to 2.00)'
    )


def test_held_out_step_is_predicted_from_others():
    """Catches a median that includes the step itself."""
    assert held_out_errors((1.0, 2.0, 4.0)) == [2.0, 0.25, 0.625]
    assert held_out_errors((1.5,)) == []


def test_unmeasured_chip_uses_nearest_on_platform():
    """Device peaks decide: 459 TFLOP/s of v5p are nearer to 275 of v4 than to 918 of v6e; a TPU7x
    has 1,153, and a GPU of 989 is on another platform.
    """
    measured = {'v6e': V6E, 'v4': (1.5,), 'a100': (1.3,), 'h100': (1.9,)}
    assert nearest_ratio('v5p', measured).chip == 'v4'
    assert nearest_ratio('tpu7x', measured).chip == 'v6e'
    assert nearest_ratio('h200', measured).chip == 'h100'
    assert nearest_ratio('a100', {'v4': (1.5,)}) is None


def test_page_has_stored_steps():
    """Catches a table of tpu/PLANS.md that is older than the file of which plans take ratios."""
    steps, page = json.loads(FILE.read_text())['steps'], (ROOT / 'tpu/PLANS.md').read_text()
    *chips, _ = chip_lines(steps)
    missing = [line for line in (*lines(steps), *chips) if line not in page]
    assert not missing, f'python -m tests.bench.public_steps --stored prints: {missing}'


def test_stored_steps_match_table():
    """Catches stored steps of rows that have changed or disappeared."""
    rows = {row.name: row for row in ROWS}
    for step in json.loads(FILE.read_text())['steps']:
        row = rows[step['name']]
        assert (step['chip'], step['source']) == (row.chip, row.measured.source.url)
        if row.measured.seconds is not None:
            assert step['measured'] == row.measured.seconds
