"""Equivalence: a model trained with kernels over rows, a TPU's interpreted, and without. Contract:
what such kernels do not serve is refused.
"""

import functools

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

from lm.check import check
from lm.record.load import with_kernels_of
from lm.state import build_learner, hyper_from
from lm.updates import refuse_unserved
from tests.helpers import BOS, VOCAB, checked_config, packed_batch, stack, tiny_config, trained

STEPS = 50


def test_losses_of_fifty_steps_are_those_of_the_reference(monkeypatch):
    """Norms of the stream, of its end, of queries and keys; documents are packed."""
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
    batches = stack([packed_batch(seed) for seed in range(STEPS)])
    losses = {}
    for name in ('reference', 'pallas'):
        changes = {'model.norm': 'gated_rmsnorm', 'model.qk_norm': 'rmsnorm', 'optim.lr': 0.02}
        config = checked_config(changes | {'kernels.rms_norm': name})
        learner = build_learner(config, VOCAB, BOS, 'tpu')
        losses[name] = trained(learner)(jax.random.key(0), hyper_from(config), batches)[0]
    assert losses['reference'][-1] < losses['reference'][0] - 0.05
    np.testing.assert_allclose(losses['pallas'], losses['reference'], rtol=1e-5)


def test_a_kernel_that_no_norm_reads_is_refused():
    changes = {'model.norm': 'layernorm', 'model.final_norm': 'layernorm'}
    config = tiny_config(changes | {'kernels.rms_norm': 'pallas'})
    message = (
        r'kernels.rms_norm=pallas would change nothing: .* that do are .*, rmsnorm, .* Leave it'
    )
    with pytest.raises(ValueError, match=message):
        check(config)


def test_a_kernel_without_a_derivative_in_forward_mode_is_refused():
    asked = {'optim.ghost_radius': 1.0, 'kernels.attention': 'reference'}
    config = tiny_config(asked | {'kernels.rms_norm': 'pallas'})
    with pytest.raises(ValueError, match=r'ghost_radius .* choose kernels.rms_norm=reference'):
        refuse_unserved(build_learner(config, VOCAB, BOS, 'tpu'))


def test_a_checkpoint_of_a_tpu_is_read_elsewhere():
    said, config = [], tiny_config({'kernels.rms_norm': 'pallas'})
    assert with_kernels_of('cpu', config, said.append).kernels.rms_norm == 'auto'
    assert len(said) == 1 and 'kernels.rms_norm=pallas runs on tpu alone' in said[0]
    assert with_kernels_of('tpu', config, said.append) is config
