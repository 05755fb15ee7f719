"""Contract: a command of another program is answered at once, with a command that works."""

import shlex
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import train
from lm.config.resolve import resolve
from lm.launch.command import parse_flags
from lm.launch.exit_status import BAD_INPUT
from lm.model.check import check
from lm.study.plan.cells import split_sweep
from tests import ROOT
from tests.commands import PATIENCE_SEC
from tests.mistakes import ANSWERED, NOT_HERE

CONFIG = '--config=configs/default.py'
OF_ALL = {mistake: flags for program in ANSWERED.values() for mistake, flags in program.items()}
ABSENT = {mistake: words for program in NOT_HERE.values() for mistake, words in program.items()}


@pytest.fixture(autouse=True)
def train_flags(monkeypatch):
    """Removes flags of programs that other tests have imported."""
    for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
        for flag in module_flags if module.startswith(('eval.', 'tpu.', 'tests.')) else ():
            monkeypatch.delitem(flags.FLAGS._flags(), flag.name, raising=False)


@pytest.fixture
def answer(monkeypatch, capsys):
    """answer(flags) returns the refusal, whose lines are joined."""
    monkeypatch.chdir(ROOT)

    def find_refusal(arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped, flagsaver.flagsaver():
            parse(CONFIG, *shlex.split(arguments))
        assert stopped.value.code == BAD_INPUT
        lines = capsys.readouterr().err.splitlines()
        assert [line.startswith('error: ') for line in lines] == [True, *[False] * (len(lines) - 1)]
        return ' '.join(lines)

    def parse(*arguments: str) -> None:
        monkeypatch.setattr(sys, 'argv', ['train.py', *arguments])
        parse_flags(sys.argv)

    return find_refusal


def assert_works(command: str) -> None:
    """Asserts that the flags parse, and that their config can be trained."""
    arguments = shlex.split(command)
    if not any(flag.startswith('--config=') for flag in arguments):
        arguments.insert(0, CONFIG)
    with flagsaver.flagsaver(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['train.py', *arguments])
        assert parse_flags(sys.argv) == ['train.py']
        check(resolve(split_sweep(train.CONFIG.value)[0]))


@pytest.mark.parametrize('command_line', OF_ALL)
def test_foreign_flag_suggests_equivalent(command_line, answer):
    message, _, command = answer(command_line).rpartition('Write ')
    words = [word for word in shlex.split(command_line) if word.startswith('--') or '=' in word]
    names = [word.partition('=')[0] for word in words]
    assert command == OF_ALL[command_line] and all(name in message for name in names)
    assert_works(command)


@pytest.mark.parametrize('command_line', ABSENT)
def test_absent_feature_suggests_alternative(command_line, answer):
    (words, command), message = ABSENT[command_line], answer(command_line)
    assert words in message and 'Did you mean' not in message
    for flag in shlex.split(command):
        assert flag.partition('=')[0].removeprefix('--').removeprefix('config.') in message
    assert_works(command)


def test_bare_field_suggests_config_flag(answer):
    assert answer('--data.seed=3').endswith('Write --config.data.seed=3')  # seed alone: train.seed


@pytest.mark.parametrize(
    ('command_line', 'ending'),
    [
        ('--warmup_step=10', 'Did you mean --config.optim.warmup_steps=10?'),
        ('--learning-rat=1e-3', 'Did you mean --config.optim.lr=1e-3?'),
        ('--lrr=1e-3', 'A similar name is --config.optim.lr.'),
        ('--second_lr=0.02', 'A similar name is --config.optim.lr.'),
        ('--second_lr=fast', '--second_lr is not a flag here.'),  # no rate
        ('--eval_batch=-1', '--eval_batch is not a flag here.'),  # eval_batches is 0 at least
        ('--sharding_strategy=fsdp', '--sharding_strategy is not a flag here.'),
        ('--target_modules=q,v', '--target_modules is not a flag here.'),
        ('--name=lion', 'Write --config.optim.name=lion'),  # the table that has it
        ('--order_seed=3', 'A similar name is --config.data.seed or --config.train.seed.'),
        ('--mesh.data=2', 'Write --config.mesh.data=2'),  # alone, data is a source
        ('--dataset=./c4', '(or .txt, .jsonl).'),
        ('--mesh.run=2', 'Write --config.mesh.run=2'),  # alone, run is the name of a run
        ('--beta1=2', 'optim.b1 must be at least 0 and below 1; got 2.0.'),
        ('--n_layer=many', "model.n_layers must be a whole number; got 'many'."),
        ('--learning_rate=1e-3 --min_lr=-1', 'Write --config.optim.lr=1e-3'),
        ('--pretrained', '--config.train.init_from, but it needs a value.'),
        ('--dataset_path=allenai/c4', '(or .txt, .jsonl).'),
        ('--dataset_path=./c4', 'Write --config.data.source=text:./c4'),
        ('--wandb --use_wandb', 'writes a page.'),
    ],
)
def test_suggested_value_is_one_of_the_field(command_line, ending, answer):
    message = answer(command_line)
    assert message.endswith(ending) and message.count('nothing is sent') <= 1
    assert 'hub:text:' not in message and 'hub:.' not in message and '=...' not in message


@pytest.mark.full
@pytest.mark.parametrize(
    ('program', 'message'),
    [
        ('eval --checkpoint=runs/x', '--suite=NAME[,NAME] is required. Suites:'),
        ('eval.generate --checkpoint=runs/x --max_new_tokens=50', 'Write --tokens=50'),
        ('eval.generate --checkpoint=runs/x --max_tokens=50', 'A similar name is --tokens.'),
        ('eval.generate --model_name_or_path=runs/x', '--model_name_or_path is not a flag here.'),
    ],
)
def test_programs_without_config_suggest_too(program, message):
    command = [sys.executable, '-m', *shlex.split(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC)
    lines = done.stderr.splitlines()
    assert done.returncode == BAD_INPUT and message in lines[0]
    assert all(line.startswith('  ') for line in lines[1:])  # the list of suites
