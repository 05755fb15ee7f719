"""Matching a datamodel unlearns points, which ascent on their loss does not.

Paper:    arXiv:2410.23232, Attribute-to-Delete: Machine Unlearning via Datamodel Matching
Says:     a model that is fine-tuned to what a datamodel predicts without the points to forget gives
          what models trained without them give, on these points and on others; ascent on the loss
          of these points does not. KLoM measures it: the divergence of the margins that unlearned
          models give a point from those that retrained models give it.
Here:     networks of one hidden layer of 24 units on 96 points of 12 Gaussian clusters, of which
          eight are forgotten: drawn ones, or all of one cluster; a datamodel of 1,600 models of
          random halves, by least squares, and 100 unlearned models against 100 trained anew for
          KLoM. Six seeds, medians over points, ascent and matching each at the rate that is best
          for what is forgotten. Sizes and rates were chosen on another seed, so that models differ
          by what is removed. The paper forgets 10 to 1,000 of 50,000 images by sparse datamodels of
          1,000 to 20,000 models.
Counts:   for both sets, the median KLoM of forgotten points is half or less of that after ascent
          and of that of models which unlearn nothing; that of retained points is at most a quarter
          above that of models which unlearn nothing.
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
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_nothing_without_scattered_points',
        'within': (None, 0.5),
    },
    {
        'study': 'measure',
        'value': 'klom_of_retained_points_by_matching_over_nothing_without_scattered_points',
        'within': (None, 1.25),
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_ascent_without_a_cluster',
        'within': (None, 0.5),
    },
    {
        'study': 'measure',
        'value': 'klom_of_forgotten_points_by_matching_over_nothing_without_a_cluster',
        'within': (None, 0.5),
    },
    {
        'study': 'measure',
        'value': 'klom_of_retained_points_by_matching_over_nothing_without_a_cluster',
        'within': (None, 1.25),
    },
)
