"""How do norm layers and their placement change the loss, and its sensitivity to the learning rate?

Question: of the norm layers in pre-norm, and of the placements of RMSNorm, over three decades of
          learning rates, which reaches the lowest loss, and which tolerates a learning rate that is
          off by a factor of ten?
Command:  uv run train.py --config=configs/studies/norm_placement_lr.py --workdir=runs/norms
          uv run train.py --config=configs/studies/norm_placement_lr.py:longer \\
            --workdir=runs/norms_longer
          uv run python -m tpu.plan --config=configs/studies/norm_placement_lr.py:pod \\
            --topology=v6e:4x4
Cost:     588 runs of 0.26 million parameters, half an hour on two CPU cores; 72 longer ones, 24
          minutes; 72 of 124 million on a pod: tpu/PLANS.md.
Result:   variants whose first update does not drown the embeddings are best; with embeddings that
          start at 1, pre-norm is as good as any and only post-norm is worse; LayerNorm and RMSNorm
          are equal: configs/studies/results/norm_placement_lr.md

Every cell sees the same text in the same order; seeds differ in the initial parameters. The hybrids
normalize queries and keys, which is part of the method; the others do not, since it would hide much
of a norm's effect. The published warm-ups of PowerNorm (10,000 updates) and of Unified
Normalization (4,000) are longer than these runs, in which both would be norms over the batch. Here
the warm-ups are a quarter and a fifth of the run. The compensation in Unified Normalization's
backward pass is still not reached: the authors' code begins it after 1,000 updates. Peri-LN also
normalizes the embeddings; `peri` is included with and without this.

norm_placement_lr.py:fitted trains only the baseline and these three: 84 runs, five minutes.
norm_placement_lr.py:longer repeats eight variants for twice as many steps, with embeddings that
start at a standard deviation of 1, so that the first update does not drown them: 72 runs.
norm_placement_lr.py:pod is planned, not trained: 24 variants of a model with 124 million
parameters, each with three seeds at one learning rate, 20 tokens per parameter, without the four
norms over the current batch.
"""

from ml_collections import ConfigDict

from configs import llama_124m
from configs.studies import small
from configs.studies._variants import check_variant
from configs.studies.depth_variance import PLACEMENTS

DECADES = (-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0)
NORMS = (  # all norms of the time, except those that remove norms of a trained model
    'rmsnorm',
    'layernorm',
    'crmsnorm',
    'seednorm',
    'gated_rmsnorm',
    'pre_affine_rmsnorm',
    'ada_rmsnorm',
    'dyt',
    'l1norm',
    'powernorm:warmup=50',
    'unified:warmup=40',
    'batchnorm',
    'ghost_batchnorm',
    'batch_channel',
    'evonorm_s0',
    'evonorm_b0',
    'none',
)

BATCH_NORMS = ('batchnorm', 'ghost_batchnorm', 'batch_channel', 'evonorm_b0')

LONGER_VARIANTS = (  # norm, placement
    ('rmsnorm', 'pre'),
    ('layernorm', 'pre'),
    ('dyt', 'pre'),
    ('none', 'pre'),
    ('rmsnorm', 'post'),
    ('rmsnorm', 'peri'),
    ('rmsnorm', 'mix'),
    ('rmsnorm', 'deepnorm'),
)


def variants() -> tuple[dict[str, str], ...]:
    rows = [{'model.norm': norm, 'model.placement': 'pre'} for norm in NORMS]
    for placement in PLACEMENTS:
        if placement != 'pre':
            hybrid = {'model.qk_norm': 'rmsnorm'} if placement.startswith('hybrid') else {}
            rows.append({'model.norm': 'rmsnorm', 'model.placement': placement} | hybrid)
    peri_ln = {'model.placement': 'peri', 'model.embedding_norm': 'rmsnorm'}
    return (*rows, {'model.norm': 'rmsnorm'} | peri_ln)


def is_fitted(variant: dict[str, str]) -> bool:
    """Whether it is the baseline, or has a warm-up or an embedding norm."""
    baseline = {'model.norm': 'rmsnorm', 'model.placement': 'pre'}
    has_warmup = ':warmup=' in variant['model.norm']
    return variant == baseline or has_warmup or 'model.embedding_norm' in variant


def get_config(which: str = 'all') -> ConfigDict:
    """which: 'all' variants, the 'fitted' ones, 'longer' (LONGER_VARIANTS), or for a 'pod'."""
    check_variant(which, ('all', 'fitted', 'longer', 'pod'))
    if which == 'pod':
        return _get_pod_config()
    config = small.get_config()
    config.train.diagnose_every = 100
    rates = tuple(10**exponent for exponent in DECADES)
    if which == 'longer':
        selected = tuple(
            {'model.norm': norm, 'model.placement': place} for norm, place in LONGER_VARIANTS
        )
        rates = rates[3:6]
        config.scaling.embedding_std = 1.0
        config.train.steps = config.train.eval_every = 400
        config.train.diagnose_every = 200
    else:
        selected = {'all': variants(), 'fitted': tuple(filter(is_fitted, variants()))}[which]
    config.sweep = {'list': selected, 'optim.lr': rates, 'train.seed': (0, 1, 2)}
    return config


def _get_pod_config() -> ConfigDict:
    config = llama_124m.get_config()
    config.data.seq_len = 2048
    config.data.batch_size = 128
    config.train.microbatches = 16
    config.train.steps = 9500
    warmups = {
        'powernorm:warmup=50': 'powernorm:warmup=2375',
        'unified:warmup=40': 'unified:warmup=1900',
    }
    selected = tuple(
        variant | {'model.norm': warmups.get(variant['model.norm'], variant['model.norm'])}
        for variant in variants()
        if variant['model.norm'] not in BATCH_NORMS
    )
    config.sweep = {'list': selected, 'train.seed': (0, 1, 2)}
    return config
