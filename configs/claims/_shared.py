"""Controls and settings that claims on the same study share."""

NORMS_CONTROL = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (0.1, None),
        'label': 'loss difference, post-norm minus pre-norm (nats per token)',
    },
)
# Found at each size and length of configs/studies/results/ladder.md.
PERI_CONTROL = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'peri'},
        'difference': (0.0, None),
        'label': 'loss difference, Peri-LN minus pre-norm (nats per token)',
    },
)
NO_NORM_TWIN = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'none', 'model.placement': 'pre'},
        'difference': (None, 0.0),
        'label': 'loss difference, no norms at all minus RMSNorm in pre-norm (nats per token)',
    },
)
BLOCKS_CONTROL = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'none'},
        'difference': (0.03, None),
        'label': 'loss difference, no position encoding minus RoPE (nats per token)',
    },
)
RECIPES_CONTROL = (
    {
        'study': 'recipes',
        'arm': {'loss.name': 'comp_sum', 'loss.tau': 0.5},
        'difference': (0.1, None),
        'label': 'cross-entropy at tau = 0.5 minus that at tau = 1 (nats per token)',
    },
)
OPTIMIZERS_CONTROL = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'muon'},
        'difference': (None, -0.1),
        'label': 'loss difference, Muon minus AdamW (nats per token, 200 steps)',
    },
)
OPTIMIZERS_TWIN = (
    {
        'study': 'twins',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.0),
        'label': (
            'loss difference, an optimizer whose updates are lost, so that hidden matrices only '
            'decay, minus AdamW (nats per token, 200 steps)'
        ),
    },
)
CONSTANT_RATE_CONTROL = (
    {
        'study': 'both',
        'arm': {'optim.schedule': 'constant'},
        'difference': (0.0, None),
        'label': 'loss difference, constant rate minus cosine to 0, both of AdamW (nats per token)',
    },
)
LOST_UPDATES_CONTROL = (
    {
        'study': 'both',
        'arm': {'optim.conda_scale': 0.0},
        'difference': (0.1, None),
        'label': 'loss difference, no updates of hidden matrices minus AdamW (nats per token)',
    },
)
LOST_UPDATES_TWIN = (
    {
        'study': 'both',
        'arm': {'optim.conda_scale': 0.0},
        'difference': (None, 0.0),
        'label': (
            'loss difference, an optimizer whose updates are lost, so that hidden matrices only '
            'decay, minus AdamW (nats per token)'
        ),
    },
)
PLAIN_MOMENTUM_TWIN = (
    {
        'study': 'both',
        'arm': {'optim.name': 'auon'},
        'difference': (None, 0.0),
        'label': (
            'loss difference, momentum that is not orthogonalised (AuON) minus AdamW (nats per '
            'token)'
        ),
    },
)
OBJECTIVES_CONTROL = (
    {
        'study': 'objectives',
        'arm': {'data.objective': 'span_corruption'},
        'difference': (0.1, None),
        'label': (
            'loss difference, corrupted spans in all rows, with a third of the targets, minus '
            'causal rows (nats per token)'
        ),
    },
)
PUBLISHED_CONTROL = (
    {
        'study': 'unit',
        'arm': {'optim.name': 'sgd'},
        'difference': (0.0, None),
        'label': 'loss difference, SGD minus AdamW (nats per token, embeddings of deviation 1)',
    },
)
F1_CONTROL = (
    {
        'study': 'measure',
        'value': 'f1_at_half_gain_of_fewer_rows',
        'within': (None, -0.01),
        'label': (
            'F1 of cross-entropy with a quarter of the rows minus that with all rows, '
            'threshold 1/2 (fraction)'
        ),
    },
    {
        'study': 'measure',
        'value': 'f1_gain_of_fewer_rows',
        'within': (None, -0.01),
        'label': (
            'F1 of cross-entropy with a quarter of the rows minus that with all rows, '
            'best thresholds (fraction)'
        ),
    },
)
WRONG_LABELS_CONTROL = (
    {
        'study': 'measure',
        'value': 'accuracy_at_0.4_gain_of_fewer_wrong_labels',
        'within': (0.01, None),
        'label': 'accuracy of cross-entropy with 30% wrong labels minus that with 40% (fraction)',
    },
    {
        'study': 'measure',
        'value': 'accuracy_at_0.0_gain_of_absolute_error',
        'within': (None, -0.01),
        'label': (
            'accuracy of absolute error, which is known to train badly, minus that of '
            'cross-entropy, no wrong labels (fraction)'
        ),
    },
)
SMALL_START_CAUTION = (
    'At embeddings of 1/8 RMSNorm in pre-norm is 0.44 nats worse than at 1, and a model without '
    'norms is 0.32 better than it (configs/studies/results/nuisances.md): a lead there says how a '
    'method reads small embeddings.'
)
START = {'factor': 'initial scale of the embeddings', 'reference': '1', 'value': '1/8'}
LENGTH = {'factor': 'number of steps', 'reference': '200'}
TEXT = {'factor': 'text', 'reference': 'Python sources', 'value': 'English'}
STUDY = 'configs/studies/nuisances.py:'  # its variants repeat studies in other settings
NORMS_SETTINGS = {
    'norms_start': f'{STUDY}norms_start',
    'norms_longer': f'{STUDY}norms_longer',
    'norms_text': f'{STUDY}norms_text',
}
BLOCKS_SETTINGS = {
    'blocks_start': f'{STUDY}blocks_start',
    'blocks_longer': f'{STUDY}blocks_longer',
    'blocks_text': f'{STUDY}blocks_text',
}
RECIPES_SETTINGS = {
    'recipes_start': f'{STUDY}recipes_start',
    'recipes_text': f'{STUDY}recipes_text',
}
BOTH_SETTINGS = {
    'both_start': f'{STUDY}both_start',
    'both_text': f'{STUDY}both_text',
}
NORMS_NUISANCES = (
    START | {'studies': {'norms': 'norms_start'}},
    LENGTH | {'value': '800', 'studies': {'norms': 'norms_longer'}},
    TEXT | {'studies': {'norms': 'norms_text'}},
)
BLOCKS_NUISANCES = (
    START | {'studies': {'blocks': 'blocks_start'}},
    LENGTH | {'value': '400', 'studies': {'blocks': 'blocks_longer'}},
    TEXT | {'studies': {'blocks': 'blocks_text'}},
)
RECIPES_NUISANCES = (
    START | {'studies': {'recipes': 'recipes_start'}},
    TEXT | {'studies': {'recipes': 'recipes_text'}},
)
BOTH_NUISANCES = (
    START | {'studies': {'both': 'both_start'}},
    TEXT | {'studies': {'both': 'both_text'}},
)
ADAMW_SETTING = (
    'b1 0.9, b2 0.95, eps 1e-8, decay 0.1 times the rate, gradients clipped at 1; '
    'warm-up for a tenth of the steps, cosine to 0, batches of 8 x 128 tokens; tuned '
    'rate for hidden matrices, 0.01 for the rest in every run; embeddings start at a '
    'deviation of 1/8'
)
ONE_RATE_SETTING = (
    'b1 0.9, b2 0.95, eps 1e-8, decay 0.1 times the rate, gradients clipped at 1; warm-up for a '
    'tenth of the steps, cosine to 0, batches of 8 x 128 tokens; one tuned rate for all parameters'
)
