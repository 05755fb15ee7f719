"""Reference: losses of distilled students at a network whose logits are known. Contract: what the
measures compute is what their rows name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from eval.claims.measures import distillation
from eval.claims.measures.rows import MEASURES


def test_parts_of_a_students_loss():
    """Catches a head that takes the other's part: without inputs, logits are the heads' biases."""
    start = distillation._start(jax.random.key(0), 4)
    one, other, teacher = np.random.default_rng(0).normal(size=(3, distillation.CLASSES))
    start |= {
        'head': (start['head'][0], jnp.float32(one)),
        'other_head': (start['other_head'][0], jnp.float32(other)),
    }
    x, labels = jnp.zeros((2, distillation.INPUTS)), jnp.int32([3, 3])
    found = distillation._parts(start, x, jnp.float32(np.stack([teacher, teacher])), labels)

    def log_cosh(s):
        apart = (s - s.mean()) - (teacher - teacher.mean())
        return 4 * np.sum(np.log(np.cosh(apart / 4)))

    q, p = (special.softmax(z / 4) for z in (one, teacher))
    wanted = -special.log_softmax(one)[3], log_cosh(one), log_cosh(other), special.rel_entr(p, q)
    np.testing.assert_allclose(found, [*wanted[:3], 16 * wanted[3].sum()], rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('name', ['balance_of_teachers', 'heads_of_students'])
def test_a_measure_has_the_values_of_its_row(name, monkeypatch):
    for size, value in {'STEPS': 4, 'LOOKS': 2, 'SEEDS': 2, 'TEACHER': 8, 'STUDENT': 4}.items():
        monkeypatch.setattr(distillation, size, value)
    found = MEASURES[name].compute()
    assert found.keys() == set(MEASURES[name].values)
    assert all(np.isfinite(one.value) and one.n == 2 for one in found.values())
