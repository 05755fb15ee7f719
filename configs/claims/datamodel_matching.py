"""Matching a datamodel unlearns points, and gradient ascent on their loss does not.

Paper:    arXiv:2410.23232, Attribute-to-Delete: Machine Unlearning via Datamodel Matching
Says:     Fine-tuning a model to the outputs that a datamodel predicts without the points to forget
          gives the outputs of models trained without them, on these points and on others. Ascent on
          the loss of these points does not. The measure is KLoM, the divergence of the margins that
          unlearned models give a point from those of retrained models.
Here:     Networks with one hidden layer of 24 units are trained on 96 points of 12 Gaussian
          clusters. Eight points are forgotten: random ones, or all of one cluster. The datamodel is
          fitted by least squares to 1,600 models of random halves, and KLoM compares 100 unlearned
          models with 100 retrained ones. Six seeds, medians over points, ascent and matching each
          at the learning rate that is best for the forgotten points on three other seeds. Sizes
          were chosen on another seed, so that models differ by what is removed. The paper forgets
          10 to 1,000 of 50,000 images with sparse datamodels of 1,000 to 20,000 models.
Counts:   for both sets, the median KLoM of forgotten points is at most half of that after ascent
          and of that of models that unlearn nothing; that of retained points is at most a quarter
          above that of models that unlearn nothing.
"""

PART = 'data'
STUDIES = {
    'measure': 'measure:unlearned_points',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_ascent_without_scattered_points',
        'within': (None, 0.5),
        'label': 'KLoM of forgotten points, matching over ascent, random points',
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_nothing_without_scattered_points',
        'within': (None, 0.5),
        'label': 'KLoM of forgotten points, matching over no unlearning, random points',
    },
    {
        'study': 'measure',
        'value': 'klom_of_retained_points_by_matching_over_nothing_without_scattered_points',
        'within': (None, 1.25),
        'label': 'KLoM of retained points, matching over no unlearning, random points',
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_ascent_without_a_cluster',
        'within': (None, 0.5),
        'label': 'KLoM of forgotten points, matching over ascent, one cluster',
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_nothing_without_a_cluster',
        'within': (None, 0.5),
        'label': 'KLoM of forgotten points, matching over no unlearning, one cluster',
    },
    {
        'study': 'measure',
        'value': 'klom_of_retained_points_by_matching_over_nothing_without_a_cluster',
        'within': (None, 1.25),
        'label': 'KLoM of retained points, matching over no unlearning, one cluster',
    },
)
CONTROL = tuple(
    {
        'study': 'measure',
        'value': f'klom_of_{_points}_points_by_retraining_over_nothing_without_{_set}',
        'within': (None, _most),
        'label': (
            f'KLoM of {_points} points, models trained without the set over no unlearning, '
            f'{_set_name}'
        ),
    }
    for _set, _set_name in (('scattered_points', 'random points'), ('a_cluster', 'one cluster'))
    for _points, _most in (('forgotten', 0.5), ('retained', 1.25))
)
TWIN = tuple(
    {
        'study': 'measure',
        'value': (
            f'klom_of_forgotten_points_by_matching_mean_of_effects_over_nothing_without_{_set}'
        ),
        'within': (None, 0.5),
        'label': (
            "KLoM of forgotten points, matching with the mean of the points' effects instead of "
            f'their sum over no unlearning, {_set_name}'
        ),
    }
    for _set, _set_name in (('scattered_points', 'random points'), ('a_cluster', 'one cluster'))
)
FIDELITY = {
    'datamodel matching': {
        'setting': (
            'least squares on 1,600 models of random halves of 96 points; logits matched by '
            'squared error on 8 forgotten and 24 retained points; Adam with a cosine to 0, 100 '
            'steps, best of six rates on forgotten points'
        ),
        'published': (
            'sparse datamodels from 1,000 to 20,000 models of random halves of 50,000 images; '
            'logits matched on forgotten and some retained points; optimizer and rates are not '
            'known here'
        ),
        'source': 'arXiv:2410.23232, appendix C',
    },
    'gradient ascent': {
        'setting': 'ten steps of SGD on all forgotten points, best of rates 0.005 to 0.16',
        'published': (
            'SGD in batches of 64, 1 to 10 epochs over the forgotten points, rates 1e-5 to 0.05, '
            'of ResNet-9'
        ),
        'source': (
            'github.com/RoyRin/data-unlearning-bench, unlearning_bench/config.py and unlearning.py'
        ),
    },
    'no unlearning': {
        'setting': '100 models of all points, KLoM with 20 bins against 100 retrained models',
        'published': 'the same with N = 100 models',
        'source': 'github.com/RoyRin/data-unlearning-bench, unlearning_bench/config.py and eval.py',
    },
}
