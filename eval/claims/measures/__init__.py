"""Measures: what claims say that takes no sweep, computed in seconds to minutes on a CPU.

A measure is a function without arguments that returns {value: Estimate}; its docstring says what is
computed, and of whom.
"""

from collections.abc import Callable

from eval.claims.estimates import Estimate
from eval.claims.measures.activations import self_normalizing
from eval.claims.measures.products import sampled_products
from eval.claims.measures.starts import gradients_at_the_start, sizes_over_width

Values = dict[str, Estimate]
MEASURES: dict[str, Callable[[], Values]] = {
    'gradients_at_the_start': gradients_at_the_start,
    'sampled_products': sampled_products,
    'self_normalizing': self_normalizing,
    'sizes_over_width': sizes_over_width,
}
