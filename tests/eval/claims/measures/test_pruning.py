"""Property: methods read the text that they are said to."""

import numpy as np

from eval.claims.measures import pruning
from eval.claims.measures.tiny import MODES, SYMBOLS


def test_texts_are_of_their_languages():
    """Catches a domain that is the general text, and a text of both that is of one."""
    chains = np.full((MODES, SYMBOLS, SYMBOLS), 1 / SYMBOLS)
    read = pruning.Texts.draw(chains, np.random.default_rng(0))
    modes = [{*rows[:, 0]} for rows in read]
    assert modes == [{1}, {2}, {1, 2}] and len(read.both) == pruning.ROWS
