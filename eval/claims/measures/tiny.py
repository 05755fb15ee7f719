"""A random language and a tiny model of it, for measures of weights that train in seconds."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.claims import lab
from lm.inference.probes import input_squares
from lm.training.state import State, init_state
from lm.training.step import make_eval_step
from modules.params import named_leaves

BOS, MODES, SYMBOLS = 0, 4, 24  # numbers of tokens, whose ids are in this order
VOCAB, LENGTH, ROWS, STAGE = 1 + MODES + SYMBOLS, 16, 8, 50
TINY = {
    'model.d_model': 32,
    'model.n_layers': 2,
    'model.d_ff': 128,
    'model.scan_layers': True,
    'data.seq_len': LENGTH,
    'data.batch_size': ROWS,
    'optim.schedule': 'constant',
}


class TinyModel:
    """A model of two blocks of width 32, and the programs that train and evaluate it.

    changes: changes of its config, by path.
    """

    def __init__(self, changes: dict):
        learner, hyper = lab.build_small_learner(TINY | changes, VOCAB, BOS)
        evaluate = make_eval_step(learner)

        def stage(state, tokens_SBT):
            return lab.train_model(learner, hyper, state, _build_batch(tokens_SBT))

        self.learner = learner
        self.specs = named_leaves(learner.description.specs)
        self.init = jax.jit(lambda seed: init_state(learner, hyper, jax.random.key(seed)))
        self._stage = jax.jit(stage)
        self._evaluate = jax.jit(
            lambda weights, tokens: evaluate(weights, _build_batch(tokens), hyper)
        )
        self._squares = jax.jit(functools.partial(input_squares, learner))

    def train(
        self,
        state: State,
        chains: np.ndarray,
        stages: int,
        rng: np.random.Generator,
        shares: tuple[float, ...] = (),
    ) -> State:
        """Returns the state after some stages of STAGE steps each.

        Args:
          state: initial state.
          chains: transition probabilities, as in `draw_chains`.
          stages: number of stages.
          rng: generator of the text.
          shares: shares of the modes, as in `draw_text`.
        """
        for _ in range(stages):
            tokens = draw_text(chains, STAGE * ROWS, rng, shares)
            state = self._stage(state, tokens.reshape(STAGE, ROWS, LENGTH + 1))
        return state

    def compute_loss(
        self, params: Mapping[str, np.ndarray], state: State, tokens_BT: np.ndarray
    ) -> float:
        """Returns the loss of rows, in nats per token.

        Args:
          params: parameters by path.
          state: state with all other weights.
          tokens_BT: rows.
        """
        weights = replace_params(state, params).weights
        sums = self._evaluate(weights, tokens_BT)
        return float(sums['ce'] / sums['tokens'])

    def compute_input_squares(self, state: State, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the `input_squares` of rows."""
        return jax.device_get(self._squares(state.weights, tokens_BT[:, :-1]))


def _build_batch(tokens_BT):
    return {'tokens': tokens_BT, 'segments': tokens_BT * 0 + 1}


def named_params(state: State) -> dict[str, np.ndarray]:
    """Returns the parameters by path."""
    return named_leaves(jax.device_get(state.params))


def replace_params(state: State, params: Mapping[str, np.ndarray]) -> State:
    """Returns the state with these parameters, given by path; moments are unchanged."""
    return state.replace(params=unflatten_dict(params, sep='/'))


def draw_chains(rng: np.random.Generator) -> np.ndarray:
    """Draws P[mode, i, j] = p(symbol j after i), rows from a peaked Dirichlet distribution."""
    return rng.dirichlet(np.full(SYMBOLS, 0.1), (MODES, SYMBOLS))


def draw_text(
    chains: np.ndarray, n_rows: int, rng: np.random.Generator, shares: tuple[float, ...] = ()
) -> np.ndarray:
    """Draws rows: the token of a mode, then symbols from its chain.

    Args:
      chains: transition probabilities of the modes.
      n_rows: number of rows.
      rng: generator.
      shares: shares of the modes; equal if empty.

    Returns:
      Tokens [n_rows, LENGTH + 1], int32.
    """
    modes = rng.choice(MODES, n_rows, p=shares or None)
    symbols, columns, ends = rng.integers(SYMBOLS, size=n_rows), [1 + modes], chains.cumsum(-1)
    for _ in range(LENGTH):
        columns.append(1 + MODES + symbols)
        n_passed = np.sum(rng.random((n_rows, 1)) > ends[modes, symbols], -1)
        symbols = np.minimum(n_passed, SYMBOLS - 1)  # a sum may round to just under 1
    return np.stack(columns, 1).astype(np.int32)
