"""Equivalence: what a run starts from with train.init_from, and resumes. Property: which parameters
fine-tuning changes, and in which order norms are removed. Contract: what is refused.
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
    cell_folders,
    changed,
    silent_experiment,
    terminate_at,
    timeless,
    write_corpus,
)
from train import DONE, train, train_sweep

QUIET = {'train_eval_every': 0, 'train_checkpoint_every': 0}


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    """The config of a tiny layernorm model with a qk_norm, as nested dicts."""
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    kinds = {'model_norm': 'layernorm', 'model_qk_norm': 'rmsnorm'}
    return base(corpus, optim_schedule='constant', **QUIET, **kinds)


@pytest.fixture(scope='module')
def source(tree, tmp_path_factory):
    """A workdir to start from: 8 steps. Not to be written to."""
    workdir = tmp_path_factory.mktemp('source') / 'run'
    assert train(changed(tree, {}), workdir) == DONE
    return workdir


@pytest.fixture
def tuned(tree, source):
    """changes -> the config of a fine-tuning run."""
    return lambda changes: changed(tree, {'train.init_from': str(source)} | changes)


REMOVAL = {'model.norm': 'layernorm_removal', 'norm.removal_start': 2, 'train.steps': 12}


@pytest.fixture(scope='module')
def removed(tree, source, tmp_path_factory):
    """The workdir of 12 steps from `source`, the first norms removed. Not to be written to."""
    workdir = tmp_path_factory.mktemp('removed') / 'run'
    assert train(changed(tree, {'train.init_from': str(source)} | REMOVAL), workdir) == DONE
    return workdir


def assert_same(actual, wanted):
    actual, wanted = named_leaves(actual), named_leaves(wanted)
    assert actual.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


@pytest.fixture
def followed(tmp_path):
    """(changes of the default config, of the checkpoint's, paths given) -> `merge_source_model`."""

    def of(changes, there, given=()):
        write_config(tmp_path, changed(to_dict(build_config(default.get_config())), there))
        (tmp_path / 'checkpoints' / '4').mkdir(parents=True, exist_ok=True)
        raw = default.get_config()
        raw.update_from_flattened_dict({'train.init_from': str(tmp_path)} | changes)
        return merge_source_model(raw.to_dict(), given)

    return of


def test_a_config_without_init_from_stays_as_it_is(followed):
    raw = default.get_config().to_dict()
    assert merge_source_model(raw, ()) == (raw, {})
    changes = {'train.init_from': '', 'model.d_model': 64}
    assert followed(changes, {'model.d_model': 32})[1] == {}


OF_SOURCE = {'model.d_model': 32, 'model.norm': 'layernorm', 'attention.window': 8}


def test_the_model_is_that_of_the_checkpoint_unless_given(followed):
    """The norm may be another one, and what follows from a norm then follows from that."""
    there = OF_SOURCE | {'data.seq_len': 64, 'optim.lr': 1.0}
    assert followed({}, there)[1] == OF_SOURCE | {'data.seq_len': 64}
    norm = {'model.norm': 'layernorm_removal'}
    raw, found = followed(norm, there, [*norm])
    recipe = resolve(raw)
    assert 'model.norm' not in found and recipe.model.final_norm == 'layernorm_removal'
    assert recipe.model.d_model == 32 and recipe.optim.lr != 1.0
    assert 'model.d_model' not in followed({}, OF_SOURCE, ['model.d_model'])[1]


def test_an_option_that_a_given_part_does_not_read_stays_behind(followed):
    """Options of parts, and the size of a base model."""
    there = {'model.mlp': 'moe', 'mlp.n_experts': 3, 'scaling.name': 'mup'}
    there |= {'scaling.base_width': 128}
    assert followed({}, there)[1] == there
    assert followed({'model.mlp': 'dense'}, there, ['model.mlp', 'scaling.name'])[1] == {}


def test_a_sweep_is_kept(followed):
    axes = {'optim.lr': (0.1, 0.2)}
    raw, _ = followed({'sweep': axes}, OF_SOURCE)
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
def test_the_tokenizer_is_the_one_of_the_checkpoint(tokenizer, source, is_saved, followed):
    there = {'data.tokenizer': tokenizer, 'data.source': 'synthetic:markov'}
    raw, _ = followed({'data.source': source}, there)
    saved = f'hf:{raw["train"]["init_from"]}/tokenizer'
    assert raw['data']['tokenizer'] == (saved if is_saved else tokenizer)
    given = {'data.source': source, 'data.tokenizer': 'bpe:400'}
    assert followed(given, there, ['data.tokenizer'])[0]['data']['tokenizer'] == 'bpe:400'


class TestAfterTheSourceIsGone:
    """A run that has checkpoints of its own goes on; catches one that asks for the other's."""

    @pytest.fixture
    def source(self, tmp_path):
        """A workdir with a trained tokenizer, as far as a start looks into it."""
        there = OF_SOURCE | {'data.tokenizer': 'bpe:300', 'data.source': 'synthetic:copy'}
        workdir = tmp_path / 'source'
        (workdir / 'checkpoints' / '4').mkdir(parents=True)
        write_config(workdir, changed(to_dict(build_config(default.get_config())), there))
        tokenizer_plan('bpe:300').build(['some text'] * 9).save(workdir / 'tokenizer')
        return workdir

    @pytest.fixture
    def raw(self, source, tmp_path):
        corpus, raw = write_corpus(tmp_path), default.get_config()
        more = {'train.init_from': str(source), 'data.epochs': 1000}
        raw.update_from_flattened_dict(corpus | more)
        return raw.to_dict()

    @pytest.fixture
    def begun(self, source, raw, tmp_path):
        """(the workdir of a run that began from `source` and has saved, its recipe)."""
        recipe = resolve(merge_source_model(raw, ())[0])
        assert recipe.data.tokenizer == f'hf:{source}/tokenizer'
        workdir = tmp_path / 'run'
        (workdir / 'checkpoints' / '4').mkdir(parents=True)
        write_config(workdir, recipe)
        load_tokenizer(source / 'tokenizer').save(workdir / 'tokenizer')
        return workdir, recipe

    def test_the_model_and_the_text_are_those_of_the_run(self, begun, source, raw):
        workdir, recipe = begun
        digest = open_text(recipe, discard_line, workdir).digest
        source.rename(source.with_name('elsewhere'))
        config, followed = merge_source_model(raw, (), workdir)
        assert differences(resolve(config), recipe) == {} and OF_SOURCE.items() <= followed.items()
        start.check_run(recipe, workdir)
        assert open_text(recipe, discard_line, workdir).digest == digest
        assert 'model.d_model' not in merge_source_model(raw, ['model.d_model'], workdir)[1]

    def test_a_run_without_a_checkpoint_needs_it(self, begun, source, raw):
        workdir, recipe = begun
        source.rename(source.with_name('elsewhere'))
        (workdir / 'checkpoints' / '4').rmdir()
        for there in (workdir, None):
            with pytest.raises(ValueError, match=r'source holds no checkpoint.* by --workdir'):
                merge_source_model(raw, (), there)
        with pytest.raises(ValueError, match=r'not a file'):
            start.check_run(recipe, workdir)
        byte = changed(to_dict(recipe.config), {'data.tokenizer': 'byte'})
        with pytest.raises(ValueError, match=r'source holds no checkpoint'):
            start.check_run(byte, workdir)

    def test_so_does_a_run_that_began_from_another(self, begun, source, raw):
        workdir, _ = begun
        source.rename(source.with_name('elsewhere'))
        raw['train']['init_from'] = str(source.with_name('another'))
        with pytest.raises(ValueError, match=r'another holds no checkpoint'):
            merge_source_model(raw, (), workdir)


@pytest.mark.full
def test_a_run_goes_on_after_its_source_has_moved(tree, tmp_path, capsys):
    """With the tokenizer that it has from there, to the numbers of one whose source stayed."""
    moved = tmp_path / 'source'
    assert train(changed(tree, {'data.tokenizer': 'bpe:300'}), moved) == DONE
    (tmp_path / 'text').mkdir()
    text = write_corpus(tmp_path / 'text')['data.source']
    raw = tree | {'train': tree['train'] | {'init_from': str(moved)}}
    raw['data'] = tree['data'] | {'source': text}

    def fine_tuned(workdir, **how):
        return train(resolve(merge_source_model(raw, (), workdir)[0]), workdir, **how)

    assert fine_tuned(tmp_path / 'whole') == DONE
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(5))
        assert fine_tuned(tmp_path / 'cut') != DONE
    moved.rename(tmp_path / 'elsewhere')
    capsys.readouterr()
    assert fine_tuned(tmp_path / 'cut') == DONE
    assert 'is gone, and not needed any more' in ' '.join(capsys.readouterr().out.split())
    assert timeless(tmp_path / 'cut') == timeless(tmp_path / 'whole')


@pytest.mark.full
def test_the_first_loss_is_that_of_the_checkpoint(source, tmp_path):
    """With no more than two fields, though model and text are others than in configs/default.py."""
    text = write_corpus(tmp_path)['data.source']
    raw = default.get_config()
    raw.update_from_flattened_dict({'train.init_from': str(source), 'data.source': text})
    raw.data.epochs = 1000  # of a text this small
    config = resolve(merge_source_model(raw.to_dict(), ())[0])
    experiment, batch, there = silent_experiment(config), packed_batch(), load(source)
    state = initial_state(config, experiment)
    _, metrics = jax.jit(make_train_step(experiment.learner))(state, batch, make_hyper(config))
    sums = jax.jit(make_eval_step(there.learner))(there.weights, batch, there.hyper)
    np.testing.assert_allclose(metrics['ce'], sums['ce'] / sums['tokens'], rtol=1e-6)


@pytest.mark.full
def test_starts_with_the_weights_at_step_0_and_an_optimizer_that_is_new(tuned, source):
    """The removal norms have the parameters of those they remove, and statistics of their own."""
    config = tuned({'model.norm': 'layernorm_removal'})
    state = initial_state(config, silent_experiment(config))
    assert_same(state.params, load(source).weights.params)
    assert int(state.step) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    assert {int(np.max(n)) for n in named_leaves(state.stats).values()} == {0, 1}


@pytest.mark.full
def test_weights_are_stored_as_the_present_reparam_has_them(tuned, source):
    """Catches the stored weights of the checkpoint taken for those its model used."""
    config = tuned({'model.reparam': 'weight_norm'})
    experiment = silent_experiment(config)
    state = initial_state(config, experiment)
    assert 'layers/mlp/up/gain' in named_leaves(state.params)
    used = experiment.learner.variables(state.weights)['params']
    helpers.assert_trees_close(used, load(source).weights.params, rtol=1e-6, atol=1e-7)


@pytest.mark.full
def test_a_second_launch_goes_on_with_its_own_checkpoint(tuned, removed, tmp_path, monkeypatch):
    """As a run of that length does at once; the checkpoint to start from is not read again."""
    assert train(tuned(REMOVAL | {'train.steps': 8}), tmp_path / 'cut') == DONE
    monkeypatch.setattr(start, 'load', lambda path: pytest.fail('started from init_from again'))
    assert train(tuned(REMOVAL), tmp_path / 'cut', continue_changed=True) == DONE
    whole, cut = load(removed), load(tmp_path / 'cut')
    assert_same(cut.weights, whole.weights)
    assert int(cut.weights.stats['stats']['final_norm']['updates']) == 12
    losses = [row['loss'] for row in read_rows(tmp_path / 'cut' / 'metrics.jsonl') if 'loss' in row]
    assert len(losses) == 12


@pytest.mark.full
def test_statistics_are_taken_over_where_they_fit(tuned, removed):
    """Fine-tuning that goes on in another workdir keeps what was removed."""
    config = tuned(REMOVAL | {'train.init_from': str(removed)})
    state = initial_state(config, silent_experiment(config))
    assert_same(state.stats, load(removed).weights.stats)
    assert int(state.stats['stats']['final_norm']['updates']) == 12


def test_a_path_without_checkpoint_is_refused_before_anything_is_made(tuned, tmp_path):
    with pytest.raises(ValueError, match=r'nowhere holds no checkpoint\. Give the workdir'):
        train(tuned({'train.init_from': str(tmp_path / 'nowhere')}), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_model_of_elsewhere_is_answered_with_a_config():
    with pytest.raises(ValueError, match=r'init_from=gpt2: nothing is downloaded: .*import-hf'):
        start.find_source('gpt2')


@pytest.mark.default_rows('changes3-extra    readout')
@pytest.mark.parametrize(
    'changes, match',
    [
        ({'data.tokenizer': 'bpe:300'}, r'another tokenizer: byte of .* this run has bpe:300'),
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
def test_a_checkpoint_that_does_not_fit_is_refused(changes, match, tuned):
    config = tuned(changes)
    with pytest.raises(ValueError, match=match) as caught:
        initial_state(config, silent_experiment(config))
    assert isinstance(caught.value, TreeMismatch) != ('data.tokenizer' in changes)


def test_a_bpe_is_known_again(tree, tmp_path):
    """It is trained once, then stored with the data and with the checkpoint."""
    tokenizer = silent_experiment(changed(tree, {'data.tokenizer': 'bpe:300'})).dataset.tokenizer
    tokenizer.save(tmp_path)
    assert read_tokenizer_files(load_tokenizer(tmp_path)) == read_tokenizer_files(tokenizer)


def test_tokenizers_with_other_ids_for_bos_and_eos_differ():
    swapped = bpe(bos_id=299, eos_id=298), bpe(bos_id=298, eos_id=299)
    assert read_tokenizer_files(swapped[0]) != read_tokenizer_files(swapped[1])
    assert read_tokenizer_files(ByteTokenizer()) == read_tokenizer_files(ByteTokenizer())


def bpe(**ids):
    return SubwordTokenizer(library.Tokenizer(library.models.BPE()), 300, cuttable=True, **ids)


def assert_norms_alone_changed(after, before, specs):
    """Bitwise; and all norms did, those of queries and keys too."""
    after, before = named_leaves(after), named_leaves(before)
    for path, spec in named_leaves(specs).items():
        if spec.part == NORM:
            assert np.all(np.asarray(after[path]) != np.asarray(before[path])), path
        else:
            np.testing.assert_array_equal(after[path], before[path], err_msg=path)


def made(config):
    """(learner, step, state at step 0) on one device."""
    learner = build_learner(config, VOCAB, BOS, 'cpu')
    step = jax.jit(make_train_step(learner))
    hyper, key = make_hyper(config), jax.random.key(0)
    init = jax.jit(lambda: init_state(learner, hyper, key))
    return learner, step, jax.device_get(init())


ONLY_NORMS = {'train.trainable': 'norms', 'optim.weight_decay': 0.5}


@pytest.mark.full
def test_norms_alone_are_trained():
    """Though weight decay is on; a reparametrisation's gains are no norm's."""
    kinds = {'model.norm': 'layernorm', 'model.qk_norm': 'rmsnorm', 'model.reparam': 'weight_norm'}
    config = tiny_config(ONLY_NORMS | kinds)
    learner, step, before = made(config)
    after, _ = step(before, packed_batch(), make_hyper(config))
    assert_norms_alone_changed(after.params, before.params, learner.description.specs)


@pytest.mark.full
def test_norms_alone_are_trained_by_every_cell_of_a_sweep(tuned, source, tmp_path):
    config = tuned(ONLY_NORMS | {'train.steps': 2})
    rates = {'optim.lr': (0.003, 0.03)}
    assert train_sweep(to_dict(config), rates, tmp_path / 'sweep') == DONE
    before, folders = load(source), cell_folders(tmp_path / 'sweep').values()
    specs = before.learner.description.specs
    found = [load(folder).weights.params for folder in folders]
    for params in found:
        assert_norms_alone_changed(params, before.weights.params, specs)
    gains = [params['final_norm']['scale'] for params in found]
    assert np.all(np.asarray(gains[0]) != np.asarray(gains[1]))


# Configs whose fields go together, and whose model cannot be built: (changes, start of the error).
NOT_BUILT = {
    'order': (
        {'model.reparam': 'normalize_and_project+shared'},
        r'model.reparam=normalize_and_project\+shared: .* must be the last',
    ),
    'tied readout': (
        {'model.reparam': 'weight_norm', 'reparam.roles': 'readout', 'model.tie_embeddings': True},
        'reparam.roles=readout: no parameter has the role',
    ),
    'one row': (
        {'model.reparam': 'weight_standardization', 'model.d_ff': 1},
        'model.reparam=weight_standardization needs matrices of two rows',
    ),
    'no lora': ({'train.trainable': 'lora'}, 'train.trainable=lora leaves nothing to train'),
    'no norms': (
        {'train.trainable': 'norms', 'model.norm': 'none', 'model.qk_norm': 'none'},
        'train.trainable=norms leaves nothing to train.*no parameters',
    ),
    'too large': (
        {'optim.name': 'cge', 'model.d_model': 128, 'model.d_ff': 512},
        'optim.name=cge is for at most 100,000 parameters',
    ),
    'forward mode': ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius differentiates the logits'),
    'no rule': (
        {'scaling.name': 'mup', 'scaling.base_width': 8, 'optim.name': 'muon'}
        | {'model.reparam': 'lora', 'model.n_kv_heads': 2},
        'scaling.name=mup has no rule for the factors',
    ),
    'platform': ({'kernels.attention': 'splash'}, 'kernels.attention=splash runs on tpu alone'),
}


@pytest.mark.parametrize('changes, said', NOT_BUILT.values(), ids=NOT_BUILT)
def test_a_model_that_cannot_be_built_is_refused_before_its_folder_is_made(
    tree, tmp_path, changes, said
):
    """Catches a refusal that comes after the text has been prepared, which can take an hour."""
    with pytest.raises(ValueError, match=f'^{said}'):
        train(changed(tree, {'kernels.attention': 'auto'} | changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_cell_that_cannot_be_built_is_refused_before_the_first_one_trains(tree, tmp_path):
    said = r"^sweep cell \{'optim.name': 'cge'.*\}: optim.name=cge is for at most"
    size = {'model.d_model': (128,), 'model.d_ff': (512,)}
    with pytest.raises(ValueError, match=said):
        train_sweep(tree, {'optim.name': ('adamw', 'cge')} | size, tmp_path / 'sweep')
    assert not (tmp_path / 'sweep').exists()


@pytest.mark.full
def test_norms_are_removed_in_their_order():
    """MLPs from the first layer on, then attention, then the final norm, one every removal_gap
    updates: the deviation of a removed norm stays, those of the others move.
    """
    gap = {'norm.removal_start': 2, 'norm.removal_gap': 2}
    config = tiny_config({'model.norm': 'layernorm_removal'} | gap)
    _, step, state = made(config)
    held = []
    for seed in range(14):
        before = state.stats
        state, _ = step(state, packed_batch(seed), make_hyper(config))
        held.append(held_deviations(before, jax.device_get(state.stats)))
    order = ['mlp 0', 'mlp 1', 'attention 0', 'attention 1', 'final']
    assert BOS == 0 and held == [set(order[: max(0, i // 2)]) for i in range(14)]


def held_deviations(before, after):
    names = {'layers/attention_norm_in': 'attention', 'layers/mlp_norm_in': 'mlp'}
    before, after = (named_leaves(stats['stats']) for stats in (before, after))
    held = set()
    for path, name in names.items():
        pair = before[f'{path}/deviation'], after[f'{path}/deviation']
        held |= {f'{name} {i}' for i, (a, b) in enumerate(zip(*pair, strict=True)) if a == b}
    same = before['final_norm/deviation'] == after['final_norm/deviation']
    return held | ({'final'} if same else set())
