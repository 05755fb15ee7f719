"""A distillation loss on logits helps on a separate head, and harms on a shared one.

Paper:    arXiv:2411.08937, Dual-Head Knowledge Distillation
Says:     On one head, cross-entropy plus a loss on logits is worse than either alone, because their
          gradients contradict each other in the head but not below it. On two heads it is better.
Here:     Networks with two hidden layers, 256 units wide in the teacher and 24 in the student,
          classify 20 classes of Gaussian clusters, 1,000 steps, ten seeds. The paper trains
          convolutional networks on CIFAR-100 and ImageNet. Logits are centred before they are
          compared, the second head is linear, gradients are not aligned, and all loss weights are
          1.
Counts:   the cosine of the two gradients is below 0 in the head and above 0 below it. On one head
          the accuracy is below that of either loss alone. On two heads the held-out loss is at
          least 0.03 nats lower than on one head, and at most that of distilling probabilities.
"""

PART = 'losses'
CAUTION = (
    'A positive cosine below the head, the one condition that holds, is found for a teacher with '
    'the logits of other rows too. The second head is linear, and logits are centred. The '
    "authors' head is nonlinear, aligned by its gradients, and not centred."
)
STUDIES = {
    'measure': 'measure:heads_of_students',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'cosine_in_the_head',
        'within': (None, 0.0),
        'label': 'cosine of the two gradients in the head',
    },
    {
        'study': 'measure',
        'value': 'cosine_in_the_body',
        'within': (0.0, None),
        'label': 'cosine of the two gradients below the head',
    },
    {
        'study': 'measure',
        'value': 'accuracy_of_one_head_less_ce',
        'within': (None, 0.0),
        'label': 'accuracy difference on one head, both losses minus cross-entropy (fraction)',
    },
    {
        'study': 'measure',
        'value': 'accuracy_of_one_head_less_logits',
        'within': (None, 0.0),
        'label': 'accuracy difference on one head, both losses minus logit loss (fraction)',
    },
    {
        'study': 'measure',
        'value': 'loss_of_two_heads_less_one_head',
        'within': (None, -0.03),
        'label': 'loss difference, two heads minus one head (nats)',
    },
    {
        'study': 'measure',
        'value': 'loss_of_two_heads_less_probabilities',
        'within': (None, 0.0),
        'label': 'loss difference, two heads minus distilled probabilities (nats)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'cosine_in_the_head_at_the_end',
        'within': (None, 0.0),
        'label': (
            'cosine of the two gradients in the head at the end of training, when they cancel in '
            'the sum'
        ),
    },
    {
        'study': 'measure',
        'value': 'accuracy_of_probabilities_less_ce',
        'within': (0.0, None),
        'label': 'accuracy difference, distilled probabilities minus cross-entropy (fraction)',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'loss_of_ce_less_one_head',
        'within': (None, -0.03),
        'label': (
            'loss difference, two heads of which the second does not train the layers below, minus '
            'one head (nats)'
        ),
    },
    {
        'study': 'measure',
        'value': 'loss_of_ce_less_probabilities',
        'within': (None, 0.0),
        'label': (
            'loss difference, two heads of which the second does not train the layers below, minus '
            'distilled probabilities (nats)'
        ),
    },
    {
        'study': 'measure',
        'value': 'cosine_in_the_body_of_shuffled_teacher',
        'within': (0.0, None),
        'label': (
            'cosine of the two gradients below the head, teacher with the logits of other rows'
        ),
    },
)
FIDELITY = {
    'two heads': {
        'setting': (
            'linear second head for the logit loss (log cosh at temperature 2, logits centred), '
            'weight 1, no alignment of gradients; SGD at 0.05, momentum 0.9, decay 5e-4, a cosine '
            'to 0, batch 64, 1,000 steps, no tuning'
        ),
        'published': (
            'on CIFAR-100 a second head with a hidden layer of 200, dropout 0.1 and batch norm, '
            'logits not centred, gradients aligned, weight 1; the same SGD for 240 epochs with '
            'cuts by 10 at 150, 180 and 210; on ImageNet linear, weight 0.1'
        ),
        'source': (
            'arXiv:2411.08937; github.com/penghui-yang/DHKD, README.md, train_student.py, '
            'models/classifier.py and distiller_zoo/BinaryKLNorm.py'
        ),
    },
    'one head': {
        'setting': (
            'cross-entropy plus the same logit loss on one head, weights 1, the same training; '
            'the centring removes the part of the logit loss that shifts all logits'
        ),
        'published': (
            'the same sum with logits that are not centred, weight of the script (option -a)'
        ),
        'source': (
            'github.com/penghui-yang/DHKD, train_student.py and distiller_zoo/BinaryKLNorm.py'
        ),
    },
    'distilled probabilities': {
        'setting': 'cross-entropy plus the KL divergence at temperature 4, weights 1 and 1',
        'published': 'the same at temperature 4, weights from the options -r (1 by default) and -a',
        'source': 'github.com/penghui-yang/DHKD, train_student.py',
    },
}
