"""Equivalence: a model with a folded reparametrisation computes the same function, with any norm.

Contract: norms that cannot be folded stay, and some models are refused.
"""

import functools

import jax
import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert.fold import cast, fold_checkpoint
from eval.load import Checkpoint
from lm.config.fields import ReparamConfig
from lm.training.state import Weights
from modules.params import named_leaves
from modules.reparam import REPARAMS
from tests.eval.convert.test_commands import checkpoint

TIED = {'model.tie_embeddings': True}
SMALL = {'model.d_model': 8, 'model.d_ff': 16}
# A reparametrisation, and whatever else a model has that norms could not be folded of.
CASES = {
    'lora': {'model.mlp': 'moe', 'train.trainable': 'lora', 'reparam.rank': 2},
    'normalize_and_project': {'model.placement': 'peri'},
    'shared': {'model.norm': 'layernorm', 'model.placement': 'post'},
    'shared+sigma': {'model.norm': 'none', 'model.qk_norm': 'rmsnorm', 'model.bias': True},
    'sigma': {'model.mlp': 'moe', 'reparam.gamma_start': 'one'},
    'spectral_cap': {'reparam.spectral_bound': 0.5, 'model.activation': 'swiglu'},
    'spectral_norm': {'model.norm': 'powernorm', 'reparam.roles': 'hidden+readout'},
    'weight_compander': {'model.tie_embeddings': True, 'reparam.roles': 'embedding+hidden'},
    'weight_norm': {'model.norm': 'batchnorm', 'model.final_norm': 'rmsnorm'},
    # Its products carry keys.
    'weight_standardization': {'model.embedding_norm': 'rmsnorm', 'kernels.matmul': 'wta_crs'},
}


@functools.cache
def source(name):
    return checkpoint(SMALL | CASES[name] | {'model.reparam': name})


@functools.cache
def fold_case(name):
    return fold_checkpoint(source(name), 'none', untie=True)


def test_every_reparam_has_a_case():
    assert CASES.keys() >= REPARAMS.keys() - {'none'}


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_fold_preserves_logits(name):
    """Catches weights from another power iteration than in evaluation, and a reparametrisation that
    is left out.
    """
    folded = fold_case(name)
    assert folded.differences['float64'] < 1e-12
    assert folded.differences['float32'] < 4e-6  # by the order of sums: 1.1e-6 on some CPUs
    assert folded.weights.reparam == () and folded.recipe.model.reparam == 'none'
    assert folded.recipe.config.reparam == ReparamConfig()
    used = named_leaves(source(name).variables['params'])
    for path, weight in named_leaves(folded.weights.params).items():
        assert weight.dtype == np.float32
        if path in used:
            np.testing.assert_allclose(weight, used[path], rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_reparam_uses_float64():
    """The stored weights are the nearest float32. Catches a map in float32, which is off in the
    last digits.
    """
    weights = cast(source('sigma').weights, np.float64)
    with jax.enable_x64(True):
        exact = jax.device_get(source('sigma').learner.variables(weights))['params']
    for path, weight in named_leaves(fold_case('sigma').weights.params).items():
        np.testing.assert_allclose(weight, named_leaves(exact)[path], rtol=6.1e-8)


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_unfoldable_norms_stay(name):
    before, after = source(name).recipe.model, fold_case(name).recipe.model
    assert fold_case(name).norm_obstacle
    assert (before.norm, before.final_norm, before.placement) == (
        (after.norm, after.final_norm, after.placement)
    )
    assert jax.tree.structure(fold_case(name).weights.stats) == (
        jax.tree.structure(source(name).weights.stats)
    )
    assert not after.tie_embeddings


@pytest.mark.full
def test_foldable_norms_are_folded():
    folded = fold_checkpoint(
        checkpoint(SMALL | {'model.norm': 'unified', 'model.reparam': 'sigma'}), 'none'
    )
    assert (folded.recipe.model.norm, folded.recipe.model.reparam, folded.norm_obstacle) == (
        'none',
        'none',
        '',
    )
    assert folded.differences['float64'] < 1e-12


@pytest.mark.parametrize(
    ('changes', 'to', 'message'),
    [
        (
            {'model.placement': 'wide'},
            'none',
            'wide cannot be folded: this placement requires .*shared',
        ),
        ({'model.norm': 'dyt', 'model.reparam': 'sigma'}, 'rmsnorm', 'got dyt, which cannot'),
        ({'model.norm': 'none'}, 'none', 'got none, which cannot be folded'),
        (TIED | {'model.norm': 'batchnorm', 'model.reparam': 'sigma'}, 'none', 'Add --untie'),
    ],
)
def test_unfoldable_model_is_refused(changes, to, message):
    with pytest.raises(ValueError, match=message):
        fold_checkpoint(checkpoint(SMALL | changes, weights=Weights({}, (), {})), to)


@pytest.mark.full
def test_command_prints_norm_obstacle(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(convert, 'load', lambda path: source('weight_norm'))
    monkeypatch.setattr(convert, 'fold_checkpoint', lambda *_: fold_case('weight_norm'))
    monkeypatch.setattr(convert, 'write_workdir', lambda *_: None)
    assert isinstance(source('weight_norm'), Checkpoint)
    convert.run(['fold'], {'checkpoint': 'x', 'out': str(tmp_path), 'to': 'none', 'untie': False})
    printed = capsys.readouterr().out
    what = 'model.norm=batchnorm -> batchnorm\nmodel.reparam=weight_norm -> none\n'
    what += 'NOTE: the norms are not folded: '
    assert what in printed
