"""An allocation of SLURM: a batch script that starts one task, or several, on every node.

    python -m tpu.launch --engine=slurm --nodes=4 --submit_flags='--gres=gpu:8 --time=24:00:00' \\
        -- train.py --config=... --workdir=...

The job restarts by itself: SLURM queues it again when it is preempted or a node fails, and its
script does for 42 and 128 + n, at most --max_restarts times in all. So the launcher may go away:
given again, the same command finds the job and shows what it says.

What is asked how often: the job, every LOOK_SEC, for as long as it waits in the queue or runs;
SLURM remembers its status for MinJobAge (300 s by default) after its end. A job that is queued
again waits for AuthInfo=cred_expire (120 s by default). LIMIT_SEC before its time limit the hosts
are asked to save a checkpoint, and the job goes on in a new allocation.

Sources: slurm.schedmd.com/sbatch.html, srun.html, scontrol.html, scancel.html.
"""

import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lm.run.statuses import RESUME, SIGNALLED
from tpu.launchers import base
from tpu.launchers.base import Engine, Job, option

LOOK_SEC = 10.0
LIMIT_SEC = 120
MOST_FAILURES = 60  # of scontrol in a row
INSTALL = 'run this on a login node of the cluster (Debian: apt-get install slurm-client)'
ENDED = (  # of `JobState`; a job that is queued again has none of them
    'BOOT_FAIL',
    'CANCELLED',
    'COMPLETED',
    'DEADLINE',
    'FAILED',
    'NODE_FAIL',
    'OUT_OF_MEMORY',
    'PREEMPTED',
    'TIMEOUT',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    nodes: int = option('Nodes of the job.')
    tasks_per_node: int = option(
        'Processes on each: 1 for all its devices, or one for each GPU.', 1
    )
    folder: str = option('Folder of this repository on the nodes; default this one.', '')
    logs: str = option(
        'Folder for what the job says, on a disk that this machine sees.', 'runs/slurm'
    )
    submit_flags: str = option('More flags, for sbatch, such as --partition=gpu --gres=gpu:8.', '')


def output(job: Job, options: Options, number: str = '%j') -> Path:
    return Path(options.logs).absolute() / f'{job.name}-{number}.out'


def batch(job: Job, options: Options) -> str:
    """The batch script. srun leaves the tasks to end by themselves: they watch each other, and one
    that it killed as another had failed would turn status 1, which is final, into 137.
    """
    tasks = '--kill-on-bad-exit=0 --wait=0'
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={options.nodes}
#SBATCH --ntasks-per-node={options.tasks_per_node}
#SBATCH --output={output(job, options)}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{LIMIT_SEC}
cd {shlex.quote(options.folder or os.getcwd())} || exit 1
srun {tasks} {job.command('uv run')}
status=$?
if (( status == {RESUME} || status > {SIGNALLED} )) &&
        (( ${{SLURM_RESTART_COUNT:-0}} < {job.max_restarts} )); then
    if scontrol requeue "$SLURM_JOB_ID"; then
        echo "status $status: queued again" >&2
        sleep 60  # until that ends this script
    else
        echo "status $status: not queued again by its script" >&2
    fi
fi
exit $status
"""


def submit(options: Options) -> list[str]:
    """Takes the batch script on stdin."""
    return ['sbatch', '--parsable', *shlex.split(options.submit_flags)]


def find(job: Job) -> list[str]:
    """The numbers of this user's jobs of that name which have not ended."""
    return ['squeue', '--me', '--noheader', f'--name={job.name}', '--format=%i']


def look(number: str) -> list[str]:
    return ['scontrol', 'show', 'job', '--oneliner', number]


def hold(number: str) -> list[str]:
    """Neither SLURM nor its script queues the job again from here on."""
    return ['scontrol', 'update', f'JobId={number}', 'Requeue=0']


def signal(number: str) -> list[str]:
    """SIGTERM to the tasks, and not to the batch script, which tells their status."""
    return ['scancel', '--signal=TERM', number]


def fields_of(said: str) -> dict[str, str]:
    """{'JobState': 'RUNNING', ...} of scontrol's line."""
    return dict(re.findall(r'(\w+)=(\S*)', said))


def status_of(fields: dict[str, str]) -> int | None:
    """None until the job has ended; a job that SLURM ended without an exit status goes on."""
    if fields.get('JobState') not in ENDED:
        return None
    code, _, number = fields.get('ExitCode', '0:0').partition(':')
    if int(code) or fields['JobState'] == 'COMPLETED':
        return int(code)
    return SIGNALLED + int(number) if int(number or 0) else RESUME


def script(job: Job, options: Options) -> str:
    """What runs, in order, as lines for a shell."""
    return '\n'.join(
        [
            f'mkdir -p {shlex.quote(str(output(job, options).parent))}',
            '# unless it is in the queue already:',
            shlex.join(find(job)),
            f"{shlex.join(submit(options))} <<'END'",
            batch(job, options) + 'END',
            f'# every {LOOK_SEC:.0f} s, with the number that sbatch said:',
            shlex.join(look('NUMBER')),
            f'tail -F {shlex.quote(str(output(job, options, "NUMBER")))}',
            '# to stop it after a checkpoint:',
            f'{shlex.join(hold("NUMBER"))} && {shlex.join(signal("NUMBER"))}',
            '',
        ]
    )


def check(job: Job, options: Options) -> None:
    for name in ('nodes', 'tasks_per_node'):
        if getattr(options, name) < 1:
            raise ValueError(f'--{name} must be at least 1; got {getattr(options, name)}.')
    if re.search(r'[\s%\\]', str(output(job, options, '1'))):
        raise ValueError(
            f'--logs must have no blank, % or backslash, as SLURM reads them; got {options.logs!r}.'
        )


class Launch:
    """A job of SLURM, which restarts by itself, and the file of what it says."""

    restarts = 0

    def __init__(self, job: Job, options: Options, caught: list[int], say: Callable[[str], None]):
        self.job, self.options, self.caught, self.say = job, options, caught, say
        self.number, self.state = '', ''
        self.offset = self.failures = 0
        self.looked = 0.0

    def submit(self) -> None:
        """Finds the job in the queue, or puts it there."""
        output(self.job, self.options).parent.mkdir(parents=True, exist_ok=True)
        if found := base.must(find(self.job)).split():
            self.number = found[0]
            self.say(f'job {self.number} of that name is there already')
            return
        said = base.must(submit(self.options), batch(self.job, self.options))
        self.number = said.strip().split(';')[0]  # NUMBER;CLUSTER where there are several
        self.say(f'job {self.number}; it says: {self._file()}')

    def _file(self) -> Path:
        return output(self.job, self.options, self.number)

    def _pass_on(self) -> None:
        try:
            with self._file().open(errors='replace') as file:
                file.seek(self.offset)
                sys.stdout.write(file.read())
                self.offset = file.tell()
        except FileNotFoundError:
            return  # it has not begun
        sys.stdout.flush()

    def poll(self) -> int | None:
        self._pass_on()
        if self.looked and time.monotonic() - self.looked < LOOK_SEC:
            return None
        self.looked = time.monotonic()
        fields = self._look()
        if fields.get('JobState', self.state) != self.state:
            self.state = fields['JobState']
            reason = fields.get('Reason', 'None')
            because = f' ({reason})' if reason != 'None' else ''
            self.say(
                f'job {self.number} is {self.state}{because}, {fields.get("Restarts", 0)} restarts'
            )
        status = status_of(fields)
        if status is not None:
            self._pass_on()
        return status

    def _look(self) -> dict[str, str]:
        """{} where scontrol failed, which it may for a while."""
        try:
            fields = fields_of(base.must(look(self.number)))
        except ValueError as error:
            self.failures += 1
            if self.failures == MOST_FAILURES:
                raise ValueError(
                    f'{error}. The job goes on, and the same command finds it.'
                ) from None
            return {}
        self.failures = 0
        return fields

    def stop(self) -> None:
        """A job that waits has nothing to save."""
        base.answer(hold(self.number))
        if self._look().get('JobState') == 'RUNNING':
            base.answer(signal(self.number))
        else:
            base.answer(['scancel', self.number])

    def close(self) -> None:
        self._pass_on()

    def by_hand(self) -> str:
        return f'{shlex.join(hold(self.number))} && {shlex.join(signal(self.number))}'


ENGINE = Engine(
    Options,
    script,
    Launch,
    check,
    programs={name: INSTALL for name in ('sbatch', 'squeue', 'scontrol', 'scancel')},
)
