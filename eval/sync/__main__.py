"""Sends the records of a run, or of every cell of a sweep, to W&B or MLflow.

    python -m eval.sync --workdir=DIR --to=mlflow|wandb
        [--uri=URI] [--project=NAME] [--follow]

Sends the config, the rows of metrics.jsonl and the summary, while the run
trains or at any later time. The workdir records the last step sent, so
repeating the command sends only new rows. `train.py --track=mlflow` does the
same during training.

Without --uri, MLflow uses $MLFLOW_TRACKING_URI. For W&B, --uri is a private
server or 'offline'.
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

import os
import select
import sys
from pathlib import Path

from absl import app, flags

from eval.sync import follower
from eval.sync.trackers import make_tracker
from lm.launch import streams
from lm.launch.exit_status import BAD_INPUT, DONE
from lm.launch.path_flags import define_path
from lm.launch.program_help import print_program_help
from lm.record.metrics import FILE
from lm.record.run import list_runs

BELOW_TRAINING = 10  # niceness


def say(text: str) -> None:
    print(text, flush=True)


def wait_for_eof(seconds: float) -> bool:
    """Waits some seconds, or until the training process has ended and its pipe is closed."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def main() -> int:
    """Sends or follows, depending on the flags, and returns the exit status."""
    args = flags.FLAGS
    if not args.workdir or not args.to:
        raise ValueError('--workdir=DIR and --to=mlflow or --to=wandb are required')
    if '://' in args.workdir:
        raise ValueError(
            f'--workdir must be on a disk, where the last step sent is recorded; got '
            f'{args.workdir}. For a run in a bucket, use train.py --track.'
        )
    workdir = Path(args.workdir)
    if not args.until_eof:
        check(workdir, args.follow)
    target = make_tracker(args.to, args.uri, args.project)
    with follower.hold_follower_lock(workdir, args.to, target.destination):
        sender = follower.Follower(workdir, args.to, target, say)
        if args.until_eof:
            os.nice(BELOW_TRAINING)
            is_sent = follower.follow(sender, wait_for_eof)
        elif args.follow:
            is_sent = follower.follow(sender, follower.Watch(workdir))
        else:
            is_sent = follower.send_all(sender)
    say(f'{args.to}: {describe_sent(sender)} to {target.destination}')
    return DONE if is_sent else BAD_INPUT


def describe_sent(sender: follower.Follower) -> str:
    """Returns '4 steps of 2 runs sent (1 run incomplete)'."""
    steps, runs, incomplete = (
        f'{n:,} {noun}' + 's' * (n != 1)
        for n, noun in ((sender.sent, 'step'), (sender.runs, 'run'), (len(sender.errors), 'run'))
    )
    return f'{steps} of {runs} sent' + (f' ({incomplete} incomplete)' if sender.errors else '')


def check(workdir: Path, may_come_later: bool) -> None:
    """Raises ValueError if there is nothing to send. may_come_later: rows may appear later."""
    runs = list_runs(workdir)
    if not runs:
        raise ValueError(
            f'{workdir} contains no run and no sweep; set --workdir to a workdir of train.py'
        )
    if not may_come_later and not any((tracked.folder / FILE).exists() for tracked in runs):
        raise ValueError(f'{workdir} has no {FILE} yet. To wait for it, add --follow.')


def run(argv: list[str]) -> None:
    streams.ignore_output_loss()  # after training was killed, its last rows are still sent
    try:
        if len(argv) > 1:
            raise ValueError(f'flags must begin with --, as in --to=mlflow; got {argv[1]!r}')
        status = main()
    except (ValueError, OSError) as error:
        # Training forwards standard output; libraries write to standard error.
        stream = sys.stdout if flags.FLAGS.until_eof else sys.stderr
        print(f'error: {error}', file=stream, flush=True)
        status = BAD_INPUT
    except KeyboardInterrupt:
        print('\nInterrupted. Run the same command to send the rest.', file=sys.stderr)
        status = 130
    sys.exit(status)


if __name__ == '__main__':
    define_path('workdir', None, 'Workdir of a run or a sweep.')
    flags.DEFINE_string('to', None, 'Tracker: mlflow or wandb.')
    flags.DEFINE_string('uri', None, 'Server or database, such as sqlite:///mlflow.db.')
    flags.DEFINE_string(
        'project', None, 'W&B project, ENTITY/PROJECT, or MLflow experiment; default: evenkeel.'
    )
    flags.DEFINE_bool('follow', False, 'Keep sending until the run has ended.')
    flags.DEFINE_bool('until_eof', False, 'Follow until standard input closes; used by train.py.')
    print_program_help()
    app.run(run)
