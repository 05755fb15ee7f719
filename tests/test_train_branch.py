"""Branches (train.branch_from): the state that continues, allowed changes, and refusals.

Equivalence: a branch that changes nothing has the numbers of its parent, bit for bit, also after a
kill and without its parent. Its text, counters and rate follow from the parent's step.
"""

import json
import shutil
from pathlib import Path

import pytest

from configs import default
from eval.report.series import read_series
from eval.report.tables import describe_branches
from eval.runs import gather, overview
from lm.config.resolve import digest, resolve, to_dict
from lm.inference.load import load
from lm.record.checkpoint import list_steps, read_meta
from lm.record.checkpoints import Checkpoints
from lm.record.metrics import read_rows
from lm.record.remote.local_copy import fetch_records
from lm.record.remote.mirror import mirror_workdir
from lm.record.run import Run
from lm.record.workdir import write_config
from lm.run import branch, start
from lm.run.ancestry import (
    convert_batch_index,
    count_batches,
    reads_same_batches,
    restarts_text,
)
from lm.run.branch import check_stages
from lm.run.program import open_text
from lm.storage.files import discard_line, read_json
from lm.study.plan.branches import follow_parents
from lm.study.plan.cells import expand_sweep, group_by_program, split_sweep
from tests.commands import tiny
from tests.corpora import write_corpus
from tests.killed import KilledBeforeStep
from tests.sweep_helpers import base as sweep_base
from tests.sweep_helpers import before_step, cell_folders, timeless
from train import DONE, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')
TRUNK = {
    'optim_schedule': 'constant',
    'train_steps': 60,
    'train_checkpoint_every': 20,
    'train_eval_every': 20,
    'train_keep_last': 1,
    'train_keep_best': 0,
    'train_checkpoint_steps': 'every:10',
}
DECAY = {'optim.schedule': 'warmup_stable_decay', 'optim.decay_fraction': 0.25, 'train.steps': 40}


@pytest.fixture(scope='module')
def trunk(corpus, tmp_path_factory):
    """Returns the workdir of 60 steps at a constant rate; read only."""
    workdir = tmp_path_factory.mktemp('trunk') / 'trunk'
    assert train(tiny(corpus, **TRUNK), workdir) == DONE
    return workdir


def merge(source, changes=None, workdir=None):
    """Returns the raw config of the command that branches from `source`."""
    changes = {'train.branch_from': str(source)} | (changes or {})
    raw = default.get_config()
    raw.update_from_flattened_dict(changes)
    return start.merge_source_model(raw.to_dict(), changes, workdir)[0]


def make(source, changes=None, workdir=None):
    return resolve(merge(source, changes, workdir))


def rows_after(workdir, step):
    return [row for row in timeless(workdir) if row['step'] > step]


def losses(workdir) -> dict[int, float]:
    return {row['step']: row['loss'] for row in timeless(workdir) if 'loss' in row}


def array_digests(workdir, step):
    return read_meta(workdir / 'checkpoints', step)['digests']


def kill_at(step, recipe, workdir) -> None:
    """Trains until the run is to make that step; every checkpoint so far is complete."""

    def act(wave):
        if wave.slots[0].journal.step == step - 1:
            wave.slots[0].journal.checkpoints.wait()
            raise KilledBeforeStep

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, act)
        with pytest.raises(KilledBeforeStep):
            train(recipe, workdir)


def test_unchanged_branch_continues_as_its_parent(trunk, tmp_path, capsys):
    """Rows, and all arrays of the last checkpoint: optimizer state, text and counters continue."""
    assert train(make(f'{trunk}@30'), tmp_path) == DONE
    printed = ' '.join(capsys.readouterr().out.split())
    assert f'branch of {trunk} after step 30 and' in printed
    assert 'changed from the parent: nothing' in printed
    assert 'learning rate: 0.003 in step 30 -> 0.003 in step 31 text' in printed
    assert timeless(tmp_path) == rows_after(trunk, 30) and len(losses(tmp_path)) == 30
    assert list_steps(tmp_path / 'checkpoints') == [30, 40, 50, 60]
    assert array_digests(tmp_path, 60) == array_digests(trunk, 60)


@pytest.mark.parametrize('step', [36, *(pytest.param(n, marks=pytest.mark.full) for n in (31, 55))])
def test_killed_branch_resumes_without_its_parent(step, trunk, tmp_path, capsys):
    """At step 31 it has only its state of step 30. The parent is gone before it resumes."""
    parent = Path(shutil.copytree(trunk, tmp_path / 'parent'))
    workdir = tmp_path / 'branch'
    kill_at(step, make(f'{parent}@30', {}, workdir), workdir)
    shutil.rmtree(parent)
    assert train(make(f'{parent}@30', {}, workdir), workdir) == DONE
    assert 'no longer exists, and is no longer needed' in ' '.join(capsys.readouterr().out.split())
    assert rows_after(workdir, 30) == rows_after(trunk, 30)
    assert array_digests(workdir, 60) == array_digests(trunk, 60)
    (ancestor,) = read_json(workdir / 'summary.json')['ancestors']
    assert (ancestor['workdir'], ancestor['step']) == (str(parent), 30)


@pytest.mark.full
def test_branch_killed_before_its_first_checkpoint_begins_again(trunk, tmp_path, monkeypatch):
    """It has config.json and branch.json, and no row."""

    def save(*_):
        raise KilledBeforeStep

    with monkeypatch.context() as patch, pytest.raises(KilledBeforeStep):
        patch.setattr(Checkpoints, 'save', save)
        train(make(f'{trunk}@30', DECAY, tmp_path), tmp_path)
    assert Run(tmp_path).has_begun and not timeless(tmp_path)
    assert train(make(f'{trunk}@30', DECAY, tmp_path), tmp_path) == DONE
    assert min(losses(tmp_path)) == 31 and list_steps(tmp_path / 'checkpoints') == [30, 40]


@pytest.mark.full
def test_parent_that_trained_on_does_not_change_a_branch(trunk, tmp_path):
    """Fields that follow the parent come from the branch's own config once it has begun."""
    parent = Path(shutil.copytree(trunk, tmp_path / 'parent'))
    workdir = tmp_path / 'branch'
    kill_at(36, make(f'{parent}@30', {'train.eval_every': 5}, workdir), workdir)
    config = json.loads((parent / 'config.json').read_text())
    config['train']['steps'] = 90
    config.pop('sha256')
    for path in parent.glob('checkpoints/*/meta/metadata'):
        path.write_text(json.dumps({'record': {'config': config}}))
    resumed = make(f'{parent}@30', {'train.eval_every': 5}, workdir)
    assert resumed.train.steps == 60 and train(resumed, workdir) == DONE
    assert losses(workdir)[60] == losses(trunk)[60]


@pytest.mark.full
def test_branch_anneals(trunk, tmp_path, capsys):
    """The loss of its first step is the parent's, as it precedes the first update by a new rate."""
    recipe = make(f'{trunk}@30', DECAY)
    assert recipe.model.d_model == 16 and recipe.train.eval_every == 20
    assert train(recipe, tmp_path) == DONE
    printed = ' '.join(capsys.readouterr().out.split())
    assert "optim.schedule 'constant' -> 'warmup_stable_decay'" in printed
    assert 'train.steps 60 -> 40' in printed and 'init_from' not in printed
    assert '0.003 in step 30 -> 0.0027 in step 31 (0.003 in the parent)' in printed
    branch_losses, trunk_losses = losses(tmp_path), losses(trunk)
    assert list(branch_losses) == list(range(31, 41)) and branch_losses[31] == trunk_losses[31]
    assert branch_losses[33] != trunk_losses[33]
    rates = [row['lr'] for row in timeless(tmp_path) if 'lr' in row]
    assert rates == pytest.approx([0.003 * (40 - step) / 10 for step in range(31, 41)], abs=1e-9)
    record = read_json(tmp_path / 'branch.json')
    assert record['rates'] == pytest.approx([0.003, 0.003, 0.0027])
    assert record['changes']['train.steps'] == [60, 40]
    (ancestor,) = record['ancestors']
    assert ancestor['config'] == digest(Run(trunk).read_recipe())
    tokens = {row['step']: row['tokens'] for row in timeless(trunk) if 'tokens' in row}
    assert ancestor['code']['sources'] and ancestor['tokens'] == tokens[30]
    assert timeless(tmp_path)[0]['tokens'] == tokens[31]


@pytest.mark.full
def test_second_branch_is_listed_and_drawn(trunk, tmp_path):
    """Its ancestors are both; its curve before is that of both, and its own begins at its step."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    assert train(make(f'{trunk}@20', {'train.steps': 30}), first) == DONE
    assert train(make(first, {'train.steps': 35, 'optim.lr': 1e-3}), second) == DONE
    steps = [ancestor['step'] for ancestor in read_json(second / 'summary.json')['ancestors']]
    assert steps == [20, 30]
    (record,) = gather(second)
    assert record['parent'] == f'{first}@30' and record['branch_step'] == 30
    assert json.loads(record['checkpoints']) == [30, 35]
    (row,) = overview([record])
    assert row['parent'] == 'first@30' and row['checkpoints'] == '30 35'
    series = read_series(record)
    assert series.training[0] == list(range(31, 36))
    before = dict(zip(*series.training_before, strict=True))
    assert before == {
        r['step']: r['ce']
        for r in read_rows(trunk / 'metrics.jsonl')[:-1]
        if 'ce' in r and r['step'] <= 30
    }
    assert series.validation_before[0] == [20, 30]
    (sentence,) = describe_branches([record])
    assert sentence.startswith('The run continues first@30: ')
    assert describe_branches([record] * 2)[1].startswith('They share those steps')
    assert describe_branches([record | {'parent': None}]) == []


@pytest.mark.full
def test_curve_is_dotted_before_the_branch(trunk, tmp_path):
    from eval.report.page import write_report

    assert train(make(f'{trunk}@50', {'optim.lr': 1e-3}), tmp_path / 'branch') == DONE
    lines = []
    page = write_report([trunk, tmp_path / 'branch'], tmp_path / 'page.html', say=lines.append)
    assert '1 of 2 runs continues trunk@50' in '\n'.join(lines)
    assert '"strokeDash":{"value":[2,3]}' in page.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [
        {'optim_average': 'ema', 'model_dropout': 0.2},
        {'optim_name': 'muon', 'optim_average': 'schedule_free', 'model_norm': 'batchnorm'},
        {'data_mixture': "{'a': (0.7, 'synthetic:markov'), 'b': (0.3, 'synthetic:copy')}"},
    ],
    ids=['average', 'muon', 'mixture'],
)
def test_all_kinds_continue(changes, corpus, tmp_path):
    if 'data_mixture' in changes:
        corpus = corpus | {'data.source': ''}
    config = tiny(corpus, **TRUNK | {'train_steps': 20} | changes)
    assert train(config, tmp_path / 'trunk') == DONE
    assert train(make(f'{tmp_path}/trunk@10'), tmp_path / 'branch') == DONE
    assert timeless(tmp_path / 'branch') == rows_after(tmp_path / 'trunk', 10)
    assert array_digests(tmp_path / 'branch', 20) == array_digests(tmp_path / 'trunk', 20)


@pytest.mark.full
def test_buckets_hold_parent_and_branch(bucket_url, corpus, trunk, tmp_path):
    """Permanent checkpoints are written there too, and records show the parent."""
    with mirror_workdir(f'{bucket_url}/trunk') as workdir:
        assert train(tiny(corpus, **TRUNK), workdir) == DONE
    source = f'{bucket_url}/trunk@30'
    with mirror_workdir(f'{bucket_url}/branch') as workdir:
        assert train(make(source), workdir) == DONE
    assert rows_after(fetch_records(f'{bucket_url}/branch'), 30) == rows_after(trunk, 30)
    assert load(f'{bucket_url}/branch@40').step == 40
    (record,) = gather(f'{bucket_url}/branch')
    assert record['parent'] == f'{bucket_url}/trunk@30'
    assert json.loads(record['checkpoints']) == [30, 40, 50, 60]
    assert read_series(record).training_before[0] == list(range(1, 31))


class TestText:
    """The place in the text, by numbers of batches."""

    @pytest.mark.parametrize(
        ('changes', 'index'),
        [
            ({}, 30),
            ({'optim.lr': 1.0, 'data.objective': 'prefix', 'data.mask_documents': True}, 30),
            ({'data.batch_size': 16}, 15),
            ({'data.batch_size': 32}, 8),  # 30 * 8 = 240 rows were read; 7 * 32 are fewer
            ({'data.batch_size': 4}, 60),
            ({'data.seed': 1}, 0),
            ({'data.seq_len': 8}, 0),
            ({'data.source': 'synthetic:markov'}, 0),
        ],
    )
    def test_place_follows_from_rows_read(self, changes, index, trunk):
        parent, recipe = Run(trunk).read_recipe(), make(f'{trunk}@30', changes)
        assert convert_batch_index(parent, recipe, 30) == index
        assert restarts_text(parent, recipe) is (index == 0)
        assert count_batches(recipe, None) == index + 30

    @pytest.mark.parametrize(
        ('stages', 'batch_size', 'continues'),
        [
            ('80%: ; 1: batch_size=16', 8, True),
            ('80%: batch_size=8; 1:', 16, True),
            ('25%: batch_size=4; 1:', 8, False),
            ('25%: ; 1: batch_size=16', 8, False),
        ],
    )
    def test_stages_may_differ_from_the_parent_later(self, stages, batch_size, continues, trunk):
        """The rows of a stage follow from the stages before it."""
        changes = {'train.stages': stages, 'data.batch_size': batch_size}
        parent, recipe = Run(trunk).read_recipe(), make(f'{trunk}@30', changes)
        assert reads_same_batches(parent, recipe, 30) is continues
        if continues:
            check_stages(parent, recipe, 30)
            assert convert_batch_index(parent, recipe, 30) == 30
        else:
            with pytest.raises(ValueError, match=r'Let the stages first differ after step 30'):
                check_stages(parent, recipe, 30)

    def test_other_text_is_read_from_its_beginning(self, trunk, tmp_path, capsys):
        """Its 10 steps fit into one epoch, and all 40 would not."""
        (tmp_path / 'text').mkdir()
        source = write_corpus(tmp_path / 'text')['data.source']
        changes = DECAY | {'data.source': source, 'data.epochs': 1}
        recipe = make(f'{trunk}@30', changes | {'data.validation_fraction': 0.1})
        with pytest.raises(ValueError, match=r'train\.steps=\d+ needs \d+ epochs'):
            too_long = make(f'{trunk}@30', changes | {'train.steps': 10_000})
            open_text(too_long, discard_line, tmp_path / 'none')
        assert train(recipe, tmp_path / 'branch') == DONE
        assert 'read from the first row' in ' '.join(capsys.readouterr().out.split())
        meta = read_meta(tmp_path / 'branch' / 'checkpoints', 40)
        assert meta['counters']['batch_index'] == 10

    def test_mixture_replaces_the_source_and_the_reverse(self, trunk):
        """Without this the parent's source would be refused beside the branch's mixture."""
        mixed = make(f'{trunk}@30', {'data.mixture': "{'a': (1, 'synthetic:markov')}"})
        assert mixed.data.source == '' and mixed.data.tokenizer == 'byte'
        assert restarts_text(Run(trunk).read_recipe(), mixed)

    def test_parent_tokenizer_stays_with_another_text(self, tmp_path):
        """Catches a tokenizer that is trained on the new text, or renamed for the same one."""
        recipe = resolve(sweep_base({'data.source': 'synthetic:copy'}, data_tokenizer='bpe:300'))
        (tmp_path / 'checkpoints' / '10').mkdir(parents=True)
        write_config(tmp_path, recipe)
        assert make(f'{tmp_path}@10').data.tokenizer == 'bpe:300'
        changes = {'data.source': 'synthetic:markov'}
        assert make(f'{tmp_path}@10', changes).data.tokenizer == f'hf:{tmp_path}/tokenizer'

    @pytest.mark.full
    def test_text_that_changed_on_disk_is_refused(self, corpus, tmp_path):
        (tmp_path / 'text').mkdir()
        text = write_corpus(tmp_path / 'text')
        assert train(tiny(text, train_steps=4), tmp_path / 'trunk') == DONE
        next(Path(tmp_path / 'text').rglob('*.txt')).write_text('other words ' * 200)
        recipe = make(tmp_path / 'trunk', {'train.steps': 6})
        with pytest.raises(ValueError, match='though the config names the same text'):
            train(recipe, tmp_path / 'branch')
        assert train(recipe, tmp_path / 'branch', continue_changed=True) == DONE


REFUSED = {
    'width': ({'model.d_model': 32}, r'model\.d_model: 16 -> 32\n'),
    'depth': ({'model.n_layers': 3}, r'model\.n_layers: 2 -> 3\n'),
    'tied': ({'model.tie_embeddings': True}, r'model\.tie_embeddings: False -> True\n'),
    'norm': ({'model.norm': 'layernorm'}, r"model\.norm: 'rmsnorm' -> 'layernorm'\n"),
    'activation': ({'model.activation': 'relu'}, r"model\.activation: 'gelu' -> 'relu'\n"),
    'optimizer': ({'optim.name': 'muon'}, r"optim\.name: 'adamw' -> 'muon'\n"),
    'others': ({'optim.others': 'lion'}, r"optim\.others: 'adamw' -> 'lion'\n"),
    'group': (
        {'optim.embedding_optimizer': 'lion'},
        r"optim\.embedding_optimizer: None -> 'lion'\n",
    ),
    'moments': ({'optim.momentum_dtype': 'bfloat16'}, r"momentum_dtype: 'float32' -> 'bfloat16'"),
    'average': ({'optim.average': 'ema'}, r"optim\.average: 'none' -> 'ema'\n"),
    'reparam': ({'model.reparam': 'weight_norm'}, r"model\.reparam: 'none' -> 'weight_norm'\n"),
    'scaling': ({'scaling.name': 'mup', 'scaling.base_width': 16}, r"scaling\.name: 'standard'"),
    'tokenizer': ({'data.tokenizer': 'ids:300,0,1'}, r"tokenizer: 'byte' -> 'ids:300,0,1'"),
}


@pytest.mark.parametrize('name', REFUSED)
def test_other_state_is_refused_by_field(name, trunk, tmp_path, nothing_is_compiled):
    changes, reason = REFUSED[name]
    recipe = make(f'{trunk}@30', changes)
    with pytest.raises(ValueError, match=reason) as error:
        train(recipe, tmp_path / 'branch')
    text = str(error.value)
    assert text.startswith(f'train.branch_from={trunk}@30 continues parameters')
    assert 'set train.init_from in place of' in text and 'optim.lr' not in text
    assert not (tmp_path / 'branch').exists()


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr('lm.run.wave.Wave.__init__', lambda *_: pytest.fail('it opens a wave'))


@pytest.mark.parametrize(
    ('source', 'changes', 'reason'),
    [
        ('{trunk}@31', {}, r'no checkpoint of step 31; its steps are 10, 20, 30, 40, 50, 60\.'),
        ('{trunk}', {}, r'a state after 60 steps, but train\.steps=60'),
        ('{trunk}@30', {'train.steps': 30}, r'a state after 30 steps, but train\.steps=30'),
        ('{trunk}/nowhere', {}, r'nowhere has no checkpoint'),
        ('meta-llama/Llama-3.2-1B', {}, 'runs do not download models'),
        ('{trunk}@30', {'train.init_from': 'runs/a'}, 'name two beginnings'),
        ('{trunk}@30', {'train.checkpoint_steps': 'before_decay'}, 'constant stage before a decay'),
    ],
)
def test_wrong_sources_are_refused(source, changes, reason, trunk, tmp_path, nothing_is_compiled):
    with pytest.raises(ValueError, match=reason):
        train(make(source.format(trunk=trunk), changes), tmp_path / 'branch')


def test_branch_into_its_own_parent_is_refused(trunk):
    before = timeless(trunk)
    with pytest.raises(ValueError, match=r'another config|--workdir of its own'):
        train(make(f'{trunk}@60', {'train.steps': 70}), trunk)
    assert timeless(trunk) == before


@pytest.mark.full
def test_damaged_checkpoint_falls_back_only_without_a_step(trunk, tmp_path, capsys):
    parent = Path(shutil.copytree(trunk, tmp_path / 'parent'))
    (parent / 'checkpoints' / '60' / 'weights' / 'manifest.ocdbt').unlink()
    longer = {'train.steps': 62}
    with pytest.raises(ValueError, match=r'checkpoints/60 cannot be read'):
        train(make(f'{parent}@60', longer), tmp_path / 'named')
    assert train(make(parent, longer), tmp_path / 'newest') == DONE
    assert 'using the checkpoint before it' in ' '.join(capsys.readouterr().out.split())
    assert min(losses(tmp_path / 'newest')) == 51
    assert load(tmp_path / 'newest@50').step == 50 and list_steps(parent / 'checkpoints')[-1] == 60


class TestSweep:
    """Cells that branch, from one run or from several."""

    @pytest.mark.full
    def test_cells_share_a_program_and_equal_single_branches(self, trunk, tmp_path, capsys):
        """Of two rates and two points of branching, in one program."""
        axes = {'train.branch_from': (f'{trunk}@20', f'{trunk}@40'), 'optim.lr': (3e-3, 1e-3)}
        tree = default.get_config().to_dict() | {'sweep': axes}
        base, sweep, _ = split_sweep(follow_parents(tree, (), tmp_path / 'sweep'))
        assert sweep == axes and base['model']['d_model'] == 16
        assert train_sweep(base, sweep, tmp_path / 'sweep') == DONE
        printed = ' '.join(capsys.readouterr().out.split())
        assert 'compiling one program for 4 runs' in printed
        assert printed.count('learning rate: 0.003 in step 20 -> 0.001 in step 21') == 1
        for step in (20, 40):
            for lr in (3e-3, 1e-3):
                changes = {'train.branch_from': f'{trunk}@{step}', 'optim.lr': lr}
                cell = cell_folders(tmp_path / 'sweep')[json.dumps(changes)]
                single = tmp_path / f'single-{step}-{lr}'
                if lr == 3e-3:
                    assert rows_after(cell, step) == rows_after(trunk, step)
                else:
                    assert train(make(f'{trunk}@{step}', {'optim.lr': lr}), single) == DONE
                    assert timeless(cell) == timeless(single)
        parents = {record['parent'] for record in gather(tmp_path / 'sweep')}
        assert parents == {f'{trunk}@20', f'{trunk}@40'}

    @pytest.mark.full
    def test_killed_sweep_resumes_without_its_parent(self, trunk, tmp_path):
        parent = Path(shutil.copytree(trunk, tmp_path / 'parent'))
        axes = {'optim.lr': (3e-3, 1e-3)}

        def run(**options):
            raw = default.get_config()
            raw.update_from_flattened_dict({'train.branch_from': f'{parent}@40'})
            merged, _ = start.merge_source_model(
                raw.to_dict() | {'sweep': axes}, ['train.branch_from'], tmp_path / 'sweep'
            )
            base, sweep, _ = split_sweep(merged)
            return train_sweep(base, sweep, tmp_path / 'sweep', **options)

        def act(wave):
            if wave.slots[0].journal.step == 52:
                raise KilledBeforeStep

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledBeforeStep):
            before_step(patch, act)
            run()
        shutil.rmtree(parent)
        assert run() == DONE
        cell = cell_folders(tmp_path / 'sweep')['{"optim.lr": 0.003}']
        assert rows_after(cell, 40) == rows_after(trunk, 40)

    def test_other_state_is_refused_with_the_cell(self, trunk, tmp_path):
        base = to_dict(make(f'{trunk}@40'))
        with pytest.raises(
            ValueError, match=r"(?s)sweep cell .*muon.*optim\.name: 'adamw' -> 'muon'"
        ):
            train_sweep(base, {'optim.name': ('adamw', 'muon')}, tmp_path / 'sweep')
        assert not (tmp_path / 'sweep').exists()


class TestParentsThatDiffer:
    """`follow_parents`: without training, as only config.json and names of folders are read."""

    @pytest.fixture
    def parents(self, tmp_path):
        paths = []
        for name, width in (('a', 16), ('b', 32)):
            recipe = resolve(sweep_base({}, model_d_model=width, train_steps=20))
            (tmp_path / name / 'checkpoints' / '10').mkdir(parents=True)
            write_config(tmp_path / name, recipe)
            paths.append(f'{tmp_path / name}@10')
        return tuple(paths)

    def follow(self, sweep, explicit=(), **changes):
        raw = default.get_config()
        raw.update_from_flattened_dict(changes)
        merged = follow_parents(raw.to_dict() | {'sweep': sweep}, explicit)
        base, sweep, _ = split_sweep(merged)
        return base, sweep, expand_sweep(base, sweep)

    def test_each_cell_follows_its_own(self, parents):
        axis = {'train.branch_from': parents}
        base, _, cells = self.follow(axis | {'train.seed': (0, 1)})
        widths = {cell.recipe.train.branch_from: cell.recipe.model.d_model for cell in cells}
        assert len(cells) == 4 and widths == dict(zip(parents, (16, 32), strict=True))
        assert base['train']['steps'] == 20 and base['model']['n_kv_heads'] == 1
        assert len(group_by_program(cells)) == 2
        assert {'train.branch_from', 'model.d_model', 'train.seed'} == {*cells[0].changes}

    def test_flags_and_axes_win(self, parents):
        axes = {'zip': {'train.branch_from': parents, 'model.d_model': (8, 64)}}
        base, sweep, cells = self.follow(axes, ['train.steps'], **{'train.steps': 15})
        assert [cell.recipe.model.d_model for cell in cells] == [8, 64] and sweep == {
            'zip': (axes['zip'],)
        }
        assert base['train']['steps'] == 15 and base['model']['n_layers'] == 2

    def test_listed_cells_without_a_parent_keep_the_base(self, parents):
        listed = ({'train.branch_from': parents[1], 'optim.lr': 1.0}, {'optim.lr': 2.0})
        base, _, cells = self.follow(listed)
        plain = default.get_config().to_dict()
        assert [cell.recipe.model.d_model for cell in cells] == [32, plain['model']['d_model']]
        assert base['model'] == to_dict(resolve(plain))['model'] | {
            name: base['model'][name] for name in base['model']
        }
        assert cells[0].recipe.train.steps == 20 and cells[1].recipe.train.steps == 1500

    def test_other_sweep_is_unchanged(self):
        raw = default.get_config().to_dict() | {'sweep': {'optim.lr': (1.0, 2.0)}}
        assert follow_parents(raw, ()) is raw
        assert follow_parents(raw | {'sweep': None}, ())['sweep'] is None

    def test_two_beginnings_are_refused(self, parents):
        with pytest.raises(ValueError, match='name two beginnings'):
            self.follow({'train.branch_from': parents}, **{'train.init_from': 'runs/a'})


def test_parts_are_compared_by_name(trunk):
    """Options and numbers of the same parts may change."""
    parent = Run(trunk).read_recipe()
    changes = {'optim.lr': 1.0, 'optim.b2': 0.9, 'model.dropout': 0.0, 'model.remat': 'full'}
    assert branch.list_state_changes(parent, make(f'{trunk}@30', changes)) == {}
