"""An allocation of SLURM: a batch script that starts a task, or several, on every node.

The job restarts without the launcher: SLURM queues it again when it is preempted or a node fails,
and its script does so for 42 and 128 + n, at most --max_restarts times in all. If the launcher
ends, the same command finds the job again and shows its output.

Waits: the state of the job is read every LOOK_SEC while it waits in the queue or runs; SLURM keeps
its status for MinJobAge (300 s by default) after its end. A job that is queued again waits for
AuthInfo=cred_expire (120 s by default). LIMIT_SEC before its time limit the hosts save a
checkpoint, and the job continues in a new allocation.

Sources: slurm.schedmd.com/sbatch.html, srun.html, scontrol.html, scancel.html.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path

from lm.launch.before_jax import ACCELERATORS
from lm.launch.exit_status import RESUME, SIGNALLED
from lm.launch.this_host import SECRET
from tpu.launchers import base
from tpu.launchers.base import Chips, Job, option

LOOK_SEC = 10.0
LIMIT_SEC = 120
LOGIN = 'run this on a login node of the cluster (Debian: apt-get install slurm-client)'
# Final values of `JobState`; a job that is queued again has none of them.
ENDED = ('BOOT_FAIL', 'CANCELLED', 'COMPLETED', 'DEADLINE', 'FAILED', 'NODE_FAIL', 'OUT_OF_MEMORY')
# Matches --gpus-per-node=8, --gres=gpu:8 and --gres=gpu:h100:8.
GPUS = re.compile(r'--(?:gpus-per-node[ =]|gres[ =]gpu:)(?:[a-zA-Z]\w*:)?(\d+)(?=\s|$|,)')
ENDED += ('PREEMPTED', 'TIMEOUT')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of --engine=slurm."""

    nodes: int = option('Number of nodes.')
    tasks_per_node: int = option('Processes per node: 1 for all its devices, or one per GPU.', 1)
    folder: str = option('Folder of this repository on the nodes; default: this folder.', '')
    logs: str = option('Folder for output, on a disk that this machine can read.', 'runs/slurm')
    submit_flags: str = option(
        'Additional flags for sbatch, such as --partition=gpu --gres=gpu:8.', ''
    )

    def chips(self) -> Chips:
        """Returns the GPUs of all nodes, if a flag of sbatch gives the number for each node."""
        per_node = GPUS.search(self.submit_flags)
        return Chips(devices=self.nodes * int(per_node[1]) if per_node else 0)


def output_path(job: Job, options: SlurmOptions, job_id: str = '%j') -> Path:
    """Returns the file of the job's output.

    Args:
      job: the job.
      options: the folder of logs.
      job_id: number of the job; by default sbatch's placeholder for it.
    """
    return Path(options.logs).absolute() / f'{job.name}-{job_id}.out'


def batch_script(job: Job, options: SlurmOptions) -> str:
    """Returns the batch script.

    srun does not kill tasks when another fails; they watch each other and end. A killed task would
    turn status 1, which is final, into 137. Nodes are assumed to be alike: the accelerators of the
    first node determine the extra that `uv run` installs.
    """
    extras = '\n'.join(
        f"ls {files} > /dev/null 2>&1 && extra='--extra {extra}'"
        for _, files, _, extra in ACCELERATORS
    )
    train = job.command('') if job.python else f'uv run $extra {job.command("")}'
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={options.nodes}
#SBATCH --ntasks-per-node={options.tasks_per_node}
#SBATCH --output={output_path(job, options)}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{LIMIT_SEC}
cd {shlex.quote(options.folder or os.getcwd())} || exit 1
export {SECRET}="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
extra=
{extras}
srun --kill-on-bad-exit=0 --wait=0 {train}
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


def submit_command(options: SlurmOptions) -> list[str]:
    """Returns the command that submits the batch script on its stdin."""
    return ['sbatch', '--parsable', *shlex.split(options.submit_flags)]


def find_command(job: Job) -> list[str]:
    """Returns the command that lists the numbers of the user's jobs of this name."""
    return ['squeue', '--me', '--noheader', f'--name={job.name}', '--format=%i']


def show_command(job_id: str) -> list[str]:
    """Returns the command that shows the fields of a job."""
    return ['scontrol', 'show', 'job', '--oneliner', job_id]


def cancel_commands(job_id: str) -> list[list[str]]:
    """Returns the commands that stop a job for good.

    After the first, neither SLURM nor the batch script queues the job again. The second sends
    SIGTERM to the tasks, but not to the batch script, which reports their status.
    """
    hold = ['scontrol', 'update', f'JobId={job_id}', 'Requeue=0']
    return [hold, ['scancel', '--signal=TERM', job_id]]


def parse_fields(text: str) -> dict[str, str]:
    """Returns {'JobState': 'RUNNING', ...} from scontrol's line."""
    return dict(re.findall(r'(\w+)=(\S*)', text))


def parse_status(fields: dict[str, str]) -> int | None:
    """Returns a job's exit status, RESUME if SLURM reports none; None if it has not ended."""
    if fields.get('JobState') not in ENDED:
        return None
    code, _, signal_number = fields.get('ExitCode', '0:0').partition(':')
    if int(code) or fields['JobState'] == 'COMPLETED':
        return int(code)
    return SIGNALLED + int(signal_number) if int(signal_number or 0) else RESUME


def script(job: Job, options: SlurmOptions) -> str:
    """Returns all commands in order, as lines for a shell."""
    text, mark = batch_script(job, options), 'END'
    while mark in text.splitlines():  # a flag may hold any line
        mark += '_'
    return base.shell_lines(
        ['mkdir', '-p', str(output_path(job, options).parent)],
        '# unless it is in the queue already:',
        find_command(job),
        f"{shlex.join(submit_command(options))} <<'{mark}'",
        text + mark,
        f'# every {LOOK_SEC:.0f} s, with the number that sbatch said:',
        show_command('NUMBER'),
        ['tail', '-F', str(output_path(job, options, 'NUMBER'))],
        '# to stop it after a checkpoint:',
        ' && '.join(map(shlex.join, cancel_commands('NUMBER'))),
    )


def check(job: Job, options: SlurmOptions) -> None:
    """Raises ValueError for options that this engine does not support."""
    base.check_positive(options, 'nodes', 'tasks_per_node')
    if re.search(r'[\s%\\]', str(output_path(job, options, '1'))):
        raise ValueError(
            f'--logs must have no blank, % or backslash, as SLURM reads them; got {options.logs!r}.'
        )


class SlurmLaunch(base.JobLaunch):
    """A job of SLURM, which SLURM itself restarts, and the file of its output."""

    programs = tuple((name, LOGIN) for name in ('sbatch', 'squeue', 'scontrol', 'scancel'))
    restarts, job_id, state, offset = 0, '', '', 0  # SLURM restarts the job, not `supervise`

    def submit(self) -> None:
        """Submits the job, or finds it in the queue."""
        output_path(self.job, self.options).parent.mkdir(parents=True, exist_ok=True)
        if job_ids := base.read_output(find_command(self.job)).split():
            self.job_id = job_ids[0]
            self.say(f'job {self.job_id} of that name is there already')
            return
        answer = base.read_output(
            submit_command(self.options), batch_script(self.job, self.options)
        )
        self.job_id = answer.strip().split(';')[0]  # NUMBER;CLUSTER with several clusters
        self.say(f'job {self.job_id}; it says: {output_path(self.job, self.options, self.job_id)}')

    def _forward_output(self) -> None:
        """Prints the job's new output; there is no file before the job begins."""
        path = output_path(self.job, self.options, self.job_id)
        with contextlib.suppress(FileNotFoundError), path.open(errors='replace') as file:
            file.seek(self.offset)
            sys.stdout.write(file.read())
            self.offset = file.tell()
            sys.stdout.flush()

    close = _forward_output

    def poll(self) -> int | None:
        """Forwards output; returns the exit status once the job has ended."""
        self._forward_output()
        if not self.is_due(LOOK_SEC):
            return None
        fields = self._read_fields()
        if fields.get('JobState', self.state) != self.state:
            self.state = fields['JobState']
            reason, restarts = fields.get('Reason', 'None'), fields.get('Restarts', 0)
            because = f' ({reason})' if reason != 'None' else ''
            self.say(f'job {self.job_id} is {self.state}{because}, {restarts} restarts')
        return parse_status(fields)

    def _read_fields(self) -> dict[str, str]:
        """Returns the fields of the job; {} if scontrol failed."""
        return (
            self.query(lambda: parse_fields(base.read_output(show_command(self.job_id))), 'job')
            or {}
        )

    def stop_commands(self) -> list[list[str]]:
        """Returns the commands that stop the job."""
        return cancel_commands(self.job_id)

    def stop(self) -> None:
        """Stops the job."""
        hold, signal = self.stop_commands()
        base.run_command(hold)
        # A job in the queue has nothing to save, and is cancelled.
        is_running = self._read_fields().get('JobState') == 'RUNNING'
        base.run_command(signal if is_running else ['scancel', self.job_id])
