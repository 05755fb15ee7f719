"""Contract: the published command lines of other programs are answered, and the answers lead to a
command that trains.
"""

import functools
import shlex
import textwrap

import pytest
from absl import flags

from lm.config.fields import FIELDS
from lm.data.sources import SOURCES
from lm.launch.command import explain_refusal
from tests import ROOT
from tests.lm.config import published
from tests.lm.config.published import (
    SNAPSHOT,
    assert_trains,
    find_refusal,
    list_proposals,
    read_commands,
    render,
    split_arguments,
    walk,
)

MAX_UNANSWERED = 0.01


@pytest.fixture(autouse=True)
def train_flags(monkeypatch):
    """Removes flags of programs that other tests have imported."""
    monkeypatch.chdir(ROOT)
    for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
        for flag in module_flags if module.startswith(('eval.', 'tpu.', 'tests.')) else ():
            if not module.startswith('eval.console'):
                monkeypatch.delitem(flags.FLAGS._flags(), flag.name, raising=False)


@functools.cache
def walks() -> dict[str, published.Walk]:
    """Returns {command line: its walk}."""
    return {command.arguments: walk(command.arguments) for command in read_commands()}


def test_command_lines_cover_the_programs():
    """A page that is left out by mistake."""
    commands = list(read_commands())
    assert len(commands) > 120 and len({command.program for command in commands}) >= 12
    assert len({command.arguments for command in commands}) == len(commands)


def test_answers_end_in_a_command_that_trains():
    """A circle: advice that is refused, or a config that cannot be resolved."""
    ends = {steps.last for steps in walks().values()}
    for end in ends:
        assert find_refusal(end) == '', end
        assert_trains(end)


def test_nearly_all_arguments_are_answered():
    count = sum(len(split_arguments(shlex.split(arguments))) for arguments in walks())
    unanswered = [name for steps in walks().values() for name in steps.unanswered]
    assert count > 600 and len(unanswered) <= MAX_UNANSWERED * count, unanswered


def test_one_answer_is_enough():
    """An answer for each flag alone would take as many tries as there are flags."""
    assert {len(steps.answers) for steps in walks().values()} <= {0, 1}


def test_proposed_values_are_accepted():
    """A made-up field, a value out of bounds, a source of no kind."""
    answers = [answer for steps in walks().values() for answer in steps.answers]
    proposals = set().union(*map(list_proposals, answers))
    assert len(proposals) > 100 and {path for path, _ in proposals} <= FIELDS.keys()
    assert [pair for pair in proposals if explain_refusal(*pair)] == []
    sources = {text.partition(':')[0] for path, text in proposals if path == 'data.source'}
    assert sources and sources <= SOURCES.keys()
    tokenizers = {text.partition(':')[0] for path, text in proposals if path == 'data.tokenizer'}
    assert tokenizers <= {'bpe', 'byte', 'hf'}


def test_snapshot_holds_the_answers():
    """An answer that changes unseen: python -m tests.lm.config.published writes them anew."""
    assert SNAPSHOT.read_text(encoding='utf-8') == render(walks().__getitem__)


@pytest.mark.parametrize(
    ('arguments', 'flags_here'),
    [
        # nanoGPT's accumulation counts all devices, and those of others each device's.
        ('--batch_size 12 --gradient_accumulation_steps 40', 'batch_size=480 microbatches=40'),
        (
            '--nproc_per_node=8 --batch_size=12 --gradient_accumulation_steps=40',
            'batch_size=480 microbatches=5',
        ),
        ('--per_device_train_batch_size 4 --nproc_per_node 8', 'batch_size=32'),
        (
            '--micro_batch_size 2 --gradient_accumulation_steps 4 --nproc_per_node=8 --nnodes=2',
            'batch_size=128 microbatches=4',
        ),
        (
            '--train.global_batch_size 512 --train.micro_batch_size 4 --devices 8',
            'batch_size=512 microbatches=16',
        ),
        ('--total-batch-size=524288 --max-seq-len=2048', 'batch_size=256'),
        (
            '--nproc_per_node=8 --micro-batch-size 1 --global-batch-size 64 '
            '--tensor-model-parallel-size 4',
            'batch_size=64 microbatches=32',
        ),
        (
            '--total-batch-size=16384 --max-seq-len=512 --device-batch-size=2 --nproc_per_node=8',
            'batch_size=32 microbatches=2',
        ),
        (
            '--batch_size=8 --block_size=1000 --train.max_tokens 10_000_000 --eval-tokens=80000',
            'steps=1250 eval_batches=10',
        ),
        ('--train_batch_size=64 --gradient_accumulation_steps=4', 'batch_size=64 microbatches=4'),
    ],
)
def test_batches_are_converted(arguments, flags_here):
    """A batch of a device, or of a microbatch, that is taken for that of a step."""
    (answer,) = walk(arguments).answers
    values = dict(word.rpartition('.')[2].split('=') for word in answer.split('Write ')[1].split())
    expected = dict(pair.split('=') for pair in flags_here.split())
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ('arguments', 'words', 'refused'),
    [
        ('--model.type=mamba', 'Mamba and RWKV, are not supported', 'configs/'),
        ('--model_type mamba2-1.3b', 'Mamba and RWKV, are not supported', 'configs/'),
        ('--model_type=t5-small', 'with an encoder', 'configs/'),
        ('--model_name=deepseek2-16b', 'for another size, set', 'Write'),
        ('--model_name mixtral_8x7b', 'for another size, set', 'Write'),
        ('--model_size=large', 'for another size, set', 'Write'),
        ('--model.flavor=70B', 'for another size, set', 'Write'),
        ('--use_dpo=1', 'preference optimization', 'Write'),
        ('--temperature 0.7', 'python -m eval.generate', 'readout_temperature'),
        ('--dataset_name=oscar', 'hub:OWNER/NAME', 'source=oscar'),
        ('--model_name_or_path roberta-base', 'import-hf', 'init_from=roberta'),
        ('microsoft/phi-2 --optimizer.lr 0.005', 'import-hf', 'phi-2=phi'),
        ('--checkpoint=https://host/step1', 'fetch this one first', 'Write'),
        ('--save-folder=/b --work-dir=/a', 'Write --workdir=/b', 'workdir=/a'),
        ('--checkpoint_dir=/a --out_dir=/b', 'Write --workdir=/b', 'workdir=/a'),
        ('--eval.max_iters=100', 'eval_batches=100', 'train.steps'),
        ('--profiling.run=x', 'is not a flag here', 'workdir'),
        ('--logging.log_dir=logs', 'is not a flag here', 'log_dir=logs'),
        ('--dataset_name /data/x.jsonl', 'source=text:/data/x.jsonl', 'source=/data'),
        ('--dataset_name x.csv', '--config.data.source=text:x.csv', 'hub:'),
        ('--eval_file x.json', '--config.data.validation_source=text:x.json', 'Did you mean'),
        ('--swiglu', 'Write --config.model.activation=swiglu', 'not a flag here. A'),
        ('attention=cudnn_flash_te', 'splash (TPU)', 'Write'),
        ('tutorial-run-01', 'flags begin with --', 'Write'),
    ],
)
def test_absent_feature_names_no_other(arguments, words, refused):
    """Another architecture, or a field with another meaning, offered as if it would do."""
    (answer,) = walk(arguments).answers
    assert words in answer and refused not in answer


FILES = {
    'train_shakespeare.py': (
        """
        import time
        out_dir = 'out-shakespeare'
        batch_size = 12
        gradient_accumulation_steps = 5 * 8
        wandb_run_name = 'run' + str(time.time())
        decay_lr = False
        """,
        'a config of nanoGPT',
        {'--workdir=out-shakespeare', '--config.data.batch_size=480'}
        | {'--config.train.microbatches=40', '--config.optim.schedule=constant'},
    ),
    'train.toml': (
        """
        [training]
        steps = 1000
        seq_len = 8192
        [model]
        flavor = "8B"
        [checkpoint]
        enable = false
        """,
        'a config of torchtitan',
        {'--config=configs/llama_8b.py', '--config.train.steps=1000'}
        | {'--config.data.seq_len=8192', '--config.train.checkpoint_every=0'},
    ),
    'lora.yml': (
        """
        base_model: NousResearch/Llama-3.2-1B
        datasets:
          - path: teknium/GPT4-LLM-Cleaned
            type: alpaca
        adapter: lora
        lora_r: 16
        warmup_steps: 10
        wandb_entity:
        """,
        'a config of axolotl',
        {'--config.model.reparam=lora', '--config.train.trainable=lora'}
        | {'--config.reparam.rank=16', '--config.optim.warmup_steps=10'},
    ),
    'broken.yaml': ('a: [', 'a config of another program', {'--config=configs/default.py'}),
}


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('form', ['{}', '--config={}', '--config_path {}', 'config={}'])
def test_config_file_is_answered_with_its_settings(name, form, tmp_path):
    """A file of another program that is executed, or answered without its settings."""
    text, program, expected = FILES[name]
    (tmp_path / name).write_text(textwrap.dedent(text))
    steps = walk(form.format(tmp_path / name))
    (answer,) = steps.answers
    assert program in answer and 'docs/guide/config.md' in answer
    assert expected <= {*steps.last} and not set(steps.unanswered) - {'--datasets.type'}
    assert_trains(steps.last)


def test_config_file_that_names_itself_is_read_once(tmp_path):
    (tmp_path / 'a.yaml').write_text(f'config: {tmp_path}/a.yaml\nmax_iters: 3\n')
    assert '--config.train.steps=3' in walk(f'{tmp_path}/a.yaml').last


def test_our_config_is_taken(tmp_path):
    (tmp_path / 'mine.py').write_text('steps = 3\ndef get_config():\n    return None\n')
    assert find_refusal([f'--config={tmp_path}/mine.py']) == ''
    answer = find_refusal([f'{tmp_path}/mine.py'])
    assert f'pass the config as --config={tmp_path}/mine.py' in answer
