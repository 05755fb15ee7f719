"""Contract: the interface of every loss, on the same array of activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.matmul import direct
from modules.losses import LOSSES
from modules.options import declared_options
from modules.products import Readout
from tests.helpers import another

BATCH, LENGTH, WIDTH, VOCAB = 2, 5, 4, 11
RNG = np.random.default_rng(0)
X_BTD = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
WEIGHT_DV = RNG.normal(size=(WIDTH, VOCAB)).astype(np.float32)
LABELS_BT = RNG.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
WEIGHTS_BT = np.float32([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]])


def readout(weight_DV, dtype=jnp.float32):
    return Readout(weight_DV, None, softcap=0.0, matmul=direct, dtype=dtype)


def numbers(name):
    """Returns the published values of a loss's traced options."""
    declared = declared_options(LOSSES[name])
    return {n: jnp.float32(d.default) for n, d in declared.items() if d.option.traced}


@functools.partial(jax.jit, static_argnums=0)
def sums(name, options, x=X_BTD, labels=LABELS_BT, weights=WEIGHTS_BT):
    terms = LOSSES[name](x, readout(jnp.asarray(WEIGHT_DV)), labels, weights, **options)
    assert {'objective', 'ce'} <= set(terms)
    return terms


@pytest.mark.parametrize('name', LOSSES)
class TestEveryLoss:
    def test_ce_is_weighted_log_loss(self, name):
        logits = X_BTD.astype(np.float64) @ WEIGHT_DV
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -(np.take_along_axis(log_p, LABELS_BT[..., None], -1)[..., 0] * WEIGHTS_BT).sum()
        np.testing.assert_allclose(sums(name, numbers(name))['ce'], expected, rtol=1e-5)

    def test_tokens_without_weight_do_not_count(self, name):
        other_labels = np.where(WEIGHTS_BT > 0, LABELS_BT, (LABELS_BT + 1) % VOCAB)
        changed = X_BTD + (WEIGHTS_BT == 0)[..., None]
        actual, expected = (
            sums(name, numbers(name), *arrays)
            for arrays in ((changed, other_labels), (X_BTD, LABELS_BT))
        )
        for term in expected:
            np.testing.assert_allclose(actual[term], expected[term], rtol=1e-6)

    def test_mapped_losses_equal_single_and_numbers_matter(self, name):
        plain = numbers(name)
        declared = declared_options(LOSSES[name])
        other_values = {n: another(declared[n].option, declared[n].default) for n in plain}
        settings = [plain, *(plain | {n: jnp.float32(other_values[n])} for n in plain)]
        single = [sums(name, options)['objective'] for options in settings]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *settings)
        indices = jnp.arange(len(settings))  # gives vmap an axis for a loss without numbers
        mapped = jax.jit(jax.vmap(lambda _, options: sums(name, options)['objective']))(
            indices, stacked
        )
        np.testing.assert_allclose(mapped, single, rtol=1e-6)
        assert len({float(value) for value in single}) == len(settings)

    def test_bfloat16_gradients_are_finite(self, name):
        def objective(x, weight_DV):
            terms = LOSSES[name](
                x, readout(weight_DV, jnp.bfloat16), LABELS_BT, WEIGHTS_BT, **numbers(name)
            )
            assert all(total.dtype == jnp.float32 for total in terms.values())
            return terms['objective']

        x = X_BTD.astype(jnp.bfloat16)
        grads = jax.jit(jax.grad(objective, argnums=(0, 1)))(x, WEIGHT_DV)
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)
        assert grads[0].dtype == jnp.bfloat16 and grads[1].dtype == jnp.float32
