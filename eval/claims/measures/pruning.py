"""A model of two languages, half of it pruned for the sake of a language."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from eval.claims.lab import measure
from eval.claims.measures.tiny import TinyModel, draw_chains, draw_text, named_params
from eval.convert.prune import Pruning, ScoreReader, remove_weights
from eval.convert.scores import STRENGTH

SEEDS, STAGES, ROWS, SHARE, LARGER_SHARE = 10, 8, 128, 0.5, 0.6
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


@measure(
    *(f'mean_added_by_dual_less_{rival}' for rival in RIVALS),
    'mean_added_by_dual_without_weights_less_obs',
    'mean_added_by_magnitude_less_larger_share',
)
def pruned_for_a_domain() -> Iterator[np.ndarray]:
    """Yields the loss added by pruning half with a dual score, minus the same with each of RIVALS.

    Losses are in nats per token, mean of two texts. A tiny model learns two chains, the general
    text and the domain. SHARE of the weights of each matrix of its blocks (for Wanda: of each
    output) are removed, at the lowest scores. Wanda and `taylor` read the domain, `obs` the
    general text, and the dual scores both (arXiv:2405.06275); it has, in each seed, the strength of
    STRENGTHS with the lowest loss on the text that it reads. Losses are measured on other rows.
    Over SEEDS.

    without_weights: the dual score over |w|, which is near |g|. larger_share: magnitude pruning of
    LARGER_SHARE.
    """
    tiny = TinyModel({})
    reader = ScoreReader(tiny.learner, ROWS)
    added = [_added_losses(tiny, reader, seed) for seed in range(SEEDS)]
    pairs = (
        *(('dual', rival) for rival in RIVALS),
        ('dual_without_weights', 'obs'),
        ('magnitude', 'larger_share'),
    )
    for method, rival in pairs:
        yield np.array([by_method[method] - by_method[rival] for by_method in added])


def _added_losses(tiny: TinyModel, reader: ScoreReader, seed: int) -> dict[str, float]:
    """Returns the loss added by each of RIVALS, by the dual scores, and by a larger share."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    state = tiny.train(tiny.init(seed), chains, STAGES, rng, BOTH)
    params = named_params(state)
    calibration, held_out = Texts.draw(chains, rng), Texts.draw(chains, rng)

    def compute_scores(score, rows_BT, strength=STRENGTH):
        pruning = Pruning('unimportant', SHARE, score, strength=strength)
        general_BT = calibration.general[:, :-1]  # read by dual scores only
        return reader.compute_scores(state.weights, pruning, rows_BT[:, :-1], general_BT)

    def prune(scores, score, share=SHARE):
        pruning = Pruning('unimportant', share, score)
        return remove_weights(reader.specs, params, scores, pruning, rng).params

    def losses(params, texts):
        return np.mean(
            [tiny.compute_loss(params, state, rows) for rows in (texts.general, texts.domain)]
        )

    rows = {'obs': calibration.general}
    scores = {rival: compute_scores(rival, rows.get(rival, calibration.domain)) for rival in RIVALS}
    pruned = {rival: prune(scores[rival], rival) for rival in RIVALS}
    pruned['larger_share'] = prune(scores['magnitude'], 'magnitude', LARGER_SHARE)
    duals = [compute_scores('dual', calibration.domain, strength) for strength in STRENGTHS]
    without_weights = [
        {path: dual[path] / scores['magnitude'][path] for path in dual} for dual in duals
    ]
    for method, by_strength in {'dual': duals, 'dual_without_weights': without_weights}.items():
        candidates = [prune(scores, 'dual') for scores in by_strength]
        pruned[method] = min(candidates, key=lambda params: losses(params, calibration))
    before = losses(params, held_out)
    return {method: float(losses(pruned[method], held_out) - before) for method in pruned}
