"""Equivalence: a folded checkpoint computes the same function as its source, and loads like any
other.

Contract: models that cannot be folded are refused, with a remedy.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert import fold
from eval.convert.fold import cast, compute_logits, fold_checkpoint, write_workdir
from eval.generate import generate
from eval.load import Checkpoint, load
from eval.suites.perplexity import perplexity
from lm.config.fields import NormConfig
from lm.record.run import Run
from lm.training.state import Weights
from modules.norms import fold as algebra
from modules.params import named_leaves
from tests.eval.programs import run_module
from tests.helpers import VOCAB, initial_state, tiny_config, tiny_learner
from tests.sweep_helpers import base, cell_config, write_corpus
from tests.xla import ONE_DEVICE
from train import DONE, train


def checkpoint(changes, weights=None):
    """Returns a checkpoint like `load`, with all parameters and statistics far from their initial
    values.
    """
    config = tiny_config(changes)
    if weights is None:
        rng = np.random.default_rng(0)
        state = initial_state(config)
        params = jax.tree.map(
            lambda w: w + np.float32(0.3) * rng.normal(size=w.shape), state.params
        )

        def perturb(leaf):
            is_count = np.issubdtype(leaf.dtype, np.integer)
            return np.full_like(leaf, 100) if is_count else rng.uniform(0.5, 2, leaf.shape)

        stats = {k: jax.tree.map(perturb, v) for k, v in state.stats.items()}
        weights = cast(Weights(params, state.reparam, stats), np.float32)
    meta = {'vocab_size': VOCAB}
    path = Path('memory/checkpoints/3')
    return Checkpoint(path, config, 3, meta, tiny_learner(config), None, None, weights, None)


LAYERNORM = {'model.norm': 'layernorm'}
LEARNED = {'model.position': 'learned', 'model.activation': 'swiglu'}
WEIGHT_NORM = {'model.reparam': 'weight_norm'}
TIED = {'model.tie_embeddings': True}
BIASES = {'model.bias': True, 'model.readout_bias': True}
BARE = {'norm.scale': False, 'norm.bias': False}
CASES = {
    'learned': (
        LAYERNORM
        | LEARNED
        | WEIGHT_NORM
        | {'model.scan_layers': False, 'model.placement': 'parallel_shared'},
        'rmsnorm',
    ),
    'biases': (LAYERNORM | BIASES | {'norm.bias': False, 'norm.eps': 0.1}, 'rmsnorm'),
    'no bias': (LAYERNORM | {'norm.bias': False, 'model.logit_softcap': 5.0}, 'rmsnorm'),
    'qk gains': (LAYERNORM | {'model.qk_norm': 'layernorm', 'model.n_kv_heads': 1}, 'rmsnorm'),
    'options behind names': (
        {'model.norm': 'layernorm:eps=0.1', 'model.qk_norm': 'rmsnorm', 'norm.eps': 0.2},
        'rmsnorm',
    ),
    'rmsnorm': ({'model.norm': 'rmsnorm', 'model.qkv_bias': True} | WEIGHT_NORM | TIED, 'rmsnorm'),
    'compressed tied': (LAYERNORM | LEARNED | BIASES | WEIGHT_NORM | TIED, 'crmsnorm'),
    'compressed bare': (LAYERNORM | BARE | {'model.embedding_scale': True}, 'crmsnorm'),
    'batchnorm': (
        {'model.norm': 'batchnorm', 'norm.momentum': 0.5, 'model.placement': 'parallel'} | LEARNED,
        'none',
    ),
    'unified': (
        {'model.norm': 'unified', 'model.qk_norm': 'unified', 'model.qkv_bias': True} | WEIGHT_NORM,
        'none',
    ),
    'layernorm removal': (
        {'model.norm': 'layernorm_removal', 'train.trainable': 'norms'} | BIASES,
        'none',
    ),
    'rmsnorm removal': ({'model.norm': 'rmsnorm_removal', 'model.qk_norm': 'rmsnorm'}, 'none'),
}


@functools.cache
def fold_case(name):
    changes, to = CASES[name]
    return fold_checkpoint(checkpoint(changes), to, untie=True)


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_fold_preserves_logits(name):
    """Logits are equal in float64, up to rounding. Catches any reader, writer, bias, gain or
    statistic that is left out.
    """
    assert fold_case(name).differences['float64'] < 1e-12
    assert 0 < fold_case(name).differences['float32'] < 1e-5
    assert fold_case(name).recipe.norm.name == CASES[name][1]


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_only_qk_norms_keep_parameters(name):
    leaves = named_leaves(fold_case(name).weights.params)
    inside = {path for path in leaves if 'norm' in path and '/attention/' in path}
    assert not {path for path in leaves if 'norm' in path} - inside
    gains = ('qk gains', 'options behind names', 'rmsnorm removal', 'unified')
    assert bool(inside) == (name in gains)


@pytest.mark.full
def test_config_after_fold():
    """Catches an option that no norm reads, and an option of the norm of queries and keys that is
    lost.
    """
    recipes = {name: fold_case(name).recipe for name in CASES}
    for name in ('no bias', 'learned', 'batchnorm', 'qk gains', 'biases'):
        assert recipes[name].config.norm == NormConfig()
    norms = {name: (config.model.norm, config.model.final_norm) for name, config in recipes.items()}
    assert {*norms['learned'], *norms['qk gains']} == {'rmsnorm:scale=False'}
    assert {*norms['biases']} == {'rmsnorm:eps=0.1,scale=False'}
    assert {*norms['options behind names']} == {'rmsnorm:eps=0.1,scale=False'}
    assert recipes['options behind names'].config.norm == NormConfig(eps=0.2)
    for name, biased in (('no bias', False), ('learned', True), ('batchnorm', True)):
        model = recipes[name].model
        assert (model.bias, model.readout_bias, model.reparam) == (biased, biased, 'none')
    assert recipes['layernorm removal'].train.trainable == 'all'
    assert not recipes['compressed tied'].model.tie_embeddings


@pytest.mark.full
def test_rmsnorm_writers_stay():
    """RMSNorm does not subtract the mean. Catches recentring for every source."""
    source = checkpoint(CASES['rmsnorm'][0])
    before, after = (named_leaves(w.params) for w in (source.weights, fold_case('rmsnorm').weights))
    np.testing.assert_array_equal(before['embedding'], after['embedding'])


@pytest.mark.full
def test_logits_use_float64():
    """A change of 1e-10 is visible. Catches a cast to float32 in RoPE, attention, norms, activation
    or readout.
    """
    config = tiny_config({'model.norm': 'layernorm', 'model.activation': 'swiglu'})
    params = cast(initial_state(config).params, np.float64)
    towards = np.random.default_rng(0).normal(size=params['embedding'].shape)

    def logits(change):
        moved = {'params': params | {'embedding': params['embedding'] + change * towards}}
        return compute_logits(config, VOCAB, moved, 'float64')

    start = logits(0.0)
    slopes = [(logits(change) - start) / change for change in (1e-10, 1e-5)]
    np.testing.assert_allclose(slopes[0], slopes[1], atol=1e-3 * np.max(np.abs(slopes[1])))


@pytest.mark.full
def test_fold_with_changed_logits_fails(monkeypatch):
    monkeypatch.setattr(algebra, 'recentre_writer', lambda kernel: kernel)
    with pytest.raises(ValueError, match=r'changed the model: in float64 .* Nothing was written'):
        fold_checkpoint(checkpoint(LAYERNORM), 'rmsnorm')


def make_removal(kind, updates):
    """Two layers, five norms: the last is removed after 3 + 4 * 2 updates."""
    changes = {'model.norm': f'{kind}_removal', 'norm.removal_start': 3, 'norm.removal_gap': 2}
    return changes, Weights({}, (), {'stats': {'final_norm': {'updates': np.int32(updates)}}})


@pytest.mark.parametrize(
    'changes, to, match',
    [
        (LAYERNORM | {'model.placement': 'post'}, 'rmsnorm', r'placement=post .*, pre\.'),
        (LAYERNORM | {'model.placement': 'peri'}, 'crmsnorm', r'placement=peri .*, pre\.'),
        (LAYERNORM | {'model.placement': 'wide'}, 'rmsnorm', r'placement=wide .*, pre\.'),
        (LAYERNORM | {'model.mlp': 'moe'}, 'rmsnorm', r'model.mlp=moe .* Supported: dense'),
        (LAYERNORM | {'model.embedding_norm': 'layernorm'}, 'rmsnorm', r'embedding_norm=layernorm'),
        (
            LAYERNORM | {'model.readout': 'cosines'},
            'rmsnorm',
            r'model.readout=cosines cannot be folded',
        ),
        (
            LAYERNORM | {'model.final_norm': 'none'},
            'rmsnorm',
            r'final_norm=none .* Supported: layernorm',
        ),
        (LAYERNORM | TIED, 'rmsnorm', 'Add --untie'),
        (LAYERNORM, 'none', r'folded with --to=crmsnorm or rmsnorm\..*layernorm_removal'),
        ({'model.norm': 'rmsnorm'}, 'none', r'folded with --to=rmsnorm\..*rmsnorm_removal'),
        ({'model.norm': 'rmsnorm'}, 'crmsnorm', 'crmsnorm needs a stream without mean'),
        (
            {'model.norm': 'powernorm'},
            'none',
            r'got powernorm, which cannot be folded\..* by its rms',
        ),
        ({'model.norm': 'dyt'}, 'rmsnorm', 'got dyt, which cannot be folded'),
        (LAYERNORM, 'rmsnrm', "Did you mean 'rmsnorm'"),
    ],
)
def test_unfoldable_model_fails(changes, to, match):
    with pytest.raises(ValueError, match=match):
        fold_checkpoint(checkpoint(changes, weights=Weights({}, (), {})), to)


@pytest.mark.parametrize('updates, n_remaining', [(0, 5), (2, 5), (3, 4), (10, 1)])
def test_unfinished_removal_fails(updates, n_remaining):
    changes, weights = make_removal('layernorm', updates)
    match = (
        f'{n_remaining} of 5 norms .* after {updates} updates. Fine-tune for {11 - updates} more'
    )
    with pytest.raises(ValueError, match=match):
        fold_checkpoint(checkpoint(changes, weights), 'none')
    changes, weights = make_removal('layernorm', 11)
    fold.check_foldable(checkpoint(changes, weights), 'none', untie=False)


@pytest.fixture(scope='module')
def tuned_run(tmp_path_factory):
    """The workdir of a model trained with layernorm and fine-tuned until all norms are removed."""
    folder = tmp_path_factory.mktemp('runs')
    (folder / 'text').mkdir()
    tree = base(write_corpus(folder / 'text'), model_reparam='weight_norm', optim_lr=0.02)
    once = {'train.eval_every': 0, 'train.checkpoint_every': 0}
    once |= {'model.norm': 'layernorm', 'model.final_norm': 'auto'}
    assert train(cell_config(tree, once), folder / 'layernorm') == DONE
    without = once | {
        'model.norm': 'layernorm_removal',
        'norm.removal_start': 2,
        'norm.removal_gap': 1,
        'train.init_from': str(folder / 'layernorm'),
    }
    assert train(cell_config(tree, without), folder / 'tuned') == DONE
    return folder / 'tuned'


@pytest.mark.full
def test_fold_after_removal_preserves_loss(tuned_run, tmp_path):
    """Norms are removed until none is left; the programs load the result like any checkpoint."""
    folder = tmp_path / 'none'
    flags = ('--to=none', f'--checkpoint={tuned_run}', f'--out={folder}')
    done = run_module('eval.convert', 'fold', *flags, XLA_FLAGS=ONE_DEVICE)
    assert done.returncode == 0, done.stderr
    assert 'layernorm_removal -> none' in done.stdout and 'in float64' in done.stdout
    source, folded = load(tuned_run), load(folder)
    assert (folded.step, folded.recipe) == (source.step, Run(folder).read_recipe())
    assert folded.recipe.model.reparam == 'none'
    assert not [path for path in named_leaves(folded.weights.params) if 'norm' in path]
    assert folded.weights.stats == {}
    expected, numbers = perplexity(source).numbers, perplexity(folded).numbers
    assert expected['validation_ce'] < 4.5  # of 258 bytes: it has learnt something
    np.testing.assert_allclose(numbers['validation_ce'], expected['validation_ce'], rtol=1e-5)
    texts = [generate(c, ['norm la'], 8, temperature=0)[0] for c in (source, folded)]
    assert texts[0] == texts[1] != 'norm la'


@pytest.mark.full
def test_training_resumes_from_fold(tuned_run, tmp_path, capsys):
    """The workdir looks like a run at the step of the source."""
    source, workdir = load(tuned_run.parent / 'layernorm'), tmp_path / 'rmsnorm'
    folded = fold_checkpoint(source, 'rmsnorm')
    write_workdir(
        workdir, folded.recipe, folded.weights, source.tokenizer, source.step, source.meta
    )
    assert train(folded.recipe, workdir) == DONE
    ended = f'is finished: step {source.step} of {source.step}, nothing left to do'
    assert ended in capsys.readouterr().out
    with pytest.raises(ValueError, match='is not empty; use a new folder'):
        write_workdir(
            workdir, folded.recipe, folded.weights, source.tokenizer, source.step, source.meta
        )


@pytest.mark.parametrize(
    'arguments, match',
    [
        (
            [],
            r'got none\. .* fold, import-hf DIR, export-hf, export-peft, merge RUN \.\.\., prune',
        ),
        (['fold', 'more'], 'got fold more'),
        (['fodl'], 'one command, followed by flags; got fodl'),
        (['fold'], 'eval.convert fold also needs --out, --to'),
        (['import-hf'], 'got import-hf'),
        (['import-hf', 'x'], 'import-hf also needs --out'),
        (['merge'], 'got merge'),
        (['merge', 'x', 'y', 'z'], 'merge also needs --out'),
    ],
)
def test_incomplete_command_fails(arguments, match):
    with pytest.raises(ValueError, match=match):
        convert.run(arguments, {'checkpoint': 'x', 'out': None, 'to': None})
