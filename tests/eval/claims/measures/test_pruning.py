"""Property: methods read the text that they are said to. Reference: a share by hand."""

import numpy as np

from eval.claims.measures import pruning
from eval.claims.measures.tiny import MODES, SYMBOLS


def test_texts_are_of_their_languages():
    """Catches a domain that is the general text, and a text of both that is of one."""
    chains = np.full((MODES, SYMBOLS, SYMBOLS), 1 / SYMBOLS)
    read = pruning.Texts.draw(chains, np.random.default_rng(0))
    modes = [{*rows[:, 0]} for rows in read]
    assert modes == [{1}, {2}, {1, 2}] and len(read.both) == pruning.ROWS


def test_moved_is_a_share_of_what_the_first_lacks():
    """Catches a share of all weights, and what the other alone lacks."""
    one = {'a': np.array([0.0, 0.0, 1.0, 1.0]), 'b': np.array([0.0, 0.0])}
    other = {'a': np.array([0.0, 1.0, 0.0, 0.0]), 'b': np.array([0.0, 0.0])}
    assert pruning._moved(one, other) == 1 / 4
