"""A loss on logits helps distillation on a head of its own, and harms it on a shared one.

Paper:    arXiv:2411.08937, Dual-Head Knowledge Distillation
Says:     a loss on logits beside cross-entropy on one head is worse than either alone, as their
          gradients contradict each other in the head and not below it; on two heads it is better.
Here:     networks of two hidden layers, of 256 units in the teacher and 24 in the student, on 20
          classes of Gaussian clusters, 1,000 steps, ten seeds; the paper trains convolutional
          networks on CIFAR-100 and ImageNet. Logits are centred before they are compared, the
          second head is linear, gradients are not aligned, and weights of losses are 1.
Counts:   the cosine of both gradients is below 0 in the head and above 0 below it; on one head the
          accuracy is below that of either loss alone; on two heads the held-out loss is lower than
          on one by 0.03 nats or more, and at most that of distilled probabilities.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:heads_of_students',
}
HOLDS = (
    {'study': 'measure', 'value': 'cosine_in_the_head', 'within': (None, 0.0)},
    {'study': 'measure', 'value': 'cosine_in_the_body', 'within': (0.0, None)},
    {'study': 'measure', 'value': 'accuracy_of_one_head_less_ce', 'within': (None, 0.0)},
    {'study': 'measure', 'value': 'accuracy_of_one_head_less_logits', 'within': (None, 0.0)},
    {'study': 'measure', 'value': 'loss_of_two_heads_less_one_head', 'within': (None, -0.03)},
    {'study': 'measure', 'value': 'loss_of_two_heads_less_probabilities', 'within': (None, 0.0)},
)
