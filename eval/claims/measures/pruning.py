"""A model of two languages, half of it pruned for the sake of a language."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from eval.claims.lab import measure
from eval.claims.measures.tiny import TinyModel, draw_chains, draw_text, named_params
from eval.convert.prune import Pruning, ScoreReader, remove_weights
from eval.convert.scores import STRENGTH
from lm.training.state import State

SEEDS, STAGES, ROWS, SHARE = 10, 8, 128, 0.5
GENERAL, DOMAIN, BOTH = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)
STRENGTHS = tuple(STRENGTH * factor for factor in (1.0, 1e6, 1e8, 1e10))
RIVALS = ('magnitude', 'wanda', 'obs', 'taylor')


class Texts(NamedTuple):
    """Rows of the two languages, and equally many rows of both together."""

    general: np.ndarray
    domain: np.ndarray
    both: np.ndarray

    @classmethod
    def draw(cls, chains: np.ndarray, rng: np.random.Generator) -> 'Texts':
        """Draws ROWS rows of each."""
        return cls(*(draw_text(chains, ROWS, rng, shares) for shares in (GENERAL, DOMAIN, BOTH)))


@measure(*(f'mean_added_by_dual_less_{rival}' for rival in RIVALS))
def pruned_for_a_domain() -> Iterator[np.ndarray]:
    """Yields the loss added by pruning half with a dual score, minus the same with each of RIVALS.

    Losses are in nats per token, mean of two texts. A tiny model learns two chains, the general
    text and the domain. SHARE of the weights of each matrix of its blocks (for Wanda: of each
    output) are removed, at the lowest scores. Wanda and `taylor` read the domain, `obs` the
    general text, and the dual scores both (arXiv:2405.06275); it has, in each seed, the strength of
    STRENGTHS with the lowest loss on the text that it reads. Losses are measured on other rows.
    Over SEEDS.
    """
    tiny = TinyModel({})
    reader = ScoreReader(tiny.learner, ROWS)
    added_SM = np.array([_added_losses(tiny, reader, seed) for seed in range(SEEDS)])
    yield from (added_SM[:, -1:] - added_SM[:, :-1]).T


def _added_losses(tiny: TinyModel, reader: ScoreReader, seed: int) -> list[float]:
    """Returns the loss added by each of RIVALS and by the dual score."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    state = tiny.train(tiny.init(seed), chains, STAGES, rng, BOTH)
    calibration, held_out = Texts.draw(chains, rng), Texts.draw(chains, rng)

    def losses(params, texts):
        return np.array(
            [tiny.compute_loss(params, state, rows) for rows in (texts.general, texts.domain)]
        )

    rows = {'obs': calibration.general}
    rivals = [_prune(reader, state, rival, rows.get(rival, calibration.domain)) for rival in RIVALS]
    duals = [
        _prune(reader, state, 'dual', calibration.domain, calibration, strength)
        for strength in STRENGTHS
    ]
    dual = min(duals, key=lambda params: losses(params, calibration).mean())
    before = losses(named_params(state), held_out)
    return [(losses(params, held_out) - before).mean() for params in (*rivals, dual)]


def _prune(
    reader: ScoreReader,
    state: State,
    score: str,
    rows_BT: np.ndarray,
    texts: Texts | None = None,
    strength: float = STRENGTH,
) -> Mapping[str, np.ndarray]:
    """Returns the parameters without SHARE of the weights.

    texts: given for a score that reads two texts.
    """
    pruning = Pruning('unimportant', SHARE, score, strength=strength)
    general_BT = texts and texts.general[:, :-1]
    scores = reader.compute_scores(state.weights, pruning, rows_BT[:, :-1], general_BT)
    rng = np.random.default_rng(pruning.seed)
    return remove_weights(reader.specs, named_params(state), scores, pruning, rng).params
