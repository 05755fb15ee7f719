"""The state a run starts from (train.init_from), and fine-tuning.

Equivalence: the start equals the source's model, and resuming changes nothing. Property:
fine-tuning changes only its parameters, and norms are removed in order. Contract: invalid starts
are refused.
"""

import jax
import numpy as np
import pytest
import tokenizers as library

from configs import default
from lm.config.resolve import build_config, differences, resolve, to_dict
from lm.data.tokenizers import ByteTokenizer, SubwordTokenizer
from lm.data.tokenizers import load as load_tokenizer
from lm.data.tokenizers import plan_tokenizer as tokenizer_plan
from lm.inference.load import load
from lm.record.checkpoint import TreeMismatch
from lm.record.metrics import read_rows
from lm.record.workdir import write_config
from lm.run import start
from lm.run.program import open_text
from lm.run.start import initial_state, merge_source_model, read_tokenizer_files
from lm.storage.files import discard_line
from lm.training.state import build_learner, init_state, make_hyper
from lm.training.step import make_eval_step, make_train_step
from modules.params import NORM, named_leaves
from tests import helpers
from tests.helpers import BOS, VOCAB, packed_batch, tiny_config
from tests.sweep_helpers import (
    base,
    before_step,
    cell_config,
    cell_folders,
    silent_experiment,
    terminate_at,
    timeless,
    write_corpus,
)
from train import DONE, train, train_sweep

QUIET = {'train_eval_every': 0, 'train_checkpoint_every': 0}


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """Returns the config of a tiny layernorm model with a qk_norm, as nested dicts."""
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    kinds = {'model_norm': 'layernorm', 'model_qk_norm': 'rmsnorm'}
    return base(corpus, optim_schedule='constant', **QUIET, **kinds)


@pytest.fixture(scope='module')
def source(tree, tmp_path_factory):
    """Returns a workdir to start from, of 8 steps; read only."""
    workdir = tmp_path_factory.mktemp('source') / 'run'
    assert train(cell_config(tree, {}), workdir) == DONE
    return workdir


@pytest.fixture
def make_config(tree, source):
    """Returns make_config(changes) -> the config of a fine-tuning run."""
    return lambda changes: cell_config(tree, {'train.init_from': str(source)} | changes)


REMOVAL = {'model.norm': 'layernorm_removal', 'norm.removal_start': 2, 'train.steps': 12}


@pytest.fixture(scope='module')
def removal_run(tree, source, tmp_path_factory):
    """Returns the workdir of 12 steps from `source`, with the first norms removed; read only."""
    workdir = tmp_path_factory.mktemp('removed') / 'run'
    assert train(cell_config(tree, {'train.init_from': str(source)} | REMOVAL), workdir) == DONE
    return workdir


def assert_same(actual, expected):
    actual, expected = named_leaves(actual), named_leaves(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


@pytest.fixture
def merge_source(tmp_path):
    """Returns merge_source(changes, source_changes, explicit_paths), by `merge_source_model`.

    changes: to the default config. source_changes: to the checkpoint's config.
    """

    def merge(changes, source_changes, explicit_paths=()):
        write_config(
            tmp_path, cell_config(to_dict(build_config(default.get_config())), source_changes)
        )
        (tmp_path / 'checkpoints' / '4').mkdir(parents=True, exist_ok=True)
        raw = default.get_config()
        raw.update_from_flattened_dict({'train.init_from': str(tmp_path)} | changes)
        return merge_source_model(raw.to_dict(), explicit_paths)

    return merge


def test_config_without_init_from_is_unchanged(merge_source):
    raw = default.get_config().to_dict()
    assert merge_source_model(raw, ()) == (raw, {})
    changes = {'train.init_from': '', 'model.d_model': 64}
    assert merge_source(changes, {'model.d_model': 32})[1] == {}


SOURCE_CHANGES = {'model.d_model': 32, 'model.norm': 'layernorm', 'attention.window': 8}


def test_checkpoint_model_is_copied(merge_source):
    """The norm may differ, and fields that depend on the norm then follow the new one."""
    source_changes = SOURCE_CHANGES | {'data.seq_len': 64, 'optim.lr': 1.0}
    assert merge_source({}, source_changes)[1] == SOURCE_CHANGES | {'data.seq_len': 64}
    norm = {'model.norm': 'layernorm_removal'}
    raw, copied = merge_source(norm, source_changes, [*norm])
    recipe = resolve(raw)
    assert 'model.norm' not in copied and recipe.model.final_norm == 'layernorm_removal'
    assert recipe.model.d_model == 32 and recipe.optim.lr != 1.0
    assert 'model.d_model' not in merge_source({}, SOURCE_CHANGES, ['model.d_model'])[1]


def test_unread_options_are_not_copied(merge_source):
    """Options of parts, and the size of a base model."""
    source_changes = {'model.mlp': 'moe', 'mlp.n_experts': 3, 'scaling.name': 'mup'}
    source_changes |= {'scaling.base_width': 128}
    assert merge_source({}, source_changes)[1] == source_changes
    assert (
        merge_source({'model.mlp': 'dense'}, source_changes, ['model.mlp', 'scaling.name'])[1] == {}
    )


def test_merge_source_keeps_sweep(merge_source):
    axes = {'optim.lr': (0.1, 0.2)}
    raw, _ = merge_source({'sweep': axes}, SOURCE_CHANGES)
    assert raw['sweep'] == axes and raw['model']['d_model'] == 32


@pytest.mark.parametrize(
    ('tokenizer', 'source', 'is_saved'),
    [
        ('byte', 'text:other', False),
        ('bpe:300', 'synthetic:markov', False),
        ('bpe:300', 'text:other', True),
        ('hf:gone', 'synthetic:markov', True),
    ],
)
def test_checkpoint_tokenizer_is_used(tokenizer, source, is_saved, merge_source):
    source_changes = {'data.tokenizer': tokenizer, 'data.source': 'synthetic:markov'}
    raw, _ = merge_source({'data.source': source}, source_changes)
    saved = f'hf:{raw["train"]["init_from"]}/tokenizer'
    assert raw['data']['tokenizer'] == (saved if is_saved else tokenizer)
    changes = {'data.source': source, 'data.tokenizer': 'bpe:400'}
    assert (
        merge_source(changes, source_changes, ['data.tokenizer'])[0]['data']['tokenizer']
        == 'bpe:400'
    )


class TestMissingSource:
    """A run with checkpoints of its own resumes. Catches a run that asks for the source's."""

    @pytest.fixture
    def source(self, tmp_path):
        """Returns a workdir with a trained tokenizer and all other files that a start reads."""
        changes = SOURCE_CHANGES | {'data.tokenizer': 'bpe:300', 'data.source': 'synthetic:copy'}
        workdir = tmp_path / 'source'
        (workdir / 'checkpoints' / '4').mkdir(parents=True)
        write_config(workdir, cell_config(to_dict(build_config(default.get_config())), changes))
        tokenizer_plan('bpe:300').build(['some text'] * 9).save(workdir / 'tokenizer')
        return workdir

    @pytest.fixture
    def raw(self, source, tmp_path):
        corpus, raw = write_corpus(tmp_path), default.get_config()
        changes = {'train.init_from': str(source), 'data.epochs': 1000}
        raw.update_from_flattened_dict(corpus | changes)
        return raw.to_dict()

    @pytest.fixture
    def begun_run(self, source, raw, tmp_path):
        """Returns (workdir, recipe) of a run that began from `source` and has a checkpoint."""
        recipe = resolve(merge_source_model(raw, ())[0])
        assert recipe.data.tokenizer == f'hf:{source}/tokenizer'
        workdir = tmp_path / 'run'
        (workdir / 'checkpoints' / '4').mkdir(parents=True)
        write_config(workdir, recipe)
        load_tokenizer(source / 'tokenizer').save(workdir / 'tokenizer')
        return workdir, recipe

    def test_run_keeps_its_model_and_text(self, begun_run, source, raw):
        workdir, recipe = begun_run
        digest = open_text(recipe, discard_line, workdir).digest
        source.rename(source.with_name('elsewhere'))
        config, merge_source = merge_source_model(raw, (), workdir)
        assert (
            differences(resolve(config), recipe) == {}
            and SOURCE_CHANGES.items() <= merge_source.items()
        )
        start.check_run(recipe, workdir)
        assert open_text(recipe, discard_line, workdir).digest == digest
        assert 'model.d_model' not in merge_source_model(raw, ['model.d_model'], workdir)[1]

    def test_run_without_checkpoint_needs_source(self, begun_run, source, raw):
        workdir, recipe = begun_run
        source.rename(source.with_name('elsewhere'))
        (workdir / 'checkpoints' / '4').rmdir()
        for run_workdir in (workdir, None):
            with pytest.raises(ValueError, match=r'no checkpoint.*--workdir'):
                merge_source_model(raw, (), run_workdir)
        with pytest.raises(ValueError, match=r'not a file'):
            start.check_run(recipe, workdir)
        byte = cell_config(to_dict(recipe.config), {'data.tokenizer': 'byte'})
        with pytest.raises(ValueError, match=r'source has no checkpoint'):
            start.check_run(byte, workdir)

    def test_run_from_other_source_needs_source(self, begun_run, source, raw):
        workdir, _ = begun_run
        source.rename(source.with_name('elsewhere'))
        raw['train']['init_from'] = str(source.with_name('another'))
        with pytest.raises(ValueError, match=r'another has no checkpoint'):
            merge_source_model(raw, (), workdir)


@pytest.mark.full
def test_run_resumes_after_source_has_moved(tree, tmp_path, capsys):
    """Its own copy of the tokenizer gives the same numbers as a run with the source in place."""
    source = tmp_path / 'source'
    assert train(cell_config(tree, {'data.tokenizer': 'bpe:300'}), source) == DONE
    (tmp_path / 'text').mkdir()
    text = write_corpus(tmp_path / 'text')['data.source']
    raw = tree | {'train': tree['train'] | {'init_from': str(source)}}
    raw['data'] = tree['data'] | {'source': text}

    def fine_tune(workdir, **options):
        return train(resolve(merge_source_model(raw, (), workdir)[0]), workdir, **options)

    assert fine_tune(tmp_path / 'whole') == DONE
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(5))
        assert fine_tune(tmp_path / 'cut') != DONE
    source.rename(tmp_path / 'elsewhere')
    capsys.readouterr()
    assert fine_tune(tmp_path / 'cut') == DONE
    assert 'no longer exists, and is no longer needed' in ' '.join(capsys.readouterr().out.split())
    assert timeless(tmp_path / 'cut') == timeless(tmp_path / 'whole')


@pytest.mark.full
def test_first_loss_equals_checkpoint(source, tmp_path):
    """Two fields are enough, though model and text differ from configs/default.py."""
    text = write_corpus(tmp_path)['data.source']
    raw = default.get_config()
    raw.update_from_flattened_dict({'train.init_from': str(source), 'data.source': text})
    raw.data.epochs = 1000  # of a text this small
    config = resolve(merge_source_model(raw.to_dict(), ())[0])
    experiment, batch, checkpoint = silent_experiment(config), packed_batch(), load(source)
    state = initial_state(config, experiment)
    _, metrics = jax.jit(make_train_step(experiment.learner))(state, batch, make_hyper(config))
    sums = jax.jit(make_eval_step(checkpoint.learner))(checkpoint.weights, batch, checkpoint.hyper)
    np.testing.assert_allclose(metrics['ce'], sums['ce'] / sums['tokens'], rtol=1e-6)


@pytest.mark.full
def test_weights_are_copied_and_optimizer_is_new(make_config, source):
    """The removal norms have the parameters of the norms they remove, and new statistics."""
    config = make_config({'model.norm': 'layernorm_removal'})
    state = initial_state(config, silent_experiment(config))
    assert_same(state.params, load(source).weights.params)
    assert int(state.step) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    assert {int(np.max(n)) for n in named_leaves(state.stats).values()} == {0, 1}


@pytest.mark.full
def test_weights_are_stored_by_present_reparam(make_config, source):
    """Catches the checkpoint's stored weights taken for the weights that its model used."""
    config = make_config({'model.reparam': 'weight_norm'})
    experiment = silent_experiment(config)
    state = initial_state(config, experiment)
    assert 'layers/mlp/up/gain' in named_leaves(state.params)
    used = experiment.learner.variables(state.weights)['params']
    helpers.assert_trees_close(used, load(source).weights.params, rtol=1e-6, atol=1e-7)


@pytest.mark.full
def test_second_launch_resumes_its_own_checkpoint(make_config, removal_run, tmp_path, monkeypatch):
    """The resumed run equals an uninterrupted run, and does not read the source again."""
    assert train(make_config(REMOVAL | {'train.steps': 8}), tmp_path / 'cut') == DONE
    monkeypatch.setattr(start, 'load', lambda path: pytest.fail('started from init_from again'))
    assert train(make_config(REMOVAL), tmp_path / 'cut', continue_changed=True) == DONE
    whole, cut = load(removal_run), load(tmp_path / 'cut')
    assert_same(cut.weights, whole.weights)
    assert int(cut.weights.stats['stats']['final_norm']['updates']) == 12
    losses = [row['loss'] for row in read_rows(tmp_path / 'cut' / 'metrics.jsonl') if 'loss' in row]
    assert len(losses) == 12


@pytest.mark.full
def test_fitting_statistics_are_copied(make_config, removal_run):
    """Fine-tuning that resumes in another workdir keeps the norms removed."""
    config = make_config(REMOVAL | {'train.init_from': str(removal_run)})
    state = initial_state(config, silent_experiment(config))
    assert_same(state.stats, load(removal_run).weights.stats)
    assert int(state.stats['stats']['final_norm']['updates']) == 12


@pytest.mark.full
def test_path_without_checkpoint_is_refused_at_once(make_config, tmp_path):
    with pytest.raises(ValueError, match=r'nowhere has no checkpoint\. Give the workdir'):
        train(make_config({'train.init_from': str(tmp_path / 'nowhere')}), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', ['gpt2', 'meta-llama/Llama-3.2-1B'])
def test_hub_model_is_refused_with_advice(name):
    with pytest.raises(
        ValueError, match=rf'init_from={name}: runs do not download models.*import-hf'
    ):
        start.find_source(name)


@pytest.mark.default_rows('changes3-extra    readout')
@pytest.mark.parametrize(
    'changes, match',
    [
        ({'data.tokenizer': 'bpe:300'}, r'another tokenizer: byte on .* This run uses bpe:300'),
        (
            {'model.d_ff': 64, 'optim.name': 'sgd'},
            r'(?s)^the model differs in \(there -> here\):\n  model\.d_ff: 32 -> 64\ncheckpoint .*'
            r'differs  layers/mlp/up: checkpoint float32\[2,16,32\], model',
        ),
        (
            {'model.norm': 'rmsnorm'},
            r"(?s)norm: 'layernorm' -> 'rmsnorm'.*extra    final_norm/bias",
        ),
        ({'model.tie_embeddings': True}, r'extra    readout'),
    ],
)
def test_mismatched_checkpoint_is_refused(changes, match, make_config):
    config = make_config(changes)
    with pytest.raises(ValueError, match=match) as caught:
        initial_state(config, silent_experiment(config))
    assert isinstance(caught.value, TreeMismatch) != ('data.tokenizer' in changes)


def test_saved_bpe_is_equal(tree, tmp_path):
    """The tokenizer is trained once, then stored with the data and with the checkpoint."""
    tokenizer = silent_experiment(
        cell_config(tree, {'data.tokenizer': 'bpe:300'})
    ).dataset.tokenizer
    tokenizer.save(tmp_path)
    assert read_tokenizer_files(load_tokenizer(tmp_path)) == read_tokenizer_files(tokenizer)


def test_tokenizers_with_other_ids_for_bos_and_eos_differ():
    swapped = bpe(bos_id=299, eos_id=298), bpe(bos_id=298, eos_id=299)
    assert read_tokenizer_files(swapped[0]) != read_tokenizer_files(swapped[1])
    assert read_tokenizer_files(ByteTokenizer()) == read_tokenizer_files(ByteTokenizer())


def bpe(**ids):
    return SubwordTokenizer(library.Tokenizer(library.models.BPE()), 300, cuttable=True, **ids)


def assert_norms_alone_changed(after, before, specs):
    """Compares bitwise; all norms must have changed, including query and key norms."""
    after, before = named_leaves(after), named_leaves(before)
    for path, spec in named_leaves(specs).items():
        if spec.part == NORM:
            assert np.all(np.asarray(after[path]) != np.asarray(before[path])), path
        else:
            np.testing.assert_array_equal(after[path], before[path], err_msg=path)


def make_step(config):
    """Returns (learner, step, state at step 0) on one device."""
    learner = build_learner(config, VOCAB, BOS, 'cpu')
    step = jax.jit(make_train_step(learner))
    hyper, key = make_hyper(config), jax.random.key(0)
    init = jax.jit(lambda: init_state(learner, hyper, key))
    return learner, step, jax.device_get(init())


ONLY_NORMS = {'train.trainable': 'norms', 'optim.weight_decay': 0.5}


@pytest.mark.full
def test_norms_alone_are_trained():
    """This holds with weight decay; the gains of a reparametrisation are no norms."""
    kinds = {'model.norm': 'layernorm', 'model.qk_norm': 'rmsnorm', 'model.reparam': 'weight_norm'}
    config = tiny_config(ONLY_NORMS | kinds)
    learner, step, before = make_step(config)
    after, _ = step(before, packed_batch(), make_hyper(config))
    assert_norms_alone_changed(after.params, before.params, learner.description.specs)


@pytest.mark.full
def test_norms_alone_are_trained_by_every_cell(make_config, source, tmp_path):
    config = make_config(ONLY_NORMS | {'train.steps': 2})
    rates = {'optim.lr': (0.003, 0.03)}
    assert train_sweep(to_dict(config), rates, tmp_path / 'sweep') == DONE
    before, folders = load(source), cell_folders(tmp_path / 'sweep').values()
    specs = before.learner.description.specs
    cell_params = [load(folder).weights.params for folder in folders]
    for params in cell_params:
        assert_norms_alone_changed(params, before.weights.params, specs)
    gains = [params['final_norm']['scale'] for params in cell_params]
    assert np.all(np.asarray(gains[0]) != np.asarray(gains[1]))


# Configs whose fields go together, and whose model cannot be built: (changes, start of the error).
NOT_BUILT = {
    'order': (
        {'model.reparam': 'normalize_and_project+shared'},
        r'model.reparam=normalize_and_project\+shared: .* must come last',
    ),
    'tied readout': (
        {'model.reparam': 'weight_norm', 'reparam.roles': 'readout', 'model.tie_embeddings': True},
        'reparam.roles=readout: no parameter has the role',
    ),
    'one row': (
        {'model.reparam': 'weight_standardization', 'model.d_ff': 1},
        'model.reparam=weight_standardization needs matrices with at least two',
    ),
    'no lora': ({'train.trainable': 'lora'}, 'train.trainable=lora leaves nothing to train'),
    'no norms': (
        {'train.trainable': 'norms', 'model.norm': 'none', 'model.qk_norm': 'none'},
        'train.trainable=norms leaves nothing to train.*no parameters',
    ),
    'too large': (
        {'optim.name': 'cge', 'model.d_model': 128, 'model.d_ff': 512},
        'optim.name=cge supports at most 100,000 parameters',
    ),
    'forward mode': ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius needs a forward-mode'),
    'no rule': (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'optim.name': 'muon'}
        | {'model.reparam': 'lora', 'model.n_kv_heads': 2},
        'scaling.name=mup has no rule for the factors',
    ),
    'platform': ({'kernels.attention': 'splash'}, 'kernels.attention=splash runs only on tpu'),
}


@pytest.mark.parametrize('changes, message', NOT_BUILT.values(), ids=NOT_BUILT)
def test_impossible_model_is_refused_before_folder(tree, tmp_path, changes, message):
    """Catches a refusal after the text has been prepared, which can take an hour."""
    with pytest.raises(ValueError, match=f'^{message}'):
        train(cell_config(tree, {'kernels.attention': 'auto'} | changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_impossible_cell_is_refused_before_training(tree, tmp_path):
    message = r"^sweep cell \{'optim.name': 'cge'.*\}: optim.name=cge supports at most"
    size = {'model.d_model': (128,), 'model.d_ff': (512,)}
    with pytest.raises(ValueError, match=message):
        train_sweep(tree, {'optim.name': ('adamw', 'cge')} | size, tmp_path / 'sweep')
    assert not (tmp_path / 'sweep').exists()


@pytest.mark.full
def test_norms_are_removed_in_order():
    """MLPs from the first layer on, then attention, then the final norm, one every removal_gap
    updates: the deviation of a removed norm is fixed, the others change.
    """
    gap = {'norm.removal_start': 2, 'norm.removal_gap': 2}
    config = tiny_config({'model.norm': 'layernorm_removal'} | gap)
    _, step, state = make_step(config)
    removed_norms = []
    for seed in range(14):
        before = state.stats
        state, _ = step(state, packed_batch(seed), make_hyper(config))
        removed_norms.append(list_fixed_norms(before, jax.device_get(state.stats)))
    order = ['mlp 0', 'mlp 1', 'attention 0', 'attention 1', 'final']
    assert BOS == 0 and removed_norms == [set(order[: max(0, i // 2)]) for i in range(14)]


def list_fixed_norms(before, after):
    """Returns the norms with the same deviation before and after a step."""
    names = {'layers/attention_norm_in': 'attention', 'layers/mlp_norm_in': 'mlp'}
    before, after = (named_leaves(stats['stats']) for stats in (before, after))
    fixed = set()
    for path, name in names.items():
        pair = before[f'{path}/deviation'], after[f'{path}/deviation']
        fixed |= {f'{name} {i}' for i, (a, b) in enumerate(zip(*pair, strict=True)) if a == b}
    is_final_fixed = before['final_norm/deviation'] == after['final_norm/deviation']
    return fixed | ({'final'} if is_final_fixed else set())
