"""Reference and contract tests of traced steps: a synthetic trace, a real one, and refusals."""

import jax
import pytest

from eval.report.page import write_report
from lm.config.resolve import differences, digest
from lm.config.traced_steps import TracedSteps, parse_traced_steps
from lm.model.check import check
from lm.record.metrics import read_rows
from lm.run import trace
from lm.run.trace import Op, Trace, TracedSpan
from lm.storage.files import read_json
from lm.training.state import init_state, make_hyper
from lm.training.step import make_train_step
from tests.commands import TWELVE, tiny
from tests.helpers import tiny_batch, tiny_config, tiny_learner
from tests.sweep_helpers import base
from train import DONE, train, train_sweep

MS = 1e6  # nanoseconds


def make_trace() -> Trace:
    """Returns a trace of two steps on two devices.

    The steps take 10 and 20 ms, with an evaluation of 5 ms in the second. Device a has a loop from
    1 to 9 ms with a body that runs on another thread, from 2 to 8.
    """
    a = [
        Op('while.1', 'x', 1 * MS, 9 * MS, 'step'),
        Op('dot.1', 'y', 2 * MS, 8 * MS, 'step'),
        Op('copy.1', 'y', 3 * MS, 4 * MS, 'step'),
        Op('dot.1', 'x', 10 * MS, 14 * MS, 'step'),
        Op('dot.1', 'x', 16 * MS, 19 * MS, 'evaluate'),
    ]
    b = [Op('dot.1', 'x', 0, 10 * MS, 'step'), Op('other.1', 'x', 20 * MS, 30 * MS, 'step')]
    spans = {
        trace.STEP: [TracedSpan('step', 0, 1 * MS, 4), TracedSpan('step', 1 * MS, 11 * MS, 5)],
        trace.FETCH: [
            TracedSpan('fetch', 9 * MS, 10 * MS, 4),
            TracedSpan('fetch', 20 * MS, 30 * MS, 5),
        ],
        trace.DATA_WAIT: [
            TracedSpan('data_wait', 0, 1 * MS),
            TracedSpan('data_wait', 12 * MS, 15 * MS),
        ],
        trace.ASIDE: [TracedSpan('aside', 15 * MS, 20 * MS)],
    }
    return Trace({'a': a, 'b': b}, spans)


def make_sources() -> trace.Sources:
    return trace.parse_sources(
        'HloModule step, is_scheduled=true\n'
        '  %dot.1 = f32[2] dot(x), metadata={op_name="jit(step)/transpose(jvp(T))/layers/mlp/d"}\n'
        '  ROOT while.1 = f32[2] while(x), metadata={op_name="jit(step)/jvp(T)/while"}\n'
    )


def test_synthetic_trace_summary():
    summary = trace.summarize(make_trace(), make_sources())
    assert summary['devices'] == 2
    assert [row['step'] for row in summary['steps']] == [4, 5]
    assert [row['wall_ms'] for row in summary['steps']] == pytest.approx([10, 15])
    assert [row['busy_ms'] for row in summary['steps']] == pytest.approx(
        [(8 + 10) / 2, (4 + 10) / 2]
    )
    assert [row['data_wait_ms'] for row in summary['steps']] == pytest.approx([1, 3])
    assert summary['step_ms'] == pytest.approx(12.5)
    assert summary['idle_share'] == pytest.approx(1 - 16 / 25)
    assert summary['data_wait_share'] == pytest.approx(4 / 25)


def test_self_time_excludes_inner_operations():
    """The loop itself takes 2 of 8 ms; dot.1 contains the copy; evaluation does not count."""
    rows = {row['name']: row for row in trace.summarize(make_trace(), make_sources())['operations']}
    assert {name: row['self_ms'] for name, row in rows.items()} == pytest.approx(
        {'dot.1': 5 + 4 + 10, 'other.1': 10, 'while.1': 2, 'copy.1': 1}
    )
    assert {name: row['total_ms'] for name, row in rows.items()} == pytest.approx(
        {'dot.1': 6 + 4 + 10, 'other.1': 10, 'while.1': 8, 'copy.1': 1}
    )
    assert rows['dot.1']['count'] == 3
    assert rows['dot.1']['share'] == pytest.approx(19 / 32)
    assert (rows['dot.1']['part'], rows['dot.1']['pass']) == ('mlp', 'backward')


def test_trace_without_step_is_refused():
    with pytest.raises(ValueError, match='no complete step'):
        trace.summarize(Trace(make_trace().devices, {}), make_sources())


@pytest.mark.parametrize(
    'source, part',
    [
        ('jit(s)/jvp(T.activations)/T.forward/eval_jaxpr/layers/attention_norm_in/mul', 'forward'),
        ('jit(s)/transpose(jvp(T))/while/body/eval_jaxpr/layers_1/attention_norm_in/m', 'backward'),
    ],
)
def test_source_in_module_is_parsed(source, part):
    assert trace.parse_source(source.replace('T.', 'Transformer.')) == ('attention_norm_in', part)


def test_module_methods_are_no_parts():
    source = 'jit(s)/jvp(Transformer.activations)/while/body/layers/layers.place/mlp/dot_general'
    assert trace.parse_source(source) == ('mlp', 'forward')
    source = 'jit(s)/jvp(Transformer.activations)/layers/block_2/block_2.place/add'
    assert trace.parse_source(source) == ('residual stream', 'forward')


def test_source_outside_modules():
    assert trace.parse_source('jit(s)/jvp()/while/body/exp') == ('readout and loss', 'forward')
    assert trace.parse_source('jit(s)/mul') == ('update', 'update')


ACCELERATOR = """
planes {
  name: "/device:TPU:0"
  lines { name: "XLA Modules" events { metadata_id: 2 offset_ps: 0 duration_ps: 9000000 } }
  lines { name: "XLA Ops" timestamp_ns: 5 events { metadata_id: 1 duration_ps: 7000000 } }
  event_metadata { key: 1 value { id: 1 name: "%fusion.7 = f32[8] fusion(f32[8] %p)" } }
  event_metadata { key: 2 value { id: 2 name: "jit_step(1)" } }
}
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" events {
    metadata_id: 1 duration_ps: 4000000 stats { metadata_id: 1 str_value: "fusion.7" } } }
  event_metadata { key: 1 value { id: 1 name: "kernel_of_fusion" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes {
  name: "/host:CPU"
  lines { name: "python" events {
    metadata_id: 1 duration_ps: 2000000 stats { metadata_id: 1 int64_value: 4 } } }
  event_metadata { key: 1 value { id: 1 name: "step" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
}
"""


def test_accelerator_planes_are_read():
    """Operations of a TPU are on one line, of a GPU on its streams: no line counts twice."""
    extracted = trace.extract_trace(jax.profiler.ProfileData.from_text_proto(ACCELERATOR))
    assert {name: [op.name for op in ops] for name, ops in extracted.devices.items()} == {
        '/device:TPU:0': ['fusion.7'],
        '/device:GPU:0': ['fusion.7'],
    }
    assert [op.end - op.start for ops in extracted.devices.values() for op in ops] == [7000, 4000]
    assert [(span.step, span.end - span.start) for span in extracted.spans['step']] == [(4, 2000)]


@pytest.mark.parametrize(
    'value, message',
    [
        ('5', 'must be STEP:COUNT'),
        ('0:3', 'must be STEP:COUNT'),
        ('5:0', 'must be STEP:COUNT'),
        ('5:-1', 'must be STEP:COUNT'),
        ('18:4', 'traces steps 18 to 21, but the run ends at train.steps=20.*value is 17:4'),
        ('100:50', 'value is 1:20'),
    ],
)
def test_impossible_steps_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_config({'train.profile': value}))


def test_last_steps_can_be_traced():
    assert parse_traced_steps(tiny_config({'train.profile': '17:4'})) == TracedSteps(17, 4)


@pytest.mark.full
def test_tracing_does_not_change_run():
    """Its name, its identity and the program of its step are equal."""
    plain, traced = tiny_config(), tiny_config({'train.profile': '3:2'})
    assert digest(plain) == digest(traced)
    assert differences(plain, traced) == differences(traced, plain) == {}
    longer = tiny_config({'train.profile': '3:2', 'train.steps': 30})
    assert list(differences(plain, longer)) == ['train.steps']

    def text(recipe):
        learner = tiny_learner(recipe)
        step = jax.jit(make_train_step(learner))
        hyper = make_hyper(recipe)
        state = jax.eval_shape(lambda key: init_state(learner, hyper, key), jax.random.key(0))
        return step.lower(state, tiny_batch(), hyper).as_text()

    assert text(plain) == text(traced)


@pytest.mark.full
def test_traced_run_and_its_report(whole, corpus, tmp_path, capsys):
    """A checkpoint lies in between, and losses are unchanged."""
    traced = tiny(corpus, train_profile='3:3')
    assert train(traced, tmp_path / 'run') == DONE
    folder = tmp_path / 'run' / 'profile'
    summary = read_json(folder / 'summary.json')
    assert [row['step'] for row in summary['steps']] == [3, 4, 5]
    assert all(0 < row['busy_ms'] <= row['wall_ms'] for row in summary['steps'])
    assert sum(row['share'] for row in summary['parts']) == pytest.approx(1)
    parts = {(row['part'], row['pass']) for row in summary['parts']}
    assert {('mlp', 'forward'), ('mlp', 'backward'), ('update', 'update')} <= parts
    assert len([*folder.rglob('*.xplane.pb')]) == 1
    assert len([*folder.rglob('*.trace.json.gz')]) == 1
    assert 'profile: steps 3 to 5' in capsys.readouterr().out

    losses = [
        [row['loss'] for row in read_rows(run / 'metrics.jsonl') if 'loss' in row]
        for run in (whole, tmp_path / 'run')
    ]
    assert losses[0] == losses[1]
    page = write_report(tmp_path / 'run').with_suffix('.md').read_text()
    assert '## Time of a step: run' in page and '| mlp | backward |' in page


@pytest.mark.full  # it trains twice
def test_run_resumed_after_traced_steps_is_not_traced(corpus, tmp_path, capsys):
    assert train(tiny(corpus, train_steps=4), tmp_path / 'run') == DONE
    longer = tiny(corpus, train_steps=6, train_profile='3:1')
    assert train(longer, tmp_path / 'run', continue_changed=True) == DONE
    assert 'NOTE: train.profile: step 3 is over' in capsys.readouterr().out
    assert not (tmp_path / 'run' / 'profile').exists()


@pytest.mark.full  # two programs, three seconds each
def test_sweep_traces_each_program_once(corpus, tmp_path):
    """The trace is in the folder of the first run of the program."""
    config = base(corpus, **TWELVE, train_profile='3:2')
    cells = [{'train.seed': 0}, {'train.seed': 1}, {'model.norm': 'layernorm'}]
    assert train_sweep(config, cells, tmp_path / 'sweep') == DONE
    summaries = {
        path: read_json(path) for path in (tmp_path / 'sweep').glob('*/profile/summary.json')
    }
    assert sorted(summary['runs'] for summary in summaries.values()) == [1, 2]
    assert all(
        [row['step'] for row in summary['steps']] == [3, 4] for summary in summaries.values()
    )
    page = write_report(tmp_path / 'sweep').with_suffix('.md').read_text()
    assert page.count('## Time of a step') == 2
