"""Tests of speed-ups from complete lengths of the baseline: by hand, at the ends, and over many
studies.
"""

import math

import numpy as np
import pytest

from lm.study.speedup import LESS, MORE, speedup

SEEDS = np.array([-0.01, 0.0, 0.01])  # what each seed adds, in all arms alike


def lengths(*losses):
    """Returns the baseline at 100, 200, 400, ... tokens."""
    return {100.0 * 2**i: loss + SEEDS for i, loss in enumerate(losses)}


def test_loss_between_lengths_is_interpolated():
    """Reference: in the logarithm of tokens 3.0 lies a quarter of the way from 3.1 at 200 to 2.7 at
    400.
    """
    ratio = speedup(lengths(3.5, 3.1, 2.7), 3.0 + SEEDS, 100.0)
    assert ratio.bound == '' and ratio.value == pytest.approx(2 * 2**0.25)
    assert str(ratio) == '2.38'


def test_loss_at_a_length_is_met_there():
    """Reference: the baseline against itself, at the fewest tokens with that loss."""
    for tokens, loss in ((100.0, 3.5), (200.0, 3.1), (400.0, 2.7)):
        ratio = speedup(lengths(3.5, 3.1, 2.7), loss + SEEDS, tokens)
        assert ratio.value == pytest.approx(1) and ratio.bound == ''
        assert ratio.low <= 1 <= ratio.high
    assert speedup(lengths(3.5, 3.1, 3.1), 3.1 + SEEDS, 200.0).value == pytest.approx(1)


def test_loss_beyond_lengths_gives_a_bound():
    above = speedup(lengths(3.5, 3.1, 2.7), 2.6 + SEEDS, 200.0)
    assert (above.value, above.bound, above.high) == (pytest.approx(2), MORE, math.inf)
    assert above.low == pytest.approx(2) and str(above) == 'more than 2'
    below = speedup(lengths(3.5, 3.1, 2.7), 3.6 + SEEDS, 200.0)
    assert (below.value, below.bound, below.low) == (pytest.approx(0.5), LESS, 0.0)
    assert below.high == pytest.approx(0.5)


def test_interval_may_be_open_at_either_end():
    """Noise that seeds do not share makes the difference more uncertain than the gap."""
    noisy = 2.72 + np.array([0.05, -0.05, 0.0])
    ratio = speedup(lengths(3.5, 3.1, 2.7), noisy, 200.0)
    assert ratio.bound == '' and ratio.high == math.inf and 0 < ratio.low < ratio.value


def test_common_seeds_cancel():
    """A shift of one seed in all arms changes nothing."""
    shift = np.array([0.3, -0.2, 0.1])
    plain = speedup(lengths(3.5, 3.1, 2.7), 3.0 + 2 * SEEDS, 100.0)
    shifted = {tokens: losses + shift for tokens, losses in lengths(3.5, 3.1, 2.7).items()}
    moved = speedup(shifted, 3.0 + 2 * SEEDS + shift - shift.mean(), 100.0)
    assert moved.low == pytest.approx(plain.low, rel=0.2)
    first = speedup(lengths(3.5, 3.1, 2.7), 3.0 + 2 * SEEDS + shift, 100.0)
    assert moved.high - moved.low < (first.high - first.low) / 3


def test_half_width_matches_first_order():
    """Reference: se(log s) = se(d) / |dL / d ln D|, on a line without sag."""
    noise = np.array([0.012, -0.004, -0.009, 0.003, -0.002])
    line = {float(d): 5.0 - 0.5 * math.log(d) + np.zeros(5) for d in (100, 200, 400, 800)}
    ratio = speedup(line, 5.0 - 0.5 * math.log(300) + noise, 300.0)
    half_width = 2.776 * noise.std(ddof=1) / math.sqrt(5) / 0.5
    assert ratio.value == pytest.approx(1)
    assert math.log(ratio.high) == pytest.approx(half_width, abs=0.004)
    assert math.log(ratio.low) == pytest.approx(-half_width, abs=0.004)


def test_longer_run_with_higher_loss_is_noise():
    """Property: the value never rises with the arm's loss."""
    baseline = lengths(3.5, 3.0, 3.04, 2.7)
    targets = np.linspace(2.6, 3.6, 41)
    values = [speedup(baseline, target + SEEDS, 100.0).value for target in targets]
    assert np.all(np.diff(values) <= 1e-12) and len({*values}) > 20
    assert speedup(baseline, 3.0201 + SEEDS, 100.0).value == pytest.approx(2, rel=1e-3)


def test_speedup_is_none_without_data():
    baseline = lengths(3.5, 3.1, 2.7)
    ended, diverged = 3.0 + SEEDS, np.array([3.0, math.inf, 3.0])
    assert speedup(baseline, diverged, 100.0) is None
    assert speedup({100.0: ended}, ended, 100.0) is None
    assert speedup(baseline, ended[:1], 100.0) is None
    assert speedup(baseline | {50.0: diverged}, ended, 100.0) == speedup(baseline, ended, 100.0)


@pytest.mark.parametrize('sd', [0.003, 0.02])
def test_interval_coverage(sd):
    """Covers 95% over power laws, with half of the noise common to the arms. Catches an interval of
    unpaired seeds, of another quantile, and without the sag of the curve below its lines.
    """
    rng, covered, n = np.random.default_rng(0), 0, 150

    def losses(tokens, common):
        noise = math.sqrt(0.5) * (common + rng.normal(size=5))
        return 2.0 + 3.0 * tokens**-0.3 + sd * noise

    for true in np.linspace(0.6, 1.8, n):
        common = rng.normal(size=5)
        baseline = {tokens: losses(tokens, common) for tokens in (0.5, 0.71, 1.0, 1.41, 2.0)}
        ratio = speedup(baseline, losses(true, common), 1.0)
        covered += ratio.low <= true <= ratio.high
    assert covered >= 0.92 * n
