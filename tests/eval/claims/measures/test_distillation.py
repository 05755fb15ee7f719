"""Reference: losses of distilled students for a network with known logits."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from eval.claims.measures import distillation


def test_loss_parts_match_formulas():
    """Catches swapped heads: with zero inputs the logits are the biases of the heads."""
    start = distillation._init_params(jax.random.key(0), 4)
    logits, other_logits, teacher = np.random.default_rng(0).normal(size=(3, distillation.CLASSES))
    start |= {
        'head': (start['head'][0], jnp.float32(logits)),
        'other_head': (start['other_head'][0], jnp.float32(other_logits)),
    }
    x, labels = jnp.zeros((2, distillation.HARD.inputs)), jnp.int32([3, 3])
    parts = distillation._loss_parts(start, x, jnp.float32(np.stack([teacher, teacher])), labels)

    def log_cosh(s):
        difference = (s - s.mean()) - (teacher - teacher.mean())
        return 4 * np.sum(np.log(np.cosh(difference / 4)))

    q, p = (special.softmax(z / 4) for z in (logits, teacher))
    expected = (
        -special.log_softmax(logits)[3],
        log_cosh(logits),
        log_cosh(other_logits),
        special.rel_entr(p, q),
    )
    np.testing.assert_allclose(parts, [*expected[:3], 16 * expected[3].sum()], rtol=1e-4)
