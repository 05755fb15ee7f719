"""Reference: losses of distilled students at a network whose logits are known."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from eval.claims.measures import distillation


def test_parts_of_a_students_loss():
    """Catches a head that takes the other's part: without inputs, logits are the heads' biases."""
    start = distillation._init_params(jax.random.key(0), 4)
    one, other, teacher = np.random.default_rng(0).normal(size=(3, distillation.CLASSES))
    start |= {
        'head': (start['head'][0], jnp.float32(one)),
        'other_head': (start['other_head'][0], jnp.float32(other)),
    }
    x, labels = jnp.zeros((2, distillation.HARD.inputs)), jnp.int32([3, 3])
    found = distillation._loss_parts(start, x, jnp.float32(np.stack([teacher, teacher])), labels)

    def log_cosh(s):
        apart = (s - s.mean()) - (teacher - teacher.mean())
        return 4 * np.sum(np.log(np.cosh(apart / 4)))

    q, p = (special.softmax(z / 4) for z in (one, teacher))
    wanted = -special.log_softmax(one)[3], log_cosh(one), log_cosh(other), special.rel_entr(p, q)
    np.testing.assert_allclose(found, [*wanted[:3], 16 * wanted[3].sum()], rtol=1e-4)
