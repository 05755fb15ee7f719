"""Cloud TPU slices without Kubernetes: queued resources, and ssh to every host.

    python -m tpu.launch --engine=gcloud --zone=us-east5-b --accelerator_type=v6e-16 \\
        --runtime_version=v2-alpha-tpuv6e --spot -- train.py --config=... --workdir=...

A slice that is preempted cannot start again: the queued resource is deleted and created anew, and
the command goes on once it is ACTIVE. Trainers outlive a connection that breaks: gcloud tries it
again ten times, 5 s apart, and whoever comes back finds the trainer running. So does the same
command, given again, until the job has ended.

What is asked how often: the state of the queued resource, every LOOK_SEC, for as long as it
waits in the queue (--submit_flags=--valid-until-duration=6h bounds that). A restart on a slice that
is still there begins after PAUSE_SEC of `tpu.launchers.base`.

Sources: cloud.google.com/tpu/docs/queued-resources; cloud.google.com/sdk/gcloud/reference/compute/
tpus/queued-resources and .../tpu-vm/ssh; google-cloud-sdk command_lib/compute/tpus/tpu_vm/ssh.py.
"""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Callable

from lm.run.statuses import BAD_INPUT, DONE, RESUME
from tpu.launchers import base
from tpu.launchers.base import Engine, Job, option
from tpu.launchers.stream import Stream

LOOK_SEC = 30.0
HOST_SEC = 1.0  # between a host's looks at its trainer
MOST_FAILURES = 20  # of gcloud in a row, while it is asked for a state
INSTALL = 'https://cloud.google.com/sdk/docs/install'
GONE = 'NOT_FOUND'
WAITING = ('CREATING', 'ACCEPTED', 'WAITING_FOR_RESOURCES', 'PROVISIONING')
LEAVING = ('SUSPENDING', 'DELETING')
ENDED = re.compile(r'evenkeel: a host ended with status (\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    zone: str = option('Zone of the TPUs, such as us-east5-b.')
    accelerator_type: str = option('Such as v6e-16 or v5litepod-256: version and chips, or cores.')
    runtime_version: str = option('Software of the TPU VMs, such as v2-alpha-tpuv6e.')
    project: str = option('Google Cloud project; default that of gcloud.', '')
    slices: int = option('Slices that train one run together.', 1)
    spot: bool = option('Cheaper slices, which may be preempted at any time.', False)
    folder: str = option(
        'Folder of this repository on the hosts, from the home folder.', 'evenkeel'
    )
    setup: str = option('Shell command for each host, once, such as a git clone.', '')
    keep: bool = option('Leave a slice that this command created.', False)
    submit_flags: str = option('More flags, for queued-resources create.', '')


def where(options: Options) -> list[str]:
    project = [f'--project={options.project}'] if options.project else []
    return [f'--zone={options.zone}', *project]


def queued(verb: str, job: Job, options: Options, *flags: str) -> list[str]:
    head = ['gcloud', 'compute', 'tpus', 'queued-resources', verb, job.name]
    return [*head, *where(options), *flags]


def create(job: Job, options: Options) -> list[str]:
    nodes = [f'--node-id={job.name}']
    if options.slices > 1:
        nodes = [f'--node-count={options.slices}', f'--node-prefix={job.name}']
    return queued(
        'create',
        job,
        options,
        f'--accelerator-type={options.accelerator_type}',
        f'--runtime-version={options.runtime_version}',
        *nodes,
        *(['--spot'] if options.spot else []),
        *shlex.split(options.submit_flags),
        '--async',
    )


def describe(job: Job, options: Options) -> list[str]:
    return queued('describe', job, options, '--format=value(state.state)')


def delete(job: Job, options: Options) -> list[str]:
    """Waits until it is gone, nodes and all (--force)."""
    return queued('delete', job, options, '--force', '--quiet')


def ssh(job: Job, options: Options, command: str) -> list[str]:
    """`command` on every host of all slices at once: 64 hosts at a time, which is gcloud's default
    for several slices, would wait for the others without end. A host that is gone without a word is
    noticed after 2 min.
    """
    alive = ['--ssh-flag=-oServerAliveInterval=30', '--ssh-flag=-oServerAliveCountMax=4']
    flags = ['--worker=all', *alive, f'--command={command}']
    if options.slices > 1:
        return queued('ssh', job, options, '--node=all', '--batch-size=all', *flags)
    head = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', job.name]
    return [*head, *where(options), *flags]


def remote(job: Job, options: Options) -> str:
    """The host's script: starts the trainer, apart from the connection, and passes on what it says.
    Where this job's trainer runs already, it only does the latter. In the end it says how the
    trainer ended, as gcloud's own status does not tell train.py's 1 from one of its own. When the
    connection breaks, all but the trainer ends: at the hangup, or where that is ignored, as under
    nohup, when its shell is gone or nobody reads what it says.
    """
    enter = f'{{ {_ready(options)}cd {shlex.quote(options.folder)} || false; }}'
    train = f'{{ {job.command("uv run")} & echo $! > "$d/pid"; wait $!; }}'
    follow = (
        f'tail -n +1 -f -s {HOST_SEC} --pid="$(cat "$d/pid")" "$d/log" & t=$!; '
        f'(while kill -0 $$ && kill -0 $t; do sleep {HOST_SEC}; done; kill $t) >/dev/null 2>&1 & '
        'wait $t; if kill -0 "$(cat "$d/pid")" 2>/dev/null; then exit 1; fi'
    )
    return (
        f'd={_folder(job)}; mkdir -p "$d"; '
        'if ! grep -qs train.py "/proc/$(cat "$d/pid" 2>/dev/null)/cmdline"; then '
        'rm -f "$d/pid" "$d/status"; : > "$d/log"; '
        f'(trap "" HUP; {enter} && {train}; echo $? > "$d/status") >> "$d/log" 2>&1 & fi; '
        f'until [ -s "$d/pid" ] || [ -s "$d/status" ]; do sleep {HOST_SEC}; done; '
        f'if [ -s "$d/pid" ]; then {follow}; else cat "$d/log"; fi; '
        f'until [ -s "$d/status" ]; do sleep {HOST_SEC}; done; '
        'status=$(cat "$d/status"); '
        'echo "evenkeel: a host ended with status $status"; exit "$status"'
    )


def _ready(options: Options) -> str:
    """Sets the host up, once: a slice that is created again has new hosts."""
    if not options.setup:
        return ''
    digest = hashlib.sha256(options.setup.encode()).hexdigest()[:8]
    done = f'"$HOME/.evenkeel/set-up-{digest}"'
    return f'{{ [ -e {done} ] || (eval {shlex.quote(options.setup)}); }} && : > {done} && '


def remote_stop(job: Job) -> str:
    """SIGTERM to the trainer of a host, which saves a checkpoint and ends."""
    return f'kill -TERM "$(cat {_folder(job)}/pid)"'


def _folder(job: Job) -> str:
    """Of a host, for what its script must find again: pid, log and exit status of the trainer."""
    return f'"$HOME/.evenkeel/{job.name}"'


def script(job: Job, options: Options) -> str:
    """What runs, in order, as lines for a shell."""
    lines = [
        f'# creates {job.name}, unless it is ACTIVE or waits already:',
        shlex.join(create(job, options)),
        f'# every {LOOK_SEC:.0f} s, until it is ACTIVE:',
        shlex.join(describe(job, options)),
        '# on every host:',
        shlex.join(ssh(job, options, remote(job, options))),
        f'# at most {job.max_restarts} times more, after status 42, 128 + n or a lost connection;',
        '# where the slice is not ACTIVE any more, it is first deleted, then created:',
        shlex.join(delete(job, options)),
        '# to stop it after a checkpoint:',
        shlex.join(ssh(job, options, remote_stop(job))),
    ]
    if not options.keep:
        lines += ['# in the end, but after bad input (status 1):', shlex.join(delete(job, options))]
    return '\n'.join(lines) + '\n'


def check(job: Job, options: Options) -> None:
    base.check_workdir(job, 'gcloud')
    if options.accelerator_type.startswith('tpu7x'):
        raise ValueError('TPU7x is to be had through GKE alone: take --engine=xpk.')
    if options.slices < 1:
        raise ValueError(f'--slices must be at least 1; got {options.slices}.')


class Launch:
    """A queued resource, and one ssh to all its hosts."""

    def __init__(self, job: Job, options: Options, caught: list[int], say: Callable[[str], None]):
        self.job, self.options, self.caught, self.say = job, options, caught, say
        self.restarts = job.max_restarts
        self.created = self.left = self.answered = False
        self.stream: Stream | None = None
        self.statuses: list[int] = []

    def state(self) -> str:
        """Of the queued resource. Once gcloud has answered, it may fail for a while."""
        for _ in range(MOST_FAILURES if self.answered else 1):
            status, out, error = base.answer(describe(self.job, self.options))
            gone = status != 0 and ('NOT_FOUND' in error or 'not found' in error)
            if status == 0 or gone:
                self.answered = True
                return GONE if gone else out.strip()
            if self.answered:
                base.wait(LOOK_SEC, self.caught)
        if not self.answered:
            raise ValueError(f'gcloud refuses: {error.strip()}')
        self.left = True
        raise ValueError(
            f'the state of {self.job.name} cannot be had: {error.strip()}. What runs there '
            'goes on, and the same command finds it.'
        )

    def submit(self) -> None:
        """Until the slice is ACTIVE, by whatever way there."""
        said = ''
        fresh = False
        while (state := self.state()) != 'ACTIVE':
            if state != said:
                self.say(f'{self.job.name} is {state}')
                said = state
            if state == 'FAILED' and fresh:
                raise ValueError(
                    f'{self.job.name} has failed to be created. What held: '
                    f'{shlex.join(queued("describe", self.job, self.options))}'
                )
            if state == GONE or state not in WAITING + LEAVING:  # SUSPENDED, FAILED
                if state != GONE:
                    base.must(delete(self.job, self.options))
                base.must(create(self.job, self.options))
                self.created = fresh = True
            else:
                base.wait(LOOK_SEC, self.caught)
        self.statuses = []
        command = remote(self.job, self.options)
        self.stream = Stream(ssh(self.job, self.options, command), self._ended)

    def _ended(self, line: str) -> bool:
        match = ENDED.search(line)
        if match:
            self.statuses.append(int(match[1]))
        return match is not None

    def poll(self) -> int | None:
        """What the hosts told. One that told nothing, where ssh failed, is lost."""
        status = self.stream.poll()
        if status is None:
            return None
        told = base.worst(self.statuses)
        if status == DONE or told != DONE:
            self.left = told == BAD_INPUT  # the corrected command may have it
            return told
        self.say(f'ssh ended with status {status}: the connection to a host is lost')
        return RESUME

    def stop(self) -> None:
        base.answer(ssh(self.job, self.options, remote_stop(self.job)))

    def close(self) -> None:
        if self.stream is not None:
            self.stream.end()
        if not self.created:
            return
        command = shlex.join(delete(self.job, self.options))
        if self.options.keep or self.left:
            self.say(f'{self.job.name} is left, and costs until: {command}')
            return
        self.say(f'deleting {self.job.name}')
        status, _, error = base.answer(delete(self.job, self.options))
        if status:
            self.say(f'{self.job.name} is left, and costs: {command} ended with {error.strip()}')

    def by_hand(self) -> str:
        return shlex.join(ssh(self.job, self.options, remote_stop(self.job)))


ENGINE = Engine(Options, script, Launch, check, programs={'gcloud': INSTALL})
