"""Equivalence: training with Pallas kernels over rows, interpreted, and without. Contract:
refusals.
"""

import functools

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

from lm.inference.load import replace_kernels
from lm.model.check import check
from lm.training.state import build_learner, check_learner, make_hyper
from modules.kernels.cross_entropy import tpu
from tests.helpers import (
    BOS,
    VOCAB,
    checked_config,
    make_training,
    packed_batch,
    stack,
    tiny_config,
)

STEPS = 50
KERNELS = ('kernels.rms_norm', 'kernels.softmax', 'kernels.cross_entropy')
CHANGES = {
    'model.norm': 'gated_rmsnorm',
    'model.qk_norm': 'rmsnorm',
    'model.mlp': 'moe',
    'kernels.attention': 'reference',
    'attention.softcap': 5.0,
    'attention.sinks': 'learned',
    'attention.window': 5,
    'attention.full_every': 2,
    'data.mask_documents': True,
    'loss.label_smoothing': 0.1,
    'loss.chunk': 32,
    'optim.lr': 0.02,
}


@pytest.mark.full
def test_pallas_losses_equal_reference(monkeypatch):
    """Fifty steps: norms of the stream, of queries and keys, attention, routers, and the loss in
    chunks.
    """
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(tpu, 'ALIASES', {})  # the interpreter cannot alias blocks that are cut
    batches = stack([packed_batch(seed) for seed in range(STEPS)])
    losses = {}
    for name in ('reference', 'pallas'):
        config = checked_config(CHANGES | dict.fromkeys(KERNELS, name))
        learner = build_learner(config, VOCAB, BOS, 'tpu')
        losses[name] = make_training(learner)(jax.random.key(0), make_hyper(config), batches)[0]
    assert losses['reference'][-1] < losses['reference'][0] - 0.05
    np.testing.assert_allclose(losses['pallas'], losses['reference'], rtol=1e-5)


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {
                'model.norm': 'layernorm',
                'model.final_norm': 'layernorm',
                'kernels.rms_norm': 'pallas',
            },
            r'kernels.rms_norm=pallas would have no effect: .* do: .*, rmsnorm, .* Leave it',
        ),
        (
            {'loss.name': 'focal', 'kernels.cross_entropy': 'pallas'},
            r'kernels.cross_entropy=pallas would have no effect: loss.name=focal does not use it',
        ),
        (
            {'kernels.softmax': 'pallas'},
            r'kernels.softmax=pallas would have no effect: ',
        ),
    ],
    ids=str,
)
def test_unused_kernel_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_config(changes))


@pytest.mark.parametrize('operation', ['rms_norm', 'softmax', 'cross_entropy'])
def test_kernel_without_forward_mode_is_refused(operation):
    changes = {'optim.ghost_radius': 1.0, 'kernels.attention': 'reference'}
    config = tiny_config(changes | {f'kernels.{operation}': 'pallas'})
    with pytest.raises(ValueError, match=f'ghost_radius .* Choose kernels.{operation}=reference'):
        check_learner(build_learner(config, VOCAB, BOS, 'tpu'))


def test_tpu_checkpoint_loads_elsewhere():
    messages, config = [], tiny_config({'kernels.rms_norm': 'pallas'})
    assert replace_kernels('cpu', config, messages.append).kernels == {}
    assert len(messages) == 1 and 'kernels.rms_norm=pallas runs only on tpu, gpu' in messages[0]
    assert replace_kernels('tpu', config, messages.append) is config
