"""The table of measures.

A measure is a function without arguments that returns {value: Estimate}; its docstring says what is
computed, and of whom. `values` are the names that conditions of claims may ask for.
"""

import dataclasses
from collections.abc import Callable

from eval.claims.estimates import Estimate
from eval.claims.measures.activations import self_normalizing
from eval.claims.measures.collapse import imbalanced_collapse
from eval.claims.measures.frozen import equiangular_rows, random_features
from eval.claims.measures.products import sampled_products
from eval.claims.measures.starts import gradients_at_the_start, sizes_over_width
from eval.claims.measures.weights import merged_models, merged_starts, pruned_by_text


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of MEASURES: what computes it, and the names of its values."""

    compute: Callable[[], dict[str, Estimate]]
    values: tuple[str, ...]


MEASURES = {
    'equiangular_rows': Row(
        equiangular_rows,
        tuple(
            f'over_{what}_of_{rows}_rows' for rows in (512, 2048) for what in ('welch', 'random')
        ),
    ),
    'gradients_at_the_start': Row(
        gradients_at_the_start, ('slope_of_pre_norm', 'slope_of_post_norm')
    ),
    'imbalanced_collapse': Row(
        imbalanced_collapse,
        (
            *('error_of_squared_lengths', 'cosine_of_rows', 'vanishing_length'),
            'spread_within_classes',
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
    'pruned_by_text': Row(
        pruned_by_text,
        (
            *(f'loss_added_to_{which}_text' for which in ('wanted', 'unwanted')),
            'loss_added_to_wanted_text_above_random',
        ),
    ),
    'random_features': Row(
        random_features,
        ('slope_of_gaussian', 'slope_of_orthogonal', 'orthogonal_over_gaussian'),
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
}
