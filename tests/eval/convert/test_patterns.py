"""Models with model.pattern as checkpoints, and in families with one kind of block."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from eval.convert import export_hf
from eval.convert.export_peft import export_adapter
from eval.convert.exportable import find_export_family
from eval.convert.fold import check_norms_foldable, fold_checkpoint, write_workdir
from eval.convert.patterns import merge_kinds
from eval.load import Checkpoint, load
from lm.config.resolve import flatten
from lm.inference.engine import Engine, Request
from lm.inference.sampling import Sampling
from modules.params import named_leaves
from tests.helpers import VOCAB, checked_config, initial_state, tiny_batch, tiny_learner
from tests.sweep_helpers import base, cell_config, write_corpus
from train import DONE, train

PATTERN = 'model.pattern'
LAYERS = 10
LLAMA = {'model.activation': 'swiglu', 'model.n_layers': LAYERS, 'model.scan_layers': True}
WHERE = ('window', 'full_every', 'full_at', 'rope_base', 'rope_local_base', 'no_rope_every')


def merged_options(text, changes=()):
    """Returns the options of attention and positions that choose layers, if set."""
    recipe = merge_kinds(checked_config(LLAMA | {PATTERN: text} | dict(changes)))
    assert not recipe.is_mixed
    flat = flatten(recipe)
    return {name: v for name in WHERE if (v := flat[f'attention.{name}']) is not None}


def test_kinds_become_options_by_layer():
    full = {'full_every': 4, 'full_at': 0, 'window': 3, 'rope_base': 10_000.0}
    assert merged_options('softmax:window=3*3+softmax') == full
    assert merged_options('softmax+softmax:window=3*3') == full | {'full_at': 1}
    assert merged_options('softmax+softmax:window=None', {'attention.window': 3}) == full | {
        'full_every': 2
    }
    assert merged_options('softmax:window=3,rope_base=50.0*3+softmax') == full | {
        'rope_local_base': 50.0
    }
    without = {'rope_base': 10_000.0, 'no_rope_every': 4}
    assert merged_options('softmax*3+softmax:position=none') == without
    assert merged_options('softmax:window=3*3+softmax:position=none') == full | without
    yarn = {'attention.rope_scaling': 'yarn', 'attention.rope_factor': 2.0}
    assert merged_options(
        'softmax:window=3,rope_base=50.0,rope_scaling=none,rope_factor=None*3+softmax', yarn
    ) == full | {'rope_local_base': 50.0}


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ('linear*3+softmax', 'in block 4, model.attention and attention.softcap'),
        ('softmax/moe+softmax', 'in block 2, model.mlp'),
        ('softmax:window=2+softmax:window=3+softmax', 'in block 2, attention.window would'),
        ('softmax:window=3*2+softmax*2', 'in block [34], attention.window would'),
        ('softmax:rope_base=50.0+softmax', 'in block [12], attention.rope_base would'),
        ('softmax:sinks=learned+softmax', 'in block 2, attention.sinks would'),
        ('softmax+softmax:position=alibi', 'in block 2, .*model.position'),
    ],
)
def test_other_kinds_are_refused(text, says):
    recipe = checked_config(LLAMA | {PATTERN: text})
    with pytest.raises(ValueError, match=f'no family of transformers has the blocks.*{says}'):
        find_export_family(recipe)


def build_checkpoint(changes):
    config = checked_config(LLAMA | changes)
    state = initial_state(config)
    rng = np.random.default_rng(0)
    params = {p: x + rng.normal(0, 0.1, x.shape) for p, x in named_leaves(state.params).items()}
    nested = unflatten_dict({p: np.float32(x) for p, x in params.items()}, sep='/')
    weights = dataclasses.replace(state.weights, params=nested)
    path, meta = Path('memory/checkpoints/3'), {'vocab_size': VOCAB}
    return Checkpoint(path, config, 3, meta, tiny_learner(config), None, None, weights, None)


def test_folds_and_adapters_are_refused():
    """Their factors and norms are found by the path of all layers."""
    text = {PATTERN: 'softmax:window=3+softmax'}
    with pytest.raises(ValueError, match=r'model.pattern=.*blocks are of several kinds'):
        check_norms_foldable(checked_config(LLAMA | text), 'rmsnorm')
    config = checked_config(LLAMA | text | {'model.reparam': 'lora', 'train.trainable': 'lora'})
    model = dataclasses.replace(stub_checkpoint(), recipe=config)
    with pytest.raises(ValueError, match=r'stored by kind of block.*export-hf'):
        export_adapter(model, 'base')


def stub_checkpoint():
    return Checkpoint(Path('x/checkpoints/1'), None, 1, {}, None, None, None, None, None)


@pytest.mark.full
def test_export_computes_the_same_and_stacks_layers_in_order():
    """Compares the logits of the exported model: catches blocks by kind instead of by depth."""
    checkpoint = build_checkpoint({PATTERN: 'softmax:window=3*3+softmax'})
    exported = export_hf.export_checkpoint(checkpoint)
    assert exported.recipe.attention.options['full_every'] == 4 and exported.difference < 1e-5
    up = exported.params['layers/mlp/up']
    params = checkpoint.weights.params
    np.testing.assert_array_equal(up[5], params['layers']['block_2']['mlp']['up'][1])
    np.testing.assert_array_equal(up[9], params['layers_last']['block_2']['mlp']['up'][0])


@pytest.mark.full
def test_checkpoint_is_loaded_converted_and_continued(tmp_path):
    """Trains, loads, decodes, and folds a reparametrisation of a run with a pattern."""
    changes = {PATTERN: 'linear*2+softmax', 'model.n_layers': 4, 'model.reparam': 'weight_norm'}
    (tmp_path / 'text').mkdir()
    tree = base(write_corpus(tmp_path / 'text'), optim_lr=0.02)
    once = {'train.eval_every': 0, 'train.checkpoint_every': 0, 'train.diagnose_every': 4}
    recipe = cell_config(tree, changes | once)
    assert train(recipe, tmp_path / 'run') == DONE
    source = load(tmp_path / 'run')
    assert source.recipe.model.pattern == recipe.model.pattern
    tokens = tiny_batch(rows=2)['tokens'][:, :-1]
    logits = source.logits(tokens)
    folded = fold_checkpoint(source, 'none')
    metadata = source.tokenizer, source.step, source.meta
    write_workdir(tmp_path / 'folded', folded.recipe, folded.weights, *metadata)
    again = load(tmp_path / 'folded')
    assert again.recipe.model.reparam == 'none' and again.recipe.is_mixed
    np.testing.assert_allclose(again.logits(tokens), logits, rtol=1e-4, atol=1e-5)
    engine, row = Engine(source, slots=2), tuple(map(int, tokens[0]))
    slot, added = engine.admit(Request(row, 3, Sampling(temperature=0))), []
    while engine.n_free < 2:
        added += engine.step()[slot].tokens
    text = [*row]
    for token in added:
        log_p = np.asarray(source.logits(np.array([text]))[0, -1])
        assert token.id == int(log_p.argmax())
        text.append(token.id)
    started = cell_config(tree, changes | once | {'train.init_from': str(tmp_path / 'folded')}
                          | {'model.reparam': 'none'})  # fmt: skip
    assert train(started, tmp_path / 'tuned') == DONE
