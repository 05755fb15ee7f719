"""The table of measures.

A measure is a function without arguments that returns {value: Estimate}; its docstring says what is
computed, and of whom. `values` are the names that conditions of claims may ask for.
"""

import dataclasses
from collections.abc import Callable

from eval.claims.estimates import Estimate
from eval.claims.measures.activations import self_normalizing
from eval.claims.measures.ghosts import steps_around_the_radius
from eval.claims.measures.perceptron import steps_to_separate
from eval.claims.measures.products import sampled_products
from eval.claims.measures.starts import gradients_at_the_start, sizes_over_width


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of MEASURES: what computes it, and the names of its values."""

    compute: Callable[[], dict[str, Estimate]]
    values: tuple[str, ...]


MEASURES = {
    'gradients_at_the_start': Row(
        gradients_at_the_start, ('slope_of_pre_norm', 'slope_of_post_norm')
    ),
    'sampled_products': Row(
        sampled_products,
        tuple(
            f'{what}_of_rows_{rows}'
            for what in ('error_over_plain_sampling', 'bias')
            for rows in ('alike', 'different')
        ),
    ),
    'self_normalizing': Row(
        self_normalizing,
        (
            *('mean', 'variance', 'slope'),
            *(f'variance_behind_32_layers_of_{name}' for name in ('selu', 'gelu')),
        ),
    ),
    'sizes_over_width': Row(
        sizes_over_width, ('largest_slope_of_standard', 'largest_slope_of_mup')
    ),
    'steps_around_the_radius': Row(
        steps_around_the_radius,
        (
            'largest_share_of_accuracy_lost_below_1',
            'median_r_at_which_accuracy_falls',
            'deviation_of_log_r_over_that_of_log_length',
            *(
                f'accuracy_kept_over_a_spike_with_{limit}'
                for limit in ('clipping', 'the_controller')
            ),
        ),
    ),
    'steps_to_separate': Row(
        steps_to_separate,
        (
            *(f'slope_of_{descent}_steps_over_points' for descent in ('plain', 'normalized')),
            *(f'{descent}_steps_where_one_disagrees' for descent in ('plain', 'normalized')),
            'plain_steps_at_large_over_small_rate',
            *(f'largest_loss_over_first_at_{rate}_rate' for rate in ('small', 'large')),
            *(
                f'normalized_over_plain_steps_of_{kind}_points'
                for kind in ('balanced', 'imbalanced')
            ),
        ),
    ),
}
