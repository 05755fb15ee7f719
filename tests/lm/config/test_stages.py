"""Stages of a run: their syntax, their steps and tokens, and errors before any compile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from lm.config.resolve import digest, flatten, resolve, to_dict, update_recipe
from lm.config.stages import (
    BatchShape,
    count_tokens,
    find_stage,
    parse_stages,
    schedule_step,
    token_steps,
)
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.model.check import check
from lm.run.stage_table import list_stage_notes, stage_rows
from lm.study.plan.cells import expand_sweep, program_key
from lm.training.state import make_hyper
from lm.training.update import group_fractions, numbers_at_step
from modules.optim.groups import GROUPS, HIDDEN
from tests import ROOT
from tests.helpers import checked_config, tiny_config, tiny_raw

MIXTURE = {
    'data.mixture': "{'web': (3.0, 'synthetic:markov'), 'code': (1.0, 'synthetic:ngram')}",
    'data.source': '',
}
SGD = {'optim.name': 'sgd', 'optim.others': 'sgd'}
RAMP = '0.25: batch_size=2 seq_len=4; 0.5: batch_size=4 seq_len=8; 1:'


def stage_config(text, changes=None):
    return tiny_config({'train.stages': text, **(changes or {})})


class TestSyntax:
    def test_forms_for_an_end_and_for_fields(self):
        parsed = parse_stages(' 25%:batch_size=4 ; 2_000:data.seq_len=8; .5: ;1.5K: ; 1')
        assert [(stage.until, stage.is_share) for stage in parsed] == [
            (0.25, True),
            (2000, False),
            (0.5, True),
            (1500, False),
            (1, True),
        ]
        assert [stage.values for stage in parsed] == [{'batch_size': 4}, {'seq_len': 8}, {}, {}, {}]
        (first, _) = parse_stages(
            '2.5B: mixture=web:0.7,code:.3 lr_factor=1.4 microbatches=2; 100%;'
        )
        assert first.until == 2_500_000_000 and not first.is_share
        assert first.values == {
            'mixture': {'web': 0.7, 'code': 0.3},
            'lr_factor': 1.4,
            'microbatches': 2,
        }

    @pytest.mark.parametrize(
        ('text', 'words'),
        [
            ('', r"stage 1, '': a stage begins with its end"),
            ('half: batch_size=4; 1:', 'a stage begins with its end'),
            ('0: batch_size=4; 1:', 'must be above 0, at most 1; got 0'),
            ('150%: batch_size=4', 'must be above 0, at most 1; got 150%'),
            ('0.5: batch_size=4', 'the last stage of train.stages must last to the end of the run'),
            ('1: batch_size=4; 1: seq_len=4', 'stage 1.* lasts to the end of the run'),
            ('0.5: batch_size; 1:', "form NAME=VALUE, without spaces; got 'batch_size'"),
            ('0.5: batch_size= 4; 1:', 'form NAME=VALUE'),
            ('0.5: batchsize=4; 1:', "got 'batchsize'.* Did you mean 'batch_size'"),
            ('0.5: batch_size=4 batch_size=8; 1:', 'batch_size is named twice'),
            ('0.5: batch_size=0; 1:', 'whole number from 1'),
            ('0.5: seq_len=4.5; 1:', 'whole number from 1'),
            ('0.5: lr_factor=0; 1:', 'lr_factor must be a number above 0'),
            ('0.5: lr_factor=nan; 1:', 'lr_factor must be a number above 0'),
            ('0.5: mixture=web; 1:', 'NAME:WEIGHT,NAME:WEIGHT'),
            ('0.5: mixture=web:1,web:2; 1:', "names 'web' twice"),
        ],
    )
    def test_other_text_is_refused_with_an_example(self, text, words):
        with pytest.raises(ValueError, match=words) as error:
            stage_config(text)
        assert '--config.train.stages=' in str(error.value)

    def test_stages_that_change_nothing_are_no_stages(self):
        """The recipe is the same, and with it the compiled step and the order of the text."""
        plain = tiny_config()
        equal = stage_config('0.3: batch_size=8 seq_len=8; 1: lr_factor=1 microbatches=1')
        assert equal == plain and equal.train.stages is None and digest(equal) == digest(plain)
        weighed = stage_config('1: mixture=code:2,web:6', MIXTURE)
        assert weighed == tiny_config(MIXTURE)
        for text in ('1: batch_size=4', '1: lr_factor=0.5', '0.5: seq_len=4; 1:'):
            assert stage_config(text).train.stages == text and digest(stage_config(text)) != digest(
                plain
            )
        assert stage_config('1: mixture=code:1', MIXTURE).train.stages is not None


class TestSteps:
    @pytest.mark.parametrize(
        ('text', 'stops', 'shapes'),
        [
            # D = 20 / (.25 / 8 + .25 / 32 + .5 / 64) tokens, of which 13.3, 3.3 and 3.3 steps.
            (RAMP, [13, 17, 20], [(2, 4), (4, 8), (8, 8)]),
            ('256: batch_size=4; 1:', [8, 20], [(4, 8), (8, 8)]),
            # D / 4 / 64 + (1152 - D / 4) / 32 + (D - 1152) / 128 = 32, so D = 1280.
            ('0.25: ; 1152: batch_size=4; 1: batch_size=16', [5, 31, 32], [(8, 8)]),
        ],
    )
    def test_reference_stage_steps(self, text, stops, shapes):
        changes = {'train.steps': stops[-1]}
        stages = stage_config(text, changes).stages
        assert [stage.stop for stage in stages] == stops
        assert [(s.shape.batch_size, s.shape.seq_len) for s in stages][: len(shapes)] == shapes
        tokens = np.cumsum(
            [stages[find_stage(stages, step)].shape.tokens for step in range(stops[-1])]
        )
        assert [count_tokens(stages, step + 1) for step in range(stops[-1])] == tokens.tolist()
        assert [stage.stop_tokens for stage in stages] == [tokens[stop - 1] for stop in stops]

    def test_shares_count_tokens(self):
        """Within half a step of each stage; with many steps, ends differ by less than 1e-3."""
        stages = stage_config(RAMP, {'train.steps': 20_000}).stages
        shares = [stage.stop_tokens / stages[-1].stop_tokens for stage in stages]
        np.testing.assert_allclose(shares, [0.25, 0.5, 1.0], atol=1e-3)

    def test_reference_schedules_count_tokens(self):
        """A linear decay after a warm-up, at the tokens of each step, in float64."""
        config = stage_config(RAMP, {'optim.schedule': 'linear', 'optim.warmup_steps': 3})
        fractions = group_fractions(config, make_hyper(config), jnp.arange(20))
        tokens = np.array([count_tokens(config.stages, step) for step in range(1, 21)], float)
        steps = 20 * tokens / tokens[-1]
        expected = np.minimum(1, steps / 3) * (1 - np.clip((steps - 3) / 17, 0, 1))
        np.testing.assert_allclose(fractions[HIDDEN], expected, atol=1e-6)
        assert float(fractions[HIDDEN][-1]) == 0.0  # exactly
        assert {*fractions} == {HIDDEN, *GROUPS}

    def test_momentum_and_decay_over_the_run_count_tokens(self):
        config = stage_config(
            RAMP,
            {
                'optim.name': 'muon',
                'optim.momentum': 0.9,
                'optim.momentum_start': 0.5,
                'optim.momentum_warmup_steps': 10,
                'optim.weight_decay_end': 0.0,
            },
        )
        hyper, stages = make_hyper(config), config.stages
        for step in (0, 12, 16, 19):
            numbers = numbers_at_step(hyper, step, stages)
            part = 20 * count_tokens(stages, step + 1) / stages[-1].stop_tokens
            assert numbers['optim.momentum'] == pytest.approx(0.5 + 0.4 * min(1, part / 10))
            decay = config.optim.weight_decay * (1 - part / 20)
            assert numbers['optim.weight_decay'] == pytest.approx(decay, abs=1e-7)

    def test_equal_steps_count_as_without_stages(self):
        """The same object: nothing is computed, so that the compiled schedule is the same."""
        stages = stage_config('0.5: lr_factor=2; 1: batch_size=4 microbatches=4 seq_len=8').stages
        equal = stage_config('0.5: lr_factor=2; 1: microbatches=2').stages
        step = jnp.int32(3)
        assert schedule_step(equal, step) is step and token_steps(equal, step) is step
        assert token_steps(stages, 20) == 20 and token_steps(stages, 5) != 5

    def test_learning_rate_has_the_factor_in_its_stage(self):
        config = stage_config('0.5: lr_factor=2; 1: lr_factor=0.25')
        plain = tiny_config()
        ratio = np.asarray(
            group_fractions(config, make_hyper(config), jnp.arange(20))[HIDDEN]
        ) / np.asarray(group_fractions(plain, make_hyper(plain), jnp.arange(20))[HIDDEN])
        np.testing.assert_array_equal(ratio, [2.0] * 10 + [0.25] * 10)
        traced = jax.jit(lambda step: group_fractions(config, make_hyper(config), step))
        assert float(traced(jnp.int32(10))[HIDDEN]) == 0.25

    @pytest.mark.parametrize(
        ('rule', 'factors'),
        [
            # Batches of half the tokens: lr, weight decay, 1 - b2 and eps.
            ('sqrt', (0.5**0.5, 1, 1, 1)),
            ('sde', (0.5**0.5, 1, 0.5, 2**0.5)),
            ('sdew', (1, 0.5**0.5, 0.5**0.5, 2**0.5)),
            ('timescale', (1, 0.5, 1, 1)),
            ('nanochat', (0.5**0.5, 0.5**0.5, 1, 1)),
        ],
    )
    def test_reference_rules_for_the_batch(self, rule, factors):
        changes = {'train.stage_rule': rule, 'optim.embedding_b2': 0.9}
        config = checked_config({'train.stages': '0.5: batch_size=4; 1:', **changes})
        hyper, stages = make_hyper(config), config.stages
        lr, decay, memory, eps = factors
        step = stages[0].stop
        before, after = (numbers_at_step(hyper, n, stages) for n in (step - 1, step))
        fractions = group_fractions(config, hyper, jnp.array([step - 1, step]))[HIDDEN]
        np.testing.assert_allclose(fractions, [lr, 1.0], rtol=1e-6)
        assert before['optim.weight_decay'] == pytest.approx(hyper['optim.weight_decay'] * decay)
        assert before['optim.eps'] == pytest.approx(hyper['optim.eps'] * eps)
        for path in ('optim.b2', 'optim.embedding_b2'):
            assert before[path] == pytest.approx(1 - (1 - hyper[path]) * memory)
            assert after[path] == pytest.approx(hyper[path])
        assert before['optim.b1'] == hyper['optim.b1']


class TestRefusals:
    @pytest.mark.parametrize(
        ('text', 'changes', 'words'),
        [
            ('0.5: seq_len=3; 1:', {}, 'seq_len must divide data.seq_len; got 3 and 8'),
            ('0.5: ; 1: seq_len=16', {}, 'set data.seq_len to it'),
            ('1: seq_len=4', {}, 'the last stage of train.stages must have rows of data.seq_len'),
            ('0.5: mixture=web:1; 1:', {}, 'the text is data.source=synthetic:markov'),
            ('0.5: mixture=wbe:1; 1:', MIXTURE, "Did you mean 'web'"),
            ('0.5: batch_size=4; 1:', {'train.microbatches': 8}, 'stage 1: train.microbatches'),
            ('0.5: batch_size=4 microbatches=3; 1:', {}, 'stage 1: train.microbatches'),
            ('0.999: batch_size=4; 1:', {}, 'stage 2.* would have no step'),
            ('999: ; 500: batch_size=4; 1:', {}, 'stage 2.* would have no step'),
            ('90M: batch_size=4; 1:', {}, 'would have no step: with train.steps=20'),
            (None, {'train.stage_rule': 'sqrt'}, 'train.stage_rule=sqrt has no effect'),
            ('1: lr_factor=2', {'train.stage_rule': 'sqrt'}, 'has an lr_factor'),
            ('0.5: microbatches=2; 1:', {'train.stage_rule': 'sqrt'}, 'has no effect, because all'),
            (
                '0.1: ; 1: batch_size=400',
                {'train.stage_rule': 'sde', 'optim.b2': 0.95},
                r'optim.b2=0.95 would become -1.5',
            ),
            (
                '0.5: batch_size=4; 1:',
                {'train.stage_rule': 'sde', 'optim.eps': None} | SGD,
                'changes b2, which no optimizer',
            ),
            (
                '0.5: seq_len=4; 1:',
                {'loss.token_weights': '1 1 1 1 1'},
                'stage 1: loss.token_weights=.*Name fewer',
            ),
            (
                '0.5: seq_len=4; 1:',
                {'data.source': 'chat:talks.jsonl', 'data.tokenizer': 'hf:x'},
                'has conversations, which stay whole',
            ),
        ],
    )
    @pytest.mark.usefixtures('nothing_is_traced')
    def test_settings_that_do_not_fit_are_refused(self, text, changes, words):
        with pytest.raises(ValueError, match=words):
            checked_config({'train.stages': text, **changes})

    def test_every_stage_is_checked_against_the_mesh(self):
        config = checked_config(
            {'train.stages': '0.5: batch_size=12; 1:', 'mesh.data': 8, 'train.steps': 24}
        )
        with pytest.raises(ValueError, match=r'stage 1: data.batch_size must be a multiple'):
            check_devices(config, make_mesh(config.mesh))
        check_devices(
            update_recipe(config, {'train.stages': '0.5: batch_size=16; 1:'}),
            make_mesh(config.mesh),
        )
        context = checked_config(
            {'train.stages': '0.5: seq_len=4; 1:', 'mesh.data': 1, 'mesh.context': 8}
        )
        with pytest.raises(ValueError, match=r'stage 1: mesh.context must divide data.seq_len'):
            check_devices(context, make_mesh(context.mesh))


def test_table_and_notes():
    config = stage_config(RAMP, MIXTURE | {'train.stage_rule': 'sqrt', 'optim.warmup_steps': 4})
    check(config)
    rows = stage_rows(config)
    assert [row['steps'] for row in rows] == ['1 to 13', '14 to 17', '18 to 20']
    assert rows[0]['batch'] == '2 x 4' and rows[0]['mixture'] == 'data.mixture'
    assert [row['lr'] for row in rows] == ['x 0.3536', 'x 0.7071', 'x 1']
    assert 'weight decay' not in rows[0]
    (note,) = list_stage_notes(config)
    # 4 of 20 steps are a fifth of 13 * 8 + 4 * 32 + 3 * 64 = 424 tokens: 10.6 steps of 8.
    assert 'optim.warmup_steps=4 is 85 tokens, which end in step 11' in note
    assert not [*list_stage_notes(stage_config('0.5: lr_factor=2; 1:', {'optim.warmup_steps': 4}))]


def test_page_prints_the_table_for_its_command():
    page = (ROOT / 'docs/guide/runs.md').read_text()
    text = re.search(r"--config.train.stages='(.*?)' --config.train.stage_rule=sqrt", page)[1]
    config = default.get_config()
    config.data.batch_size = 16
    config.train.stages, config.train.stage_rule = text, 'sqrt'
    lines = [re.split(r' {2,}', line.strip()) for line in page.splitlines()]
    for row in stage_rows(resolve(config.to_dict())):
        assert [*row.values()] in lines


def test_cells_with_stages_share_a_program_if_their_steps_agree():
    base = tiny_raw({'train.stages': RAMP})
    cells = expand_sweep(base, {'optim.lr': (0.1, 0.2), 'train.steps': (20, 40)})
    keys = [program_key(cell) for cell in cells]
    assert len({*keys}) == 2 and len(cells) == 4
    stages = expand_sweep(tiny_raw(), {'train.stages': (None, RAMP)})
    assert len({program_key(cell) for cell in stages}) == 2


def test_stages_survive_records():
    """config.json of a run in stages resolves to the same recipe, and its stages have shapes."""
    config = stage_config(RAMP)
    assert checked_config({path: v for path, v in flatten(config).items()}) == config
    assert to_dict(config)['train']['stages'] == RAMP
    assert config.stages[1].shape == BatchShape(4, 8, 1)
    assert [r.data.batch_size for r in config.stage_recipes] == [2, 4, 8]
    assert all(r.train.stages is None for r in config.stage_recipes)
