"""Property: methods read the text that their description names."""

import numpy as np

from eval.claims.measures import pruning
from eval.claims.measures.tiny import MODES, SYMBOLS


def test_texts_have_their_languages():
    """Catches a domain equal to the general text, and a mixed text of one language."""
    chains = np.full((MODES, SYMBOLS, SYMBOLS), 1 / SYMBOLS)
    texts = pruning.Texts.draw(chains, np.random.default_rng(0))
    modes = [{*rows[:, 0]} for rows in texts]
    assert modes == [{1}, {2}, {1, 2}] and len(texts.both) == pruning.ROWS
