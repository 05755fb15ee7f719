"""Every pair of choices at the published start: are all numbers of one step finite?

    python -m tests.starts [--seconds=600] [--seed=0]

Draws configs with many untested pairs of rows of two tables, and trains each for two steps at a
constant rate. If a config gives a number that is not finite, the pairs of its rows are tried alone.
Prints how many pairs were tried, how many are refused, and with which words, and which were not
finite.
"""

import collections
import itertools
import random
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from lm.config.fields import CHOICES
from lm.training.state import init_state, make_hyper
from lm.training.step import make_train_step
from tests.helpers import checked_config, tiny_batch, tiny_learner

PATHS = (
    'model.norm',
    'model.placement',
    'model.attention',
    'model.qk_norm',
    'model.activation',
    'model.position',
    'model.reparam',
    'model.embedding_norm',
    'model.final_norm',
    'model.mlp',
    'model.readout',
    'loss.name',
    'optim.name',
    'optim.others',
    'optim.decay_rule',
    'optim.average',
    'scaling.name',
    'scaling.init',
)
MORE = {  # choices that are no rows of a table
    'scaling.zero_init': ('query', 'readout', 'query+readout'),
    'model.tie_embeddings': (True,),
    'model.bias': (True,),
    'optim.b1': (0.0,),
    'optim.b2': (0.0,),
    'optim.eps': (1e-30,),
    'optim.weight_decay': (0.1,),
    'loss.z_loss': (1e-4,),
}
BASE = {
    'model.d_model': 8,
    'model.n_layers': 2,
    'model.d_ff': 16,
    'kernels.implementation': 'reference',
    'optim.lr': 0.01,
    'optim.schedule': 'constant',
    'train.steps': 4,
}
Choice = tuple[str, object]  # (field, value)


def choices() -> list[Choice]:
    """Returns all rows, and pairs of reparametrisations."""
    rows = [(path, name) for path in PATHS for name in CHOICES[path].table]
    pairs = itertools.permutations([n for n in CHOICES['model.reparam'].table if n != 'none'], 2)
    chains = ({'model.reparam': '+'.join(names)} for names in pairs)
    rows += [('model.reparam', chain['model.reparam']) for chain in chains if builds(chain)]
    return rows + [(path, value) for path, values in MORE.items() for value in values]


def fits(config: dict) -> bool:
    try:
        checked_config(BASE | config)
    except ValueError:
        return False
    return True


def builds(config: dict) -> bool:
    """Returns whether its parameters can be described, which `fits` does not check."""
    try:
        tiny_learner(checked_config(BASE | config))
    except ValueError:
        return False
    return True


def not_finite(config: dict, steps: int = 2) -> str:
    """Returns the paths of the first metric and leaf that are not finite; '' for none."""
    recipe = checked_config(BASE | config)
    learner = tiny_learner(recipe)
    step, hyper = jax.jit(make_train_step(learner)), make_hyper(recipe)
    state, batch = jax.jit(lambda key: init_state(learner, hyper, key))(jax.random.key(0)), {}
    for i in range(steps):
        batch = tiny_batch(i)
        state, metrics = step(state, batch, hyper)
        trees = {'metrics': metrics, 'params': state.params, 'optimizer': state.opt_state}
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(trees)):
            is_number = jnp.issubdtype(np.asarray(leaf).dtype, jnp.floating)
            if is_number and not np.isfinite(np.asarray(leaf, np.float64)).all():
                return f'step {i + 1}: {jax.tree_util.keystr(path)}'
    return ''


class Search:
    """Pairs of choices: tried, refused (with which words) and not finite (where)."""

    def __init__(self, seed: int):
        self.rng, self.all = random.Random(seed), choices()
        pairs = itertools.combinations(range(len(self.all)), 2)
        self.left = {pair for pair in pairs if self._paths(pair)}
        self.count, self.tried = len(self.left), set()
        self.refused: dict[str, int] = collections.Counter()
        self.wrong: dict[tuple[int, ...], str] = {}
        self.programs = 0

    def _paths(self, pair: tuple[int, int]) -> bool:
        return self.all[pair[0]][0] != self.all[pair[1]][0]

    def next(self) -> dict[str, object] | None:
        """Returns a config of remaining pairs, and removes refused pairs."""
        order = self.rng.sample(sorted(self.left), min(len(self.left), 50))
        for pair in order:
            config = dict(self.all[i] for i in pair)
            if not self._is_accepted(config, pair):
                continue
            chosen = set(pair)
            for i in self.rng.sample(range(len(self.all)), len(self.all)):
                path, value = self.all[i]
                news = sum(tuple(sorted((i, j))) in self.left for j in chosen)
                if path not in config and news and fits(config | {path: value}):
                    config[path] = value
                    chosen.add(i)
            return config
        return None

    def _is_accepted(self, config: dict, pair: tuple[int, int]) -> bool:
        try:
            checked_config(BASE | config)
            return True
        except ValueError as error:
            self.left.discard(pair)
            self.refused[str(error).partition(':')[0][:60]] += 1
            return False

    def run(self, config: dict) -> None:
        self.programs += 1
        config = self._built(config)
        pairs = set(itertools.combinations(self._numbers(config), 2))
        if not not_finite(config):
            self.tried |= pairs & self.left
            self.left -= pairs
            return None
        self._alone(pairs)
        if not any(pair in pairs for pair in self.wrong):
            print(f'NOT FINITE, and no pair of it alone: {config}', flush=True)

    def _numbers(self, config: dict) -> list[int]:
        numbers = {choice: i for i, choice in enumerate(self.all)}
        return sorted(numbers[choice] for choice in config.items())

    def _built(self, config: dict) -> dict:
        """Returns `config` without the fields that prevent building it; a pair that does so alone
        is refused.
        """
        while not builds(config):
            fewest = config
            for path in config:
                less = {field: value for field, value in fewest.items() if field != path}
                if fits(less) and not builds(less):
                    fewest = less
            refused = {pair for pair in self.left if {*self._numbers(fewest)} <= {*pair}}
            self.left -= refused
            self.refused['when it is built'] += len(refused)
            config = {path: value for path, value in config.items() if path != [*fewest][-1]}
        return config

    def _alone(self, pairs: set[tuple[int, int]]) -> None:
        for pair in sorted(pairs & self.left):
            changes = dict(self.all[i] for i in pair)
            if not self._is_accepted(changes, pair):
                continue
            self.left.discard(pair)
            if not builds(changes):
                self.refused['when it is built'] += 1
                continue
            self.tried.add(pair)
            self.programs += 1
            if paths := not_finite(changes):
                self.wrong[pair] = paths
                print(f'NOT FINITE {changes}: {paths}', flush=True)

    def report(self) -> str:
        refused = sum(self.refused.values())
        return (
            f'{self.count:,} pairs: {len(self.tried):,} tried in {self.programs:,} programs, '
            f'{refused:,} refused, {len(self.left):,} left; not finite: {len(self.wrong)}'
        )


def main(_) -> None:
    search, end = Search(flags.FLAGS.seed), time.monotonic() + flags.FLAGS.seconds
    while time.monotonic() < end and (search.left and (config := search.next())):
        search.run(config)
        jax.clear_caches()
        if search.programs % 20 == 0:
            print(search.report(), flush=True)
    print(search.report())
    for words, count in search.refused.most_common():
        print(f'{count:6,}  {words}')
    sys.exit(bool(search.wrong))


if __name__ == '__main__':
    flags.DEFINE_float('seconds', 600.0, 'How long to search.')
    flags.DEFINE_integer('seed', 0, 'Of the order.')
    app.run(main)
