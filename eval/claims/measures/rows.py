"""The table of measures.

A measure is a function without arguments that returns {value: Estimate}; its docstring says what is
computed, and of whom. `values` are the names that conditions of claims may ask for.
"""

import dataclasses
from collections.abc import Callable

from eval.claims.estimates import Estimate
from eval.claims.measures.activations import self_normalizing
from eval.claims.measures.calibrators import blind_correctness, overconfident_logits
from eval.claims.measures.lipschitz import lipschitz_attention, local_lipschitz
from eval.claims.measures.products import sampled_products
from eval.claims.measures.row_sampling import sampled_rows
from eval.claims.measures.starts import gradients_at_the_start, sizes_over_width
from eval.claims.measures.weights import merged_models, merged_starts, pruned_by_text


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of MEASURES: what computes it, and the names of its values."""

    compute: Callable[[], dict[str, Estimate]]
    values: tuple[str, ...]


MEASURES = {
    'blind_correctness': Row(
        blind_correctness,
        ('confidence_less_accuracy_even', 'confidence_less_accuracy_balanced'),
    ),
    'gradients_at_the_start': Row(
        gradients_at_the_start, ('slope_of_pre_norm', 'slope_of_post_norm')
    ),
    'lipschitz_attention': Row(
        lipschitz_attention,
        ('slope_of_products', 'slope_of_tied_distances', 'slope_of_own_distances'),
    ),
    'local_lipschitz': Row(
        local_lipschitz,
        (
            *(
                f'{what}_of_{name}'
                for what in ('share_at_points', 'share_in_boxes', 'product_over_exact')
                for name in ('one_block', 'two_blocks')
            ),
            'largest_share',
        ),
    ),
    'merged_models': Row(
        merged_models,
        (
            *(f'error_of_{which}_differences' for which in ('unrelated', 'shared')),
            'cost_over_that_of_the_mean',
        ),
    ),
    'merged_starts': Row(
        merged_starts,
        (
            *('variance_of_the_mean', 'variance_of_the_mean_rescaled'),
            *(f'steps_saved_from_{starts}' for starts in ('different_starts', 'one_start')),
        ),
    ),
    'overconfident_logits': Row(
        overconfident_logits,
        tuple(
            of.format(link)
            for link in ('scaled', 'squared', 'unevenly_scaled')
            for of in (
                'ece_of_h_less_temperature_{}',
                *(f'ece_{{}}_{kind}' for kind in ('before', 'temperature', 'h')),
            )
        ),
    ),
    'pruned_by_text': Row(
        pruned_by_text,
        (
            *(f'loss_added_to_{which}_text' for which in ('wanted', 'unwanted')),
            'loss_added_to_wanted_text_above_random',
        ),
    ),
    'sampled_products': Row(
        sampled_products,
        tuple(
            f'{what}_of_rows_{rows}'
            for what in ('error_over_plain_sampling', 'bias')
            for rows in ('alike', 'different')
        ),
    ),
    'sampled_rows': Row(
        sampled_rows,
        tuple(
            f'variance_by_{name}_after_{steps}'
            for name in ('norm', 'el2n', 'loss')
            for steps in (50, 100, 200)
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
}
