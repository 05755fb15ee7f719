"""The launch command: refusals before anything runs, and restarts of jobs."""

import dataclasses
import signal
import subprocess
import sys
import threading

import pytest

from lm.launch import streams
from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, RESUME, SIGNALLED
from tpu import launch
from tpu.launchers import base, ray

CONFIG = '--config=configs/default.py'
TRAIN = ['--', 'train.py', CONFIG, '--workdir=/shared/run']
GCLOUD = ['--engine=gcloud', '--zone=z', '--accelerator_type=v6e-16', '--runtime_version=r']
XPK = ['--engine=xpk', '--cluster=c', '--accelerator_type=v6e-16', '--image=i']
SLURM = ['--engine=slurm', '--nodes=1']


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--engine=slrm', *TRAIN], "--engine must be one of gcloud, ray, slurm, xpk; got 'slrm'."),
        (['--engine=slrm', *TRAIN], "Did you mean 'slurm'?"),
        (TRAIN, '--engine is missing: one of gcloud, ray, slurm, xpk'),
        (SLURM, 'the training is missing: ... -- train.py --config='),
        (
            [*SLURM, '--', 'uv', 'run', 'train.py', CONFIG],
            "must begin with train.py; got 'uv'. The program that runs it on the hosts is",
        ),
        ([*SLURM, '--', 'train.py'], 'train.py needs --config=PATH'),
        (
            [*SLURM, '--', 'train.py', '--config', 'configs/no.py'],
            '--config=configs/no.py is no file here',
        ),
        (['--engine=slurm', *TRAIN], '--engine=slurm needs --nodes (Number of nodes)'),
        (
            ['--engine=gcloud', '--zone=z', *TRAIN],
            '--engine=gcloud needs --accelerator_type (TPU version',
        ),
        (
            ['--engine=gcloud', '--zone=z', *TRAIN],
            '--runtime_version (Software version of the TPU VMs',
        ),
        (
            [*SLURM, '--zone=z', *TRAIN],
            '--zone is not read by --engine=slurm, which reads --nodes,',
        ),
        (['--engine=slurm', '--nodes=0', *TRAIN], '--nodes must be at least 1; got 0.'),
        (['--engine=slurm', '--nods=1', *TRAIN], "Unknown command line flag 'nods'"),
        ([*SLURM, 'x', *TRAIN], 'flags begin with --, as in --engine=slurm'),
        ([*SLURM, '--logs=a b', *TRAIN], '--logs must have no blank'),
        ([*SLURM, *TRAIN, '--process_id=1'], '--process_id identifies a host'),
        ([*GCLOUD, *TRAIN[:3]], 'needs train.py --workdir=... on storage that'),
        ([*XPK, *TRAIN[:3]], 'needs train.py --workdir=... on storage that'),
        ([*XPK, '--name=A_b', *TRAIN], '--name must be at most 40 lowercase'),
        ([*SLURM, f'--name={"a" * 41}', *TRAIN], '--name must be at most 40 lowercase'),
        ([*XPK, '--cluster=C', *TRAIN], '--cluster must be at most 40 lowercase'),
        (
            [*GCLOUD, '--accelerator_type=tpu7x-16', *TRAIN],
            'TPU7x is to be had through GKE alone: take --engine=xpk.',
        ),
        ([*XPK, *TRAIN, 'a\nb'], 'no flag may have a line break'),
        ([*XPK, '--slices=0', *TRAIN], '--slices must be at least 1; got 0.'),
        (['--engine=ray', *TRAIN], '--engine=ray needs --nodes=N, or --topology=4x4'),
        (
            ['--engine=ray', '--topology=4x4', *TRAIN],
            '--topology=4x4 and --accelerator_version=v6e',
        ),
        (['--engine=ray', '--nodes=1', '--resources=GPU', *TRAIN], '--resources must be such as'),
        (['--engine=ray', '--nodes=2', '--slices=2', *TRAIN], '--slices is of --topology'),
        (['--engine=ray', '--nodes=1', '--max_restarts=-1', *TRAIN], 'flag --max_restarts=-1'),
    ],
)
def test_invalid_launch_runs_nothing(argv, message, capsys, monkeypatch):
    def fail(*_, **__):
        raise AssertionError('something ran')

    monkeypatch.setattr(subprocess, 'Popen', fail)
    assert launch.main(argv) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith('error: ') and message in error


@pytest.mark.parametrize(
    ('flags', 'program', 'advice'),
    [
        (GCLOUD, 'gcloud', 'https://cloud.google.com/sdk/docs/install'),
        (XPK, 'xpk', 'pip install xpk'),
        (XPK, 'kubectl', 'gcloud components install kubectl'),
        (SLURM, 'sbatch', 'slurm-client'),
    ],
)
def test_missing_program_is_named(flags, program, advice, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert launch.main([*flags, *TRAIN]) == BAD_INPUT
    error = capsys.readouterr().err
    assert f'{program}, which is not installed here' in error and advice in error
    assert launch.main([*flags, '--dry_run', *TRAIN]) == DONE


def test_missing_ray_names_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(base.importlib.util, 'find_spec', lambda name: None)
    assert launch.main(['--engine=ray', '--nodes=1', *TRAIN]) == BAD_INPUT
    assert 'pip install "evenkeel[cluster]"' in capsys.readouterr().err


def test_command_imports_no_jax():
    """JAX would cost seconds, and claim the TPU of a launcher that runs on one."""
    program = (
        'import sys, tpu.launch; '
        "assert not {'jax', 'ray', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, '-c', program], check=True)


@pytest.mark.parametrize('engine', ['slurm', 'ray'])
def test_job_survives_lost_output_and_terminal(engine, monkeypatch):
    """Catches a launcher that stops 256 chips because a pipe was closed, or a connection broke.

    Hosts on Ray end with the launcher, so there a hangup stops them after a checkpoint.
    """
    calls = []
    monkeypatch.setattr(streams, 'ignore_output_loss', lambda: calls.append('outlives'))
    monkeypatch.setattr(base, 'check_installed', lambda *_: None)

    def supervise(*_):
        calls.append(signal.getsignal(signal.SIGHUP))
        return DONE

    monkeypatch.setattr(base, 'supervise', supervise)
    monkeypatch.setattr(ray, '_connect', lambda address: None)
    original = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert launch.main([f'--engine={engine}', '--nodes=1', *TRAIN]) == DONE
    finally:
        signal.signal(signal.SIGHUP, original)
    output_call, sighup_handler = calls
    assert output_call == 'outlives' and (sighup_handler == signal.SIG_DFL) == (engine == 'slurm')


def test_help_works_without_docstrings():
    command = [sys.executable, '-OO', '-m', 'tpu.launch', '--help']
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith('Starts a training on every host')


def test_options_are_flags_with_help(capsys):
    assert launch.main(['--help']) == DONE
    help_text = capsys.readouterr().out
    assert 'Starts a training on every host' in help_text
    for engine in launch.ENGINES.values():
        for field in dataclasses.fields(engine.options):
            assert f'{field.name}:' in help_text
            assert field.metadata['words'].endswith('.')


def test_dry_run_spellings_and_missing_dashes(capsys):
    """--dry-run is accepted as in other launchers, and so is a missing --."""
    outputs = []
    for argv in (['--dry_run', '--', 'train.py', CONFIG], ['--dry-run', 'train.py', CONFIG]):
        assert launch.main([*SLURM, *argv]) == DONE
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and 'srun' in outputs[0]


def test_job_name_depends_on_command_only():
    config = 'configs/Long_name of.one_experiment_or_other.py'
    name = launch.job_name(['a b'], config)
    assert name == launch.job_name(['a b'], config)
    assert name != launch.job_name(['a', 'b'], config)
    assert name.startswith('long-name-of-one-ex') and len(name) <= 28
    assert launch.job_name([], '2024.py').startswith('run-2024-')


@dataclasses.dataclass
class PlayedLaunch:
    """Ends with each of `statuses` in turn; None: with 143, at the third poll after a stop."""

    statuses: list
    restarts: int = 3
    submitted: int = 0
    stopped: int = 0
    closed: int = 0
    looks: int = 0

    def submit(self):
        self.submitted += 1

    def poll(self):
        status = self.statuses[self.submitted - 1]
        self.looks += bool(self.stopped)
        return 143 if status is None and self.looks == 3 else status

    def stop(self):
        self.stopped += 1

    def close(self):
        self.closed += 1

    def stop_commands(self):
        return [['kill', 'it']]


@pytest.mark.parametrize(
    ('statuses', 'status', 'n_submitted'),
    [
        ([0], DONE, 1),
        ([BAD_INPUT], BAD_INPUT, 1),
        ([DIVERGED], DIVERGED, 1),
        ([126], 126, 1),
        ([127], 127, 1),  # no such command
        ([RESUME, 143, 134, 255, 0], 255, 4),  # after three restarts
        ([RESUME, 143, 0], DONE, 3),
        ([130, BAD_INPUT], BAD_INPUT, 2),
        ([RESUME] * 4, RESUME, 4),
    ],
)
def test_resumable_statuses_restart(statuses, status, n_submitted):
    messages = []
    played = PlayedLaunch(statuses)
    assert base.supervise(played, [], messages.append) == status
    assert (played.submitted, played.closed) == (n_submitted, 1)
    assert sum('restart' in line and 'of at most 3' in line for line in messages) == n_submitted - 1


def test_scheduler_restarted_job_is_submitted_once():
    played = PlayedLaunch([RESUME], restarts=0)
    messages = []
    assert base.supervise(played, [], messages.append) == RESUME and played.submitted == 1
    assert messages == ['Ctrl-C stops it after a checkpoint; so does: kill it']


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_job_once_and_sets_status(number):
    played, caught = PlayedLaunch([None]), []
    threading.Timer(0.1, caught.append, [number]).start()
    assert base.supervise(played, caught, lambda text: None) == SIGNALLED + number
    assert (played.submitted, played.stopped, played.closed) == (1, 1, 1)


def test_job_that_ends_while_stopping_is_done():
    played = PlayedLaunch([0])
    assert base.supervise(played, [signal.SIGTERM], lambda text: None) == DONE


def test_signal_between_restarts_ends_launch(monkeypatch):
    """The pause before the job is submitted again is cut short."""
    played, caught = PlayedLaunch([RESUME, 0]), []
    threading.Timer(0.1, lambda: caught.append(signal.SIGTERM)).start()
    monkeypatch.setattr(base, 'PAUSE_SEC', 60.0)
    assert base.supervise(played, caught, lambda text: None) == 143
    assert (played.submitted, played.closed) == (1, 1)


@pytest.mark.parametrize(
    ('statuses', 'status'),
    [([], 0), ([0, 0], 0), ([143, 1, 137], 1), ([0, 42, 143], 42), ([0, 143], 143), ([42, 2], 2)],
)
def test_statuses_are_combined(statuses, status):
    assert base.combine_statuses(statuses) == status
