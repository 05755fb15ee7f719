"""Contract: norm layers at placements.

A row trains two blocks for 50 steps on real text, in one program. Every fact of a layer meets every
fact of a placement, in few pairs chosen from the classes; `pytest -m product` tries every pair.
With each fact, runs mapped and scanned equal one that is alone, unrolled and cut over eight
devices.
"""

import argparse
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.training.state import State, build_learner, make_hyper
from modules.norms import NORMS
from modules.params import named_leaves, split_boxes
from modules.placements import PLACEMENTS
from modules.statistics import BACKWARD_STATS, STATS
from tests.helpers import (
    BOS,
    assert_trees_close,
    checked_config,
    stack,
    trained,
    trained_on_all_devices,
)

TEXT = np.frombuffer(inspect.getsource(argparse).encode('ascii'), np.uint8).astype(np.int32)
VOCAB, STEPS, COMPARED = 128, 50, 2
BASE = {
    'model.n_layers': 2,
    'model.qk_norm': 'rmsnorm',  # hybrid needs one
    'optim.lr': 0.01,
    'data.seq_len': 16,
}
# How far the loss falls in 50 steps at least, in nats, from 4.9 for bytes that are all as likely.
# No pair is known not to; the batch norms' trouble is in evaluation.
FALL = 0.5


def norm_facts(name: str) -> set[str]:
    """What sets a layer apart in a model: what it carries, what it leaves out, what it owns."""
    row = NORMS[name]
    found = jax.eval_shape(lambda: row().init(jax.random.key(0), jnp.zeros((2, 4, 16))))
    _, specs = split_boxes(found.get('params', {}))
    facts = {
        'carries': STATS in found,
        'carries backward': BACKWARD_STATS in found,
        'ordered': 'order' in row.__dataclass_fields__,
        'drops a coordinate': bool(row.dropped_coordinates),
        'has matrices': any(spec.role == 'hidden' for spec in named_leaves(specs).values()),
        'scales embeddings': row.scales_embedding,
    }
    return {fact for fact, holds in facts.items() if holds}


def placement_facts(name: str) -> set[str]:
    row = PLACEMENTS[name]
    facts = {
        'two streams': len(jax.tree.leaves(row.split(jnp.zeros(1)))) > 1,
        'two groups': len(row.blocks(4)) > 1,
        'no final norm': not row.final_norm,
        'a gain of its own': row.init_gain(4) != 1,
        **{f'needs {choice}': True for choice in row.needs},
    }
    return {fact for fact, holds in facts.items() if holds}


def cover(names, facts) -> list[str]:
    """Few of the names that have all facts there are: each time the one with most that are new."""
    left, chosen = set().union(*map(facts, names)), []
    while left:
        chosen.append(max(names, key=lambda name: len(facts(name) & left)))
        left -= facts(chosen[-1])
    return chosen


TRIED_NORMS, TRIED_PLACEMENTS = cover(NORMS, norm_facts), cover(PLACEMENTS, placement_facts)
PAIRS = [
    pytest.param(
        norm,
        placement,
        marks=() if norm in TRIED_NORMS and placement in TRIED_PLACEMENTS else pytest.mark.product,
    )
    for norm in NORMS
    for placement in PLACEMENTS
]


def batch(step: int) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(step).integers(0, len(TEXT) - 17, 8)
    tokens = np.stack([TEXT[i : i + 17] for i in starts])
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


def learner_of(norm: str, placement: str, scanned: bool = True):
    changes = {'model.norm': norm, 'model.placement': placement, 'model.scan_layers': scanned}
    if placement == 'mix':
        changes['model.mix_fraction'] = 0.5  # one block of each kind
    if norm.endswith('_removal'):
        changes['norm.removal_start'] = 10
    return build_learner(checked_config(BASE | changes), VOCAB, BOS, 'cpu')


def test_what_is_tried_is_not_plain():
    """Those without any fact are rows of test_choices.py, as every norm and placement is alone."""
    assert {'rmsnorm', 'layernorm'} & set(TRIED_NORMS) == set()
    assert 'pre' not in TRIED_PLACEMENTS
    assert len(TRIED_NORMS) >= 4 and len(TRIED_PLACEMENTS) >= 4


@pytest.mark.full
@pytest.mark.parametrize(('norm', 'placement'), PAIRS)
def test_norm_at_placement(norm, placement):
    learner = learner_of(norm, placement)
    batches = stack([batch(i) for i in range(STEPS)])
    losses, _ = trained(learner)(jax.random.key(0), make_hyper(learner.recipe), batches)
    fell = losses[0] - np.mean(losses[-5:])
    assert fell > FALL, fell


ALONE = [('rmsnorm', 'pre')]
ALONE += [(norm, 'pre') for norm in TRIED_NORMS]
ALONE += [('rmsnorm', placement) for placement in TRIED_PLACEMENTS]


@pytest.mark.full
@pytest.mark.parametrize(('norm', 'placement'), ALONE)
def test_mapped_and_scanned_is_alone_unrolled_and_cut_over_devices(norm, placement):
    learner = learner_of(norm, placement)
    hyper = make_hyper(learner.recipe)
    hypers = [hyper, hyper | {'optim.lr': hyper['optim.lr'] / 2}]
    keys = jnp.stack([jax.random.key(0)] * 2)
    many = stack([stack([batch(i)] * 2) for i in range(COMPARED)])
    _, states = trained(learner, runs=2)(keys, stack(hypers), many)
    second = jax.tree.map(lambda leaf: leaf[1], states)
    assert_trees_close(second, unrolled_and_cut(norm, placement, hypers[1]), 1e-3, 1e-4)


def unrolled_and_cut(norm: str, placement: str, hyper) -> State:
    """The state after the same steps, every block compiled, rows of the batch over the devices."""
    batches = stack([batch(i) for i in range(COMPARED)])
    return trained_on_all_devices(learner_of(norm, placement, scanned=False), batches, hyper)
