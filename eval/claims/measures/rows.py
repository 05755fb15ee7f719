"""The table of measures.

A measure is a function without arguments that returns {value: Estimate}; its docstring says what is
computed, and of whom. `values` are the names that conditions of claims may ask for.
"""

import dataclasses
from collections.abc import Callable, Iterable

from eval.claims.estimates import Estimate
from eval.claims.measures.activations import self_normalizing
from eval.claims.measures.calibrators import blind_correctness, overconfident_logits
from eval.claims.measures.classifiers import (
    FOR_A_RARE_CLASS,
    FOR_RANKS,
    FOR_WRONG_LABELS,
    SHARES_WRONG,
    TOP,
    TRIES,
    ranks,
    rare_class,
    tries,
    wrong_labels,
)
from eval.claims.measures.collapse import imbalanced_collapse
from eval.claims.measures.datamodels import METHODS as FORGETTING
from eval.claims.measures.datamodels import POINTS, RATIOS, SETS, unlearned_points
from eval.claims.measures.depths import stream_over_depth
from eval.claims.measures.distillation import METHODS as STUDENTS
from eval.claims.measures.distillation import balance_of_teachers, heads_of_students
from eval.claims.measures.effective_rates import relative_changes_over_training
from eval.claims.measures.entropy import attention_entropy
from eval.claims.measures.frozen import equiangular_rows, random_features
from eval.claims.measures.ghosts import steps_around_the_radius
from eval.claims.measures.in_context import one_step
from eval.claims.measures.invariances import CHANGES, NAMES, invariances
from eval.claims.measures.large_batches import REGIMES, large_batches
from eval.claims.measures.lipschitz import lipschitz_attention, local_lipschitz
from eval.claims.measures.marginals import COUNTS as PARTS_OF_ROWS
from eval.claims.measures.marginals import any_order_marginals
from eval.claims.measures.memory import memory_of_optimizers
from eval.claims.measures.norms_alone import PARTS as TRAINED_PARTS
from eval.claims.measures.norms_alone import norms_alone
from eval.claims.measures.perceptron import steps_to_separate
from eval.claims.measures.products import sampled_products
from eval.claims.measures.pruning import METHODS as PRUNING
from eval.claims.measures.pruning import pruned_for_a_domain
from eval.claims.measures.random_slopes import METHODS as SLOPES
from eval.claims.measures.random_slopes import binary_accuracy
from eval.claims.measures.rescaling import METHODS as WEIGHTS
from eval.claims.measures.rescaling import rescaled_rows
from eval.claims.measures.row_sampling import sampled_rows
from eval.claims.measures.spectra import decayed_norms, reparametrised_norms
from eval.claims.measures.starts import gradients_at_the_start, sizes_over_width
from eval.claims.measures.unlearning import METHODS as UNLEARNING
from eval.claims.measures.unlearning import forgetting
from eval.claims.measures.unnormalised import METHODS as NORMALISERS
from eval.claims.measures.unnormalised import bigrams
from eval.claims.measures.updates import singular_values_of_updates
from eval.claims.measures.weights import merged_models, merged_starts, pruned_by_text


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of MEASURES: what computes it, the names of its values, and whether it fits weights;
    others are closed forms, and numbers of drawn matrices or of models at their start.
    """

    compute: Callable[[], dict[str, Estimate]]
    values: tuple[str, ...]
    trains: bool = True


def _with_gains(what: str, losses: Iterable[str]) -> tuple[str, ...]:
    """The names of a value by each loss, and of what others gain over cross-entropy."""
    others = (name for name in losses if name != 'cross_entropy')
    return (
        *(f'{what}_by_{name}' for name in losses),
        *(f'{what}_gain_of_{name}' for name in others),
    )


MEASURES = {
    'any_order_marginals': Row(
        any_order_marginals,
        tuple(
            f'{what}_of_{part}'
            for part in PARTS_OF_ROWS
            for what in (
                *(f'rank_correlation_of_f_with_{other}' for other in ('conditionals', 'exact')),
                'rank_correlation_of_conditionals_with_exact',
                'rank_correlation_of_one_order_with_conditionals',
                'error',
            )
        ),
    ),
    'attention_entropy': Row(
        attention_entropy,
        (
            *('least_over_bound', 'most_over_bound_of_the_construction'),
            *('share_of_grown_with_sigma', 'share_of_grown_without'),
        ),
        trains=False,
    ),
    'balance_of_teachers': Row(
        balance_of_teachers,
        ('accuracy_in_the_worse_domain', 'gain_in_the_worse_domain', 'gain_in_the_mean'),
    ),
    'bigrams': Row(
        bigrams,
        (
            *(f'excess_of_{name}' for name in NORMALISERS),
            *(
                f'excess_of_moving_average_over_{name}'
                for name in ('noise_contrastive', 'sampled_softmax')
            ),
        ),
    ),
    'binary_accuracy': Row(
        binary_accuracy,
        (*(f'accuracy_by_{name}' for name in SLOPES), 'gain_of_random_slopes'),
    ),
    'blind_correctness': Row(
        blind_correctness,
        ('confidence_less_accuracy_even', 'confidence_less_accuracy_balanced'),
    ),
    'decayed_norms': Row(
        decayed_norms,
        (
            *(f'slope_over_width_of_{rule}' for rule in ('constant', 'sqrt_width', 'linear_width')),
            'slope_over_rate_over_decay',
        ),
    ),
    'equiangular_rows': Row(
        equiangular_rows,
        tuple(
            f'over_{what}_of_{rows}_rows' for rows in (512, 2048) for what in ('welch', 'random')
        ),
        trains=False,
    ),
    'forgetting': Row(
        forgetting,
        (
            'matched_before',
            *(f'{what}_of_{name}' for what in ('cost', 'matched') for name in UNLEARNING),
            *(f'cost_of_{name}_over_ascent' for name in UNLEARNING[1:]),
        ),
    ),
    'gradients_at_the_start': Row(
        gradients_at_the_start,
        ('slope_of_pre_norm', 'slope_of_post_norm'),
        trains=False,
    ),
    'heads_of_students': Row(
        heads_of_students,
        (
            *(f'accuracy_of_{name}' for name in STUDENTS),
            *(f'loss_of_two_heads_less_{x}' for x in ('one_head', 'ce', 'probabilities')),
            *('accuracy_of_one_head_less_ce', 'accuracy_of_one_head_less_logits'),
            *('cosine_in_the_head', 'cosine_in_the_body'),
        ),
    ),
    'imbalanced_collapse': Row(
        imbalanced_collapse,
        (
            *('error_of_squared_lengths', 'cosine_of_rows', 'vanishing_length'),
            'spread_within_classes',
        ),
    ),
    'invariances': Row(
        invariances,
        tuple(
            value
            for name in NAMES
            for value in (
                *(f'{name}_of_{change}' for change in CHANGES),
                f'gradient_times_scale_of_{name}',
            )
        ),
        trains=False,
    ),
    'large_batches': Row(
        large_batches,
        (
            *(f'accuracy_by_{name}' for name in REGIMES),
            *('lost_by_large', 'lost_by_adapted', 'unexplained_by_log', 'unexplained_by_root'),
            'unexplained_by_log_less_root',
        ),
    ),
    'lipschitz_attention': Row(
        lipschitz_attention,
        ('slope_of_products', 'slope_of_tied_distances', 'slope_of_own_distances'),
        trains=False,
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
        trains=False,
    ),
    'memory_of_optimizers': Row(
        memory_of_optimizers,
        (
            *(
                f'weights_and_state_with_scale_over_adamw_of_{size}'
                for size in ('llama_124m', 'llama_1b', '60m', '130m', '350m', '1b')
            ),
            *(
                f'{what}_of_{size}'
                for what in (
                    'state_of_lion_over_adamw',
                    'state_of_muon_over_adamw_of_matrices',
                )
                for size in ('llama_124m', 'llama_1b')
            ),
        ),
        trains=False,
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
    'norms_alone': Row(
        norms_alone,
        (
            *(f'accuracy_by_{part}' for part in TRAINED_PARTS),
            *('gain_of_norms_over_weights', 'share_of_gains_near_0'),
        ),
    ),
    'one_step': Row(
        one_step,
        (
            *('excess_loss', 'step_over_best', 'unexplained_by_one_step'),
            'unexplained_by_one_step_of_stretched_inputs',
            'unexplained_by_preconditioned_step_of_stretched_inputs',
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
    'pruned_for_a_domain': Row(
        pruned_for_a_domain,
        (
            'moved_by_the_published_strength',
            *(
                f'{what}_by_{name}'
                for what in ('mean_added', 'added_to_general', 'added_to_domain')
                for name in PRUNING
            ),
            *(f'mean_added_by_dual_less_{name}' for name in PRUNING if name != 'dual'),
        ),
    ),
    'random_features': Row(
        random_features,
        ('slope_of_gaussian', 'slope_of_orthogonal', 'orthogonal_over_gaussian'),
        trains=False,
    ),
    'ranks': Row(
        ranks,
        tuple(
            value
            for count in (1, TOP)
            for value in _with_gains(f'top_{count}', (*FOR_RANKS, 'spherical'))
        ),
    ),
    'rare_class': Row(
        rare_class,
        tuple(
            value for what in ('f1', 'f1_at_half') for value in _with_gains(what, FOR_A_RARE_CLASS)
        ),
    ),
    'relative_changes_over_training': Row(
        relative_changes_over_training,
        tuple(f'late_over_early_change_of_{name}_weights' for name in ('free', 'projected')),
    ),
    'reparametrised_norms': Row(
        reparametrised_norms,
        tuple(f'{which}_norm_over_gamma' for which in ('mean', 'largest', 'least')),
    ),
    'rescaled_rows': Row(
        rescaled_rows,
        (
            *(f'accuracy_by_{name}' for name in WEIGHTS),
            *(
                f'{what}_{name}'
                for name in WEIGHTS[1:]
                for what in ('gain_of', 'weight_of_corrupted_over_clean_by')
            ),
        ),
    ),
    'sampled_products': Row(
        sampled_products,
        tuple(
            f'{what}_of_rows_{rows}'
            for what in ('error_over_plain_sampling', 'bias')
            for rows in ('alike', 'different')
        ),
        trains=False,
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
        trains=False,
    ),
    'singular_values_of_updates': Row(
        singular_values_of_updates,
        (
            *(
                f'share_of_singular_values_of_muon_in_band_of_{kind}_gradients'
                for kind in ('random', 'ill_conditioned')
            ),
            *(f'condition_number_of_{name}_over_that_of_momentum' for name in ('auon', 'muon')),
            'relative_difference_of_auon_from_momentum',
            'spectral_norm_of_auon_of_paper',
            'largest_singular_value_of_muon',
        ),
        trains=False,
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
    'stream_over_depth': Row(
        stream_over_depth,
        (
            *(f'slope_of_{name}' for name in ('pre', 'layernorm_scaling', 'peri')),
            *(f'added_by_grown_of_{name}' for name in ('pre', 'peri')),
            *(f'slope_of_size_of_{name}' for name in ('depth_mup', 'standard')),
        ),
        trains=False,
    ),
    'tries': Row(
        tries,
        (
            f'pass_at_{TRIES[-1]}_lost',
            'pass_at_1_gained_since',
            f'pass_at_{TRIES[-1]}_gain_of_dco',
            f'pass_at_{TRIES[-1]}_gain_of_dco_over_the_best',
            *(f'pass_at_{n}_by_{name}' for n in TRIES for name in ('cross_entropy', 'dco')),
        ),
    ),
    'unlearned_points': Row(
        unlearned_points,
        tuple(
            value
            for which in SETS
            for value in (
                *(
                    f'klom_of_{points}_points_by_{method}_without_{which}'
                    for method in FORGETTING
                    for points in POINTS
                ),
                *(
                    f'klom_of_{points}_points_by_matching_over_{other}_without_{which}'
                    for points, other in RATIOS
                ),
            )
        ),
    ),
    'wrong_labels': Row(
        wrong_labels,
        tuple(
            value
            for wrong in SHARES_WRONG
            for value in _with_gains(f'accuracy_at_{wrong}', FOR_WRONG_LABELS)
        ),
    ),
}
