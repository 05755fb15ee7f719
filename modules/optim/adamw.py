"""AdamW's direction."""

from typing import Any

import optax


def adamw(hyper: Any) -> optax.GradientTransformation:
    """m_hat / (sqrt(v_hat) + eps), with weight decay left to the decay rule (arXiv:1711.05101).

    Reads hyper.b1, hyper.b2 and hyper.eps.
    """
    return optax.scale_by_adam(b1=hyper.b1, b2=hyper.b2, eps=hyper.eps)
