"""The commands in the pages, run in order in one folder: as printed, with small sizes.

A new line in the pages fails until it runs here, or `LEFT_OUT` gives a reason.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import default
from lm.config.resolve import digest, resolve
from lm.data.sources import SOURCES, open_source
from lm.launch.exit_status import DONE
from lm.run import wave
from lm.run.program import Program
from lm.study.tables.columns import IDENTITY, RESULTS, columns
from lm.training import peaks
from tests.commands import PATIENCE_SEC
from tests.pages import FRONT_PAGE, TEXT, arguments
from tests.xla import ONE_DEVICE

ROOT = Path(__file__).parent.parent
IN_BUCKETS = 'tests/test_train_bucket.py has a server of object storage'
PUBLISHED_SPLITS = [
    line
    for line in re.findall(r'^    (uv run .*)$', TEXT, re.MULTILINE)
    if 'validation_source' in line
]
LEFT_OUT = {  # line: why it is not run here
    'uv run pytest': 'it is this',
    'uv run --group docs sphinx-build -c docs . docs/_build': 'CI does',
    "uv run pytest -m 'full or product' tests/lm/launch/test_hosts_on_loopback.py": 'minutes',
    'uv run pytest tests/slurm_on_one_machine.py -n 0': 'minutes, and SLURM',
    'uv run train.py --config=configs/default.py --config.train.seconds=60 '
    '--config.optim.warmup_steps=20 --workdir=runs/minute': (
        'a minute; tests/test_train_seconds.py has it'
    ),
    'uv sync --extra cluster': 'the environment of the tests has it',
    'uv sync --extra tpu': 'the environment of the tests has it',
    'uv sync --extra tpu --extra buckets': 'the environment of the tests has it',
    'uv sync --extra cuda': '4 GB',
    'uv sync --extra cuda-compiler': 'the environment of the tests has it',
    **{
        f'uv run python -m tpu.plan --config=configs/llama_8b.py --topology={topology}': (
            'minutes; tests/tpu/test_plan.py has a smaller model'
        )
        for topology in ('v6e:16x16', 'v5p:4x4x4 --search --figure=plan.html')
    },
    'uv run python -m tpu.plan --config=configs/llama_1b.py --topology=v5e:16x16 --price=1.2': (
        'minutes; tests/tpu/test_plan.py has a smaller model'
    ),
    'uv sync --extra buckets': 'the environment of the tests has it',
    'uv sync --extra hub': 'the environment of the tests has it',
    'uv sync --extra serve': 'the environment of the tests has it',
    'uv run python -m eval.serve --checkpoint=runs/ln': (
        'it does not end; tests/eval/serve/test_served.py has it'
    ),
    'uv sync --extra harness': 'the environment of the tests has it',
    'uv sync --extra mlflow': 'the environment of the tests has it',
    'uv run train.py --config=configs/default.py --workdir=runs/mine --track=mlflow': (
        'tests/eval/sync/test_mlflow.py has it'
    ),
    'uv run python -m eval.sync --workdir=runs/mine --to=mlflow --uri=sqlite:///mlflow.db': (
        'tests/eval/sync/test_mlflow.py has it'
    ),
    'uv run train.py --config=configs/default.py '
    '--config.data.source=synthetic:linear_regression_1d --config.data.tokenizer=byte '
    '--config.data.seq_len=128 --config.data.packing=best_fit --config.data.mask_documents=True '
    '--config.data.epochs=100 --workdir=runs/icl': ('tests/eval/suites/test_in_context.py has it'),
    **dict.fromkeys(
        (
            'uv run train.py --config=configs/studies/batch_rules.py --workdir=runs/batch_rules',
            'uv run python -m eval.rules --workdir=runs/batch_rules',
        ),
        '105 runs; tests/lm/study/tables/test_predictions.py has a tuned sweep, test_studies.py '
        'the cells',
    ),
    'uv run python -m eval --checkpoint=runs/icl --suite=in_context': (
        'tests/eval/suites/test_in_context.py has it'
    ),
    **{
        f'uv run python -m eval --checkpoint=runs/ln --suite={suite}': f'{test} has it'
        for suite, test in {
            'minimal_pairs:blimp --minimal_pairs.limit=100': 'eval/suites/test_minimal_pairs.py',
            'bytes --bytes.documents=16 --bytes.length=256': 'eval/suites/test_bytes.py',
            'harness:hellaswag+arc_easy --harness.limit=100': 'eval/suites/test_harness.py',
        }.items()
    },
    **{
        'uv run train.py --config=configs/llama_124m.py '
        f'--config.data.source=hub:{name} --config.data.tokenizer=bpe:32768': 'a network'
        for name in ('HuggingFaceFW/fineweb-edu:sample-10BT', 'Skylion007/openwebtext')
    },
    'uv run train.py --config=configs/default.py --config.train.init_from=runs/model '
    '--config.data.source=chat:chats.jsonl --config.data.packing=best_fit '
    '--config.data.mask_documents=True --workdir=runs/chat': (
        'an imported model; tests/lm/training/test_chats.py has it'
    ),
    **{
        line: 'published texts; tests/lm/data/test_splits.py has small ones'
        for line in PUBLISHED_SPLITS
    },
    'uv run train.py --config=configs/default.py --workdir=s3://my-bucket/runs/mine': IN_BUCKETS,
    'uv run python -m eval --checkpoint=s3://my-bucket/runs/mine --suite=perplexity': IN_BUCKETS,
    'uv run python -m eval.runs --workdir=s3://my-bucket/runs': IN_BUCKETS,
    'uv run python -m eval.runs --workdir=gs://my-bucket/runs': IN_BUCKETS,
    'uv run python -m eval.report --workdir=gs://my-bucket/runs/mine --out=report.html': IN_BUCKETS,
    'uv run train.py --config=configs/default.py '
    "--config.data.source='text:gs://my-bucket/corpus/*.jsonl' "
    '--config.data.tokenizer=bpe:32768 --config.data.cache_dir=gs://my-bucket/cache '
    '--config.train.steps=1': IN_BUCKETS,
    **{
        f'uv run python -m eval.claims{flags}': 'tests/eval/claims has it'
        for flags in (
            '',
            ' --run --hours=2',
            ' --only=muon,lion --run',
            ' --pages=docs/claims',
            ' --record=docs/claims/board.json',
            ' --only=vanishing_variance,seednorm,deepnorm,self_normalizing,unnormalised --run',
        )
    },
    **{
        f'uv run {line}': 'a changed block; tests/test_readme_parts.py has it'
        for line in (
            'pytest tests/lm/model/test_residual_rank.py',
            'train.py --config=configs/default.py --config.model.residual_rank=8 '
            '--workdir=runs/rank',
            'train.py --config=configs/default.py '
            """--config.sweep="{'model.residual_rank': (0, 8), 'train.seed': (0, 1, 2)}" """
            '--workdir=runs/ranks',
            'python -m eval.report --workdir=runs/ranks',
        )
    },
    'uv run --no-dev --with matplotlib --with jupyterlab jupyter lab': 'it does not end',
    'uv run --no-dev --with matplotlib python FILE': 'a network',
    'uv run python -m tests.bench.sweep': 'minutes',
    'uv run python -m tests.bench.tuning': 'minutes',
    'uv run train.py --config=configs/studies/small.py '
    """--config.sweep="{'optim.name': ('adamw', 'muon')}" """
    """--config.tune="{'optim.lr': None, 'budget': 30}" --workdir=runs/fair""": (
        'as a file it runs here'
    ),
    'uv run train.py --config=configs/default.py '
    '''--config.sweep="{'optim.name': ('adamw', 'soap'), 'protocol': 'equal_time'}"''': (
        'three steps are too few; tests/lm/study/plan/test_protocols.py has it'
    ),
    **{
        f'uv run {line}': 'tests/eval/convert/test_hf.py has a folder of theirs'
        for line in (
            'python -m eval.convert import-hf llama --out=runs/llama',
            'train.py --config=configs/default.py --config.train.init_from=runs/llama '
            '--config.data.source=text:mine.jsonl --workdir=runs/tuned',
            'python -m eval.convert export-hf --checkpoint=runs/tuned --out=tuned',
        )
    },
    **{
        f'uv run {line}': 'tests/test_tutorials.py has a model and conversations'
        for line in (
            'python -m eval.convert import-hf model --out=runs/model',
            'train.py --config=configs/default.py --config.train.init_from=runs/model '
            '--config.data.source=chat:chats.jsonl --config.data.packing=best_fit '
            '--config.data.mask_documents=True --workdir=runs/chat',
        )
    },
    'uv run python -m eval.convert prune --checkpoint=runs/merged --remove=important --share=0.1 '
    '--text=text:unwanted.txt --out=runs/pruned': 'tests/eval/convert/test_prune.py has a text',
    'uv run python -m eval.convert quantise --checkpoint=runs/merged --method=gptq --bits=4 '
    '--text=text:calibration.txt --out=runs/gptq4': (
        'tests/eval/convert/test_quantise.py has a text'
    ),
    'uv run python -m eval.convert prune --checkpoint=runs/merged --remove=unimportant '
    '--score=dual --share=0.5 --text=text:domain.txt --general=text:general.txt '
    '--out=runs/domain': 'tests/eval/convert/test_prune.py has two texts',
    **{
        f'uv run python -m {line}': 'tests/eval/convert/test_quantise.py has a model and a text'
        for line in (
            'eval.convert import-hf DIR --out=runs/llama',
            'eval.convert quantise --checkpoint=runs/llama --method=gptq --bits=4 --block=64 '
            '--text=text:calibration.txt --out=runs/llama4',
            'eval --checkpoint=runs/llama4 --suite=perplexity --perplexity.source=text:test.txt',
        )
    },
    'uv run python -m tests.bench.start': 'minutes',
    'uv run python -m eval.compare runs/small runs/large --figure=runs/differences.svg': (
        'tests/lm/study/tables/test_transfer.py has two sweeps'
    ),
    'uv run python -m tests.faults': 'half an hour',
    'uv run python -m eval.generate --checkpoint=runs/ln --interactive': (
        'it reads a terminal; tests/eval/test_programs.py types'
    ),
    'uv run python -m tests.bench.step': 'minutes',
    'uv run python -m tests.bench.nanogpt --checkout=nanoGPT --python=PYTHON': 'needs PyTorch',
    'uv run train.py --config=configs/optimizers.py --workdir=runs/optimizers': (
        'tests/test_readme.py has it'
    ),
    **{
        'uv run train.py --config=configs/default.py --workdir=/shared/runs/mine '
        f'--coordinator=node0:1234 --num_processes=2 --process_id={i}': 'tests/lm/launch has it'
        for i in range(2)
    },
    'uv run python -m eval.convert import-hf llama --out=/shared/llama '
    '--coordinator=node0:1234 --num_processes=2 --process_id=0': 'tests/lm/launch has it',
    'uv run train.py --config=configs/default.py --config.mesh.tensor=2 --config.mesh.context=2': (
        'four devices or more; tests/lm/devices/test_meshes.py has them'
    ),
    'uv run python -m eval.coordinates --config=configs/default.py --config.scaling.name=mup '
    '--config.scaling.base_width=64 --widths=64,128,256,512 --out=page.html': (
        'minutes; tests/eval/test_coordinates.py has smaller models'
    ),
}
# Runs that nobody reads end where the step is lowered: to compile and to make it is 8 CPU-seconds
# each, and that each of these choices trains, tests/contracts show.
LOWERED = [
    f'uv run train.py --config=configs/{line}'
    for line in (
        'default.py --config.model.dropout=0.1 --config.model.attention_dropout=0',
        'default.py --config.mesh.axes=auto',
        'default.py --config.optim.name=muon --config.optim.lr=0.02 --config.optim.others_lr=3e-3',
        'default.py --config.optim.name=muon --config.optim.lr=0.018 --config.optim.others_lr=3e-3 '
        '--config.optim.match_norm=1.0 --config.model.reparam=normalize_and_project',
        'default.py --config.optim.average=schedule_free --config.optim.b1=0.0 '
        '--config.optim.schedule=constant',
        'default.py --config.optim.ghost_radius=1.0 --config.kernels.attention=reference',
        'default.py --config.optim.name=sven --config.optim.lr=0.1 --config.optim.others_lr=3e-3',
        'default.py --config.data.batch_size=64 --config.data.epochs=8 --config.mesh.axes=auto',
    )
]
PRELOADED = [  # before each command: most of what importing takes
    'eval.convert.fold',
    'eval.report.page',
    'eval.suites.perplexity',
    'lm.study.train.engines',
]


def commands() -> list[str]:
    """Returns the lines that are indented or behind a $, and commands quoted in a text, once
    each.
    """
    matches = re.findall(
        r'^(?:    |\$ )(uv .*|python .*|train\.py.*)$|`((?:uv|train\.py) [^`]+)`',
        TEXT,
        re.MULTILINE,
    )
    lines = [re.sub(r'\s+# .*', '', line or inline) for line, inline in matches]
    return list(dict.fromkeys(lines))


def blocks(language: str) -> list[str]:
    """Returns the blocks of a language, except files of modules/ and tests/, which
    tests/test_readme_parts.py writes.
    """
    code_blocks = re.findall(rf'^```{language}\n(.*?)^```$', TEXT, re.DOTALL | re.MULTILINE)
    return [block for block in code_blocks if not block.startswith(('# modules/', '# tests/'))]


def lower(program: Program, *_, **__) -> None:
    """Replaces the wave that would train: lowers the step, and ends the process."""
    jax.stages.Lowered.compile = lambda lowered: sys.exit(DONE)
    program.compile_step(1)


def run(words: list[str], code: str, folder: Path, log: Path, is_lowered: bool) -> None:
    """Runs the program `words`, or else `code`, in a separate process.

    The speed of a matrix product, which no page shows, is given: measuring it takes 0.55
    CPU-seconds for each program.
    """
    peaks.cached_gemm_flops = functools.cache(lambda size, dtype: 1e12)
    if is_lowered:
        wave.Wave = lower
    os.chdir(folder)
    with log.open('w') as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if code:
            exec(code, {'__name__': 'readme'})
            return
        sys.argv = words
        if words[0] == 'train.py':
            runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
        else:
            runpy.run_module(words[0], run_name='__main__', alter_sys=True)


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Returns a function (words, code='', is_lowered=False) -> (exit status, output), in
    tmp_path.
    """
    monkeypatch.setenv('GLIBC_TUNABLES', '')  # set: the program does not start itself again
    monkeypatch.setenv('XLA_FLAGS', ONE_DEVICE)  # one device, as a user has
    processes = multiprocessing.get_context('forkserver')
    processes.set_forkserver_preload([*PRELOADED, __name__])

    def run_program(words: list[str], code: str = '', is_lowered: bool = False) -> tuple[int, str]:
        log = tmp_path / 'log'
        process = processes.Process(target=run, args=(words, code, tmp_path, log, is_lowered))
        process.start()
        process.join(timeout=PATIENCE_SEC)
        process.kill()
        return process.exitcode, log.read_text()

    return run_program


def test_commands_are_found():
    lines = commands()
    assert 'uv run --no-dev train.py --config=configs/default.py' in lines
    assert len(lines) > 15 and LEFT_OUT.keys() | {*LOWERED} <= {*lines}
    assert len(blocks('python')) == 12


@pytest.mark.full  # minutes of programs
def test_every_command_works_as_printed(outcome, tmp_path):
    """In the order of the pages, since later lines read files of earlier ones. A command that is
    printed with an error ends with it.
    """
    (tmp_path / 'configs').mkdir()
    for file in (ROOT / 'configs').glob('*.py'):
        (tmp_path / 'configs' / file.name).symlink_to(file)
    (tmp_path / 'configs' / 'studies').symlink_to(ROOT / 'configs' / 'studies')
    for block in blocks('python'):
        if match := re.match(r'# (configs/\S+)\n', block):
            (tmp_path / match[1]).write_text(block)
    np.array([5, 6, 50256, 7, 50256], np.uint16).tofile(tmp_path / 'train.bin')
    (tmp_path / 'book.txt').write_text('a short text\n' * 9)
    pair = '{"sentence_good": "a text", "sentence_bad": "txet a"}\n'
    (tmp_path / 'pairs.jsonl').write_text(pair * 3)
    failed = {}
    for line in commands():
        if line in LEFT_OUT:
            continue
        status, printed = outcome(arguments(line), is_lowered=line in LOWERED)
        expected = expected_error(line)
        printed_text = ' '.join(printed.split())
        if (
            (status != 0)
            if expected is None
            else (status != 1 or not expected.search(printed_text))
        ):
            failed[line] = printed[-2000:]
    codes = [block for block in blocks('python') if not block.startswith('# configs/')]
    checks = ('', '', '', CHECKED, CHECKED_INTERVENTIONS, CHECKED_CURVES, '')
    for code, checked in zip(codes, checks, strict=True):
        status, printed = outcome([], code + checked)
        if status:
            failed[code] = printed[-2000:]
    assert not failed, '\n\n'.join(f'{line}\n{printed}' for line, printed in failed.items())


# What the block of "Checkpoints and results in Python" has to have made.
CHECKED = """
L, B, T, D = stream['after_mlp'].shape
assert (L, B, T, D) == (1, *tokens_BT.shape, 16) == stream['after_attention'].shape
assert stream['embedding'].shape == stream['final'].shape == (B, T, D)
assert logits_BTV.shape == (B, T, checkpoint.tokenizer.vocab_size)
assert jax.tree.structure(by_weight) == jax.tree.structure(checkpoint.weights.params)
assert by_activation.keys() == stream.keys()
assert len(runs) == 18 and set(runs.status) == {'done'}
"""
CHECKED_INTERVENTIONS = """
L, B, T, N, H = within['heads'].shape
assert (L, B, T) == (1, *tokens_BT.shape) == within['hidden'].shape[:3]
assert logits_BTV.shape == (B, T, checkpoint.tokenizer.vocab_size)
"""
CHECKED_CURVES = """
assert [*curves.columns] == ['layernorm', 'rmsnorm'] and curves.index[0] == 1
assert curves.notna().all(axis=None)
"""


def expected_error(line: str) -> re.Pattern | None:
    """Returns the error that a page shows below a line with a $, with ... for any text; None
    without one.
    """
    match = re.search(rf'^\$ {re.escape(line)}\n((?:.+\n)*?)```', TEXT, re.MULTILINE)
    if match is None:
        return None
    return re.compile(re.escape(' '.join(match[1].split())).replace(r'\.\.\.', '.*'))


def test_printed_folder_matches_default_config():
    name = f'runs/default-{digest(resolve(default.get_config()))}'
    assert f'{name} on ' in FRONT_PAGE and f'done: {name},' in FRONT_PAGE


def test_printed_table_matches_frame_columns():
    section = TEXT.split('\n## Checkpoints and results in Python\n')[1].split('\n## ')[0]
    rows = [line.split('|')[1] for line in section.splitlines() if line.startswith('| `')]
    listed = [name for row in rows for name in re.findall(r'`(\w+)`', row)]
    assert {*IDENTITY, *RESULTS} <= {*listed} <= {*IDENTITY, *RESULTS, *columns().values()}
    assert len(set(listed)) == len(listed)


def test_commands_with_published_splits_are_valid(monkeypatch):
    """Their texts are not here: the fields are, and each source is of a kind that can be read."""
    assert len(PUBLISHED_SPLITS) == 4
    for line in PUBLISHED_SPLITS:
        program, config, *flags = arguments(line, small=False)
        assert (program, config) == ('train.py', '--config=configs/default.py')
        raw = default.get_config()
        for flag in flags:
            path, _, value = flag.removeprefix('--config.').partition('=')
            raw.update_from_flattened_dict({path: value})
        fields = resolve(raw.to_dict()).data
        for source in (fields.source, fields.validation_source):
            with monkeypatch.context() as patch:
                patch.setitem(SOURCES, 'text', lambda argument, _: argument)
                patch.setitem(SOURCES, 'hub', lambda argument, _: argument)
                assert open_source(source, fields.text_field)
