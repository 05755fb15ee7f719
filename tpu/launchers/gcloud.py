"""Cloud TPU slices without Kubernetes: queued resources, and ssh to every host.

A preempted slice cannot start again: its queued resource is deleted and created anew, and the
command continues once it is ACTIVE. Trainers survive a broken connection: gcloud connects again up
to ten times, 5 s apart, and then finds the trainer running. The same command, given again, finds it
too, until the job has ended.

Waits: the state of the queued resource is read every LOOK_SEC while it is in the queue
(--submit_flags=--valid-until-duration=6h bounds that). A restart on a slice that still exists
begins after PAUSE_SEC of `tpu.launchers.base`.

Sources: cloud.google.com/tpu/docs/queued-resources; cloud.google.com/sdk/gcloud/reference/compute/
tpus/queued-resources and .../tpu-vm/ssh; google-cloud-sdk command_lib/compute/tpus/tpu_vm/ssh.py.
"""

import dataclasses
import hashlib
import re
import shlex

from lm.launch.exit_status import DONE, RESUME
from tpu.launchers import base
from tpu.launchers.base import Job, SliceOptions, Stream, option

LOOK_SEC = 30.0
HOST_SEC = 1.0  # interval at which a host polls its trainer
MAX_TRIES = 20  # consecutive attempts of gcloud to tell the state, once it has told one
STATE = '--format=value(state.state)'
FOLDER = '"$HOME/.evenkeel/{}"'  # of a host, for the pid, log and exit status of its trainer
NOT_FOUND = 'NOT_FOUND'
WAITING = ('CREATING', 'ACCEPTED', 'WAITING_FOR_RESOURCES', 'PROVISIONING')
LEAVING = ('SUSPENDING', 'DELETING')
ENDED = re.compile(r'evenkeel: a host ended with status (\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GcloudOptions(SliceOptions):
    """Options of --engine=gcloud."""

    zone: str = option('Zone of the TPUs, such as us-east5-b.')
    runtime_version: str = option('Software version of the TPU VMs, such as v2-alpha-tpuv6e.')
    folder: str = option('Folder of this repository in the home folder of each host.', 'evenkeel')
    setup: str = option('Shell command that runs once on each host, such as a git clone.', '')
    keep: bool = option('Keep the slice that this command created.', False)


def queued_resource_command(verb: str, job: Job, options: GcloudOptions, *flags: str) -> list[str]:
    """Returns a gcloud command for the job's queued resource.

    Args:
      verb: such as 'create' or 'describe'.
      job: its name is the resource's.
      options: zone and project.
      *flags: further flags.

    Returns:
      The command as words.
    """
    head = ['gcloud', 'compute', 'tpus', 'queued-resources', verb, job.name]
    return [*head, *options.location_flags(), *flags]


def create_command(job: Job, options: GcloudOptions) -> list[str]:
    """Returns the command that creates the resource."""
    accelerator = f'--accelerator-type={options.accelerator_type}'
    software = f'--runtime-version={options.runtime_version}'
    node_flags = [f'--node-count={options.slices}', f'--node-prefix={job.name}']
    nodes = node_flags if options.slices > 1 else [f'--node-id={job.name}']
    extra = options.extra_flags()
    return queued_resource_command(
        'create', job, options, accelerator, software, *nodes, *extra, '--async'
    )


def delete_command(job: Job, options: GcloudOptions) -> list[str]:
    """Returns the command that deletes the resource with its nodes (--force) and waits for it."""
    return queued_resource_command('delete', job, options, '--force', '--quiet')


def ssh_command(job: Job, options: GcloudOptions, command: str) -> list[str]:
    """Returns the command that runs a shell command on every host of all slices at once.

    In gcloud's batches of 64 hosts, the first batch would wait for the others forever. A host that
    is lost silently is noticed after 2 min.

    Args:
      job: its name is the slice's.
      options: zone, project and slices.
      command: the shell command.

    Returns:
      The command as words.
    """
    # 4 unanswered messages, 30 s apart, end the connection.
    keep_alive = ['--ssh-flag=-oServerAliveInterval=30', '--ssh-flag=-oServerAliveCountMax=4']
    flags = ['--worker=all', *keep_alive, f'--command={command}']
    if options.slices > 1:
        return queued_resource_command(
            'ssh', job, options, '--node=all', '--batch-size=all', *flags
        )
    head = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', job.name]
    return [*head, *options.location_flags(), *flags]


def host_script(job: Job, options: GcloudOptions) -> str:
    """Returns the shell script of a host.

    It starts the trainer, independent of the connection, unless this job's trainer runs already,
    and forwards its output. Its last line is the trainer's exit status, as gcloud's own status does
    not distinguish train.py's 1 from an error of gcloud. When the connection breaks, everything but
    the trainer ends: by the hangup or, if that is ignored as under nohup, when its shell is gone or
    its output is not read.
    """
    enter_folder = f'{{ {_setup_script(options)}cd {shlex.quote(options.folder)} || false; }}'
    train = f'{{ {job.command_with_secret("uv run --extra tpu")} & echo $! > "$d/pid"; wait $!; }}'
    # `tail` ends with the trainer (--pid). The second loop ends `tail` if the shell is gone. After
    # `tail`, a trainer that still runs means that the connection broke: exit 1 without a status.
    follow = (
        f'tail -n +1 -f -s {HOST_SEC} --pid="$(cat "$d/pid")" "$d/log" & t=$!; '
        f'(while kill -0 $$ && kill -0 $t; do sleep {HOST_SEC}; done; kill $t) >/dev/null 2>&1 & '
        'wait $t; if kill -0 "$(cat "$d/pid")" 2>/dev/null; then exit 1; fi'
    )
    return (
        f'd={FOLDER.format(job.name)}; mkdir -p "$d"; '
        'if ! grep -qs train.py "/proc/$(cat "$d/pid" 2>/dev/null)/cmdline"; then '
        'rm -f "$d/pid" "$d/status"; : > "$d/log"; '
        f'(trap "" HUP; {enter_folder} && {train}; echo $? > "$d/status") >> "$d/log" 2>&1 & fi; '
        f'until [ -s "$d/pid" ] || [ -s "$d/status" ]; do sleep {HOST_SEC}; done; '
        f'if [ -s "$d/pid" ]; then {follow}; else cat "$d/log"; fi; '
        f'until [ -s "$d/status" ]; do sleep {HOST_SEC}; done; '
        'status=$(cat "$d/status"); '
        'echo "evenkeel: a host ended with status $status"; exit "$status"'
    )


def _setup_script(options: GcloudOptions) -> str:
    """Returns shell text that sets up a host once; a slice that is created again has new hosts."""
    if not options.setup:
        return ''
    digest = hashlib.sha256(options.setup.encode()).hexdigest()[:8]
    marker = f'"$HOME/.evenkeel/set-up-{digest}"'
    return f'{{ [ -e {marker} ] || (eval {shlex.quote(options.setup)}); }} && : > {marker} && '


def stop_script(job: Job) -> str:
    """Returns the shell script that sends SIGTERM to the trainer of a host."""
    return f'kill -TERM "$(cat {FOLDER.format(job.name)}/pid)"'


def script(job: Job, options: GcloudOptions) -> str:
    """Returns all commands in order, as lines for a shell."""
    lines = [
        f'# creates {job.name}, unless it is ACTIVE or waits already:',
        create_command(job, options),
        f'# every {LOOK_SEC:.0f} s, until it is ACTIVE:',
        queued_resource_command('describe', job, options, STATE),
        '# on every host:',
        ssh_command(job, options, host_script(job, options)),
        f'# at most {job.max_restarts} times more, after status 42, 128 + n or a lost connection;',
        '# where the slice is not ACTIVE any more, it is first deleted, then created:',
        delete_command(job, options),
        '# to stop it after a checkpoint:',
        ssh_command(job, options, stop_script(job)),
    ]
    if not options.keep:
        lines += ['# in the end:', delete_command(job, options)]
    return base.shell_lines(*lines)


def check(job: Job, options: GcloudOptions) -> None:
    """Raises ValueError for options that this engine does not support."""
    base.check_workdir(job, 'gcloud')
    if options.accelerator_type.startswith('tpu7x'):
        raise ValueError('TPU7x is to be had through GKE alone: take --engine=xpk.')
    base.check_positive(options, 'slices')


class GcloudLaunch(base.JobLaunch):
    """A queued resource, and a single ssh to all its hosts.

    If this command created the resource, it deletes it at the end, even after bad input, but not if
    `leaves_slice`: then its trainer may still run.
    """

    programs = (('gcloud', 'https://cloud.google.com/sdk/docs/install'),)
    has_created = leaves_slice = has_answered = False

    def read_state(self) -> str:
        """Returns the state of the resource; once gcloud has answered, it may fail for a while."""
        for _ in range(MAX_TRIES if self.has_answered else 1):
            status, stdout, error = base.run_command(
                queued_resource_command('describe', self.job, self.options, STATE)
            )
            is_gone = status != 0 and (NOT_FOUND in error or 'not found' in error)
            if status == 0 or is_gone:
                self.has_answered = True
                return NOT_FOUND if is_gone else stdout.strip()
            if self.has_answered:
                base.interruptible_sleep(LOOK_SEC, self.caught)
        if not self.has_answered:
            raise ValueError(f'gcloud refuses: {error.strip()}')
        self.leaves_slice = True
        unknown = f'the state of {self.job.name} is unknown: {error.strip()}'
        raise ValueError(
            f'{unknown}. The job is still running; repeat the same command to follow it.'
        )

    def submit(self) -> None:
        """Creates the resource, waits until it is ACTIVE, and starts the job."""
        last_state, is_fresh = '', False
        while (state := self.read_state()) != 'ACTIVE':
            if state != last_state:
                self.say(f'{self.job.name} is {state}')
                last_state = state
            if state in WAITING + LEAVING:
                base.interruptible_sleep(LOOK_SEC, self.caught)
                continue
            if state == 'FAILED' and is_fresh:
                reason = shlex.join(queued_resource_command('describe', self.job, self.options))
                raise ValueError(f'{self.job.name} could not be created. The reason: {reason}')
            if state != NOT_FOUND:  # SUSPENDED, FAILED: its name is taken until it is deleted
                base.read_output(delete_command(self.job, self.options))
            base.read_output(create_command(self.job, self.options))
            self.has_created = is_fresh = True
        self.statuses: list[int] = []
        command = host_script(self.job, self.options)
        self.stream = Stream(ssh_command(self.job, self.options, command), self._record_status)

    def _record_status(self, line: str) -> bool:
        """Records the exit status of a host if the line tells it, and hides the line."""
        self.statuses += [int(match[1]) for match in ENDED.finditer(line)]
        return ENDED.search(line) is not None

    def poll(self) -> int | None:
        """Returns the status that the hosts reported; RESUME if ssh failed without a status."""
        assert self.stream is not None  # after `submit`
        if (status := self.stream.poll()) is None:
            return None
        host_status = base.combine_statuses(self.statuses)
        if status == DONE or host_status != DONE:
            return host_status
        self.say(f'ssh ended with status {status}: the connection to a host is lost')
        return RESUME

    def stop_commands(self) -> list[list[str]]:
        """Returns the command that stops the trainers of all hosts."""
        return [ssh_command(self.job, self.options, stop_script(self.job))]

    def close(self) -> None:
        """Deletes the slice if this command created it."""
        super().close()
        command = delete_command(self.job, self.options)
        left_text = f'{self.job.name} is left, and costs'
        if self.has_created and (self.options.keep or self.leaves_slice):
            self.say(f'{left_text} until: {shlex.join(command)}')
        elif self.has_created:
            self.say(f'deleting {self.job.name}')
            status, _, error = base.run_command(command)
            if status:
                self.say(f'{left_text}: {shlex.join(command)} ended with {error.strip()}')
