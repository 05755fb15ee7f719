"""A model of two languages that is pruned by half for one of them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.tiny import Tiny, draw_chains, params_of, text
from eval.convert.prune import Asked, Reader, without
from eval.convert.scores import STRENGTH
from lm.training.state import State

SEEDS, STAGES, ROWS, SHARE = 10, 8, 128, 0.5
GENERAL, DOMAIN, BOTH = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)
STRENGTHS = tuple(STRENGTH * factor for factor in (1.0, 1e6, 1e8, 1e10))
RIVALS = ('magnitude', 'wanda', 'obs', 'taylor')
METHODS = (*RIVALS, 'taylor_of_both', 'dual', 'dual_published')


class Texts(NamedTuple):
    """Rows of the two languages, and as many of both together."""

    general: np.ndarray
    domain: np.ndarray
    both: np.ndarray

    @classmethod
    def draw(cls, chains: np.ndarray, rng: np.random.Generator) -> 'Texts':
        """Draws ROWS of each."""
        return cls(*(text(chains, ROWS, rng, shares) for shares in (GENERAL, DOMAIN, BOTH)))


def pruned_for_a_domain() -> dict[str, Estimate]:
    """Returns the losses that pruning by half adds, by METHODS, in nats a token.

    A tiny model learns two chains, the general text and the domain. SHARE of the weights of each
    matrix of its blocks, of Wanda of each output, are removed: those that score least. Wanda and
    `taylor` read the domain, `obs` the general text, `taylor_of_both` as many rows of either, and
    the dual scores both texts (arXiv:2405.06275). `dual` has, in each seed, that of STRENGTHS with
    which the text that scores read loses least; `dual_published` the first. added_to_a_text_by: on
    other rows. mean_added_by: of both texts. moved_by_the_published_strength: the share of what
    `taylor` removes which it keeps with the published strength. Over SEEDS.
    """
    tiny = Tiny({})
    reader = Reader(tiny.learner, ROWS)
    by_seed = [_added(tiny, reader, seed) for seed in range(SEEDS)]
    added = {name: np.array([one[name] for one, _ in by_seed]) for name in METHODS}
    found = {'moved_by_the_published_strength': over_seeds(moved for _, moved in by_seed)}
    for name, of_texts in added.items():
        found[f'mean_added_by_{name}'] = over_seeds(of_texts.mean(-1))
        for which, of_one in zip(('general', 'domain'), of_texts.T, strict=True):
            found[f'added_to_{which}_by_{name}'] = over_seeds(of_one)
    for name in METHODS:
        if name != 'dual':
            less = added['dual'].mean(-1) - added[name].mean(-1)
            found[f'mean_added_by_dual_less_{name}'] = over_seeds(less)
    return found


def _added(tiny: Tiny, reader: Reader, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Returns what each method adds to (general, domain), and moved_by_the_published_strength."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    state = tiny.trained(tiny.start(seed), chains, STAGES, rng, BOTH)
    read, held_out = Texts.draw(chains, rng), Texts.draw(chains, rng)

    def losses(params, texts):
        return np.array([tiny.loss(params, state, rows) for rows in (texts.general, texts.domain)])

    duals = [_left(reader, state, 'dual', read.domain, read, strength) for strength in STRENGTHS]
    left = {
        'magnitude': _left(reader, state, 'magnitude', read.domain),
        'wanda': _left(reader, state, 'wanda', read.domain),
        'obs': _left(reader, state, 'obs', read.general),
        'taylor': _left(reader, state, 'taylor', read.domain),
        'taylor_of_both': _left(reader, state, 'taylor', read.both),
        'dual': min(duals, key=lambda params: losses(params, read).mean()),
        'dual_published': _left(reader, state, 'dual_published', read.domain, read),
    }
    before = losses(params_of(state), held_out)
    added = {name: losses(params, held_out) - before for name, params in left.items()}
    return added, _moved(left['taylor'], duals[0])


def _left(
    reader: Reader,
    state: State,
    score: str,
    rows_BT: np.ndarray,
    read: Texts | None = None,
    strength: float = STRENGTH,
) -> Mapping[str, np.ndarray]:
    """Returns the parameters without SHARE of them. read: for a score that reads two texts."""
    asked = Asked('unimportant', SHARE, score, strength=strength)
    general_BT = read and read.general[:, :-1]
    scores = reader.scores(state.weights, asked, rows_BT[:, :-1], general_BT)
    rng = np.random.default_rng(asked.seed)
    return without(reader.specs, params_of(state), scores, asked, rng).params


def _moved(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Returns the share of what is removed of one that is not removed of the other."""
    removed = {path: x == 0 for path, x in one.items()}
    kept = sum(int(np.sum(mask & (other[path] != 0))) for path, mask in removed.items())
    return kept / sum(int(mask.sum()) for mask in removed.values())
