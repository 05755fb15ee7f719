"""AdamW's direction."""

import sys
from typing import Annotated, Any

import optax

from modules.optim.base import of_family
from modules.options import Option

# Bounds are included, so these stand in for 0 and 1 that are not; float32 tells them apart.
ABOVE_0, BELOW_1 = 1e-37, 1 - 1e-7

B1 = Annotated[float, Option('share of the first moment that is kept', 0, BELOW_1, traced=True)]
B2 = Annotated[float, Option('share of the second moment that is kept', 0, BELOW_1, traced=True)]
Eps = Annotated[float, Option('added to the denominator', ABOVE_0, sys.float_info.max, traced=True)]


@of_family('adam')
def adamw(
    specs: Any, *, b1: B1 = 0.9, b2: B2 = 0.95, eps: Eps = 1e-8
) -> optax.GradientTransformation:
    """m_hat / (sqrt(v_hat) + eps), with weight decay left to the decay rule (arXiv:1711.05101).

    b2 is that of language models (arXiv:2005.14165, appendix B).
    """
    del specs
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
