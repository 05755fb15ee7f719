"""TPU slices of a GKE cluster, as a JobSet that xpk creates.

xpk starts one pod per host. Its JobSet restarts all pods if any ends with 42 or 127 to 255, or is
evicted, at most --max_restarts times (xpk's default is no restart); 1 and 2 are final. If the
launcher ends, the same command finds the JobSet again and shows its output.

Waits: the state of the JobSet is read every LOOK_SEC while it waits in the queue or runs. Pods have
GRACE_SEC to save a checkpoint before they are killed (30 s by xpk's default).

Sources: AI-Hypercomputer/xpk src/xpk/parser/workload.py, commands/workload.py and core/
docker_container.py; kubernetes-sigs/jobset api/jobset/v1alpha2/jobset_types.go.
"""

import dataclasses
import json
import shlex
import shutil
import tempfile
from pathlib import Path

from lm.launch.exit_status import BAD_INPUT, DONE, RESUME
from tpu.launchers import base
from tpu.launchers.base import Job, SliceOptions, Stream, option

XPK = 'xpk', 'pip install xpk (github.com/AI-Hypercomputer/xpk)'
KUBECTL = 'kubectl', 'gcloud components install kubectl'
LOOK_SEC = 10.0
GRACE_SEC = 120
FIRST_POD = '-slice-job-0-0-'  # xpk: WORKLOAD-slice-job-SLICE-HOST-xxxxx
JOBSET_LABEL = 'jobset.sigs.k8s.io/jobset-name'
ATTEMPT_LABEL = 'jobset.sigs.k8s.io/restart-attempt'
NONE = ''  # the state if there is no JobSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class XpkOptions(SliceOptions):
    """Options of --engine=xpk."""

    cluster: str = option('GKE cluster, created by xpk.')
    image: str = option('Docker image with this repository and its environment.')
    zone: str = option('Zone of the cluster; default: the one that gcloud is set to.', '')
    folder: str = option('Folder of this repository in the image; default: its working folder.', '')


def workload_command(verb: str, options: XpkOptions, *flags: str) -> list[str]:
    """Returns an xpk command for workloads of the cluster."""
    return [
        'xpk',
        'workload',
        verb,
        *flags,
        f'--cluster={options.cluster}',
        *options.location_flags(),
    ]


def create_command(job: Job, options: XpkOptions) -> list[str]:
    """Returns the command that creates the JobSet."""
    # train.py takes all chips of its host; xpk would start two containers on a host of v7x.
    single_container = (
        ['--no-use-parallel-containers'] if options.accelerator_type.startswith('tpu7x') else []
    )
    return workload_command(
        'create',
        options,
        f'--workload={job.name}',
        f'--tpu-type={options.accelerator_type}',
        f'--num-slices={options.slices}',
        f'--docker-image={options.image}',
        f'--max-restarts={job.max_restarts}',
        f'--termination-grace-period-seconds={GRACE_SEC}',
        *options.extra_flags(*single_container),
        f'--command={container_command(job, options)}',
    )


def container_command(job: Job, options: XpkOptions) -> str:
    """Returns the command of a pod; with `exec`, as xpk sends SIGTERM only to its shell."""
    train = f'exec {job.command_with_secret("python3")}'
    return f'cd {shlex.quote(options.folder)} && {train}' if options.folder else train


def delete_command(job: Job, options: XpkOptions) -> list[str]:
    """Returns the command that sends the pods SIGTERM, and SIGKILL after GRACE_SEC."""
    return workload_command('delete', options, f'--workload={job.name}', '--force')


def list_command(job: Job, options: XpkOptions) -> list[str]:
    """Returns the command that lists the workload; it also points kubectl at the cluster."""
    return workload_command('list', options, f'--filter-by-job={job.name}')


def state_commands(job: Job) -> list[list[str]]:
    """Returns the commands that show the JobSet and its pods in JSON."""
    jobset, pods = [job.name, '--ignore-not-found'], [f'--selector={JOBSET_LABEL}={job.name}']
    get = ['kubectl', 'get']
    return [[*get, 'jobset', *jobset, '--output=json'], [*get, 'pods', *pods, '--output=json']]


def logs_command(pod: str, *flags: str) -> list[str]:
    """Returns the command that follows the log of a pod."""
    return ['kubectl', 'logs', '--follow', pod, *flags]


def parse_state(jobset: str) -> tuple[str, int]:
    """Returns ('Completed', 'Failed', 'Running' or NONE, restarts so far) from kubectl's JSON."""
    if not jobset.strip():
        return NONE, 0
    status = json.loads(jobset).get('status', {})
    true_kinds = [
        condition['type']
        for condition in status.get('conditions', [])
        if condition['status'] == 'True'
    ]
    final = [kind for kind in true_kinds if kind in ('Completed', 'Failed')]
    return (final or ['Running'])[0], status.get('restarts', 0)


def newest_pods(all_pods: list[dict]) -> list[dict]:
    """Returns the pods of the newest restart; earlier pods may be listed for a while."""
    attempts = [int(pod['metadata'].get('labels', {}).get(ATTEMPT_LABEL, 0)) for pod in all_pods]
    return [pod for pod, n in zip(all_pods, attempts, strict=True) if n == max(attempts)]


def first_pod(job: Job, all_pods: list[dict]) -> str | None:
    """Returns the name of the first host's pod once it has started."""
    started_phases = ('Running', 'Succeeded', 'Failed')
    pods = [
        pod for pod in newest_pods(all_pods) if pod.get('status', {}).get('phase') in started_phases
    ]
    names = [pod['metadata']['name'] for pod in pods]
    return next((name for name in names if name.startswith(job.name + FIRST_POD)), None)


def exit_codes(all_pods: list[dict]) -> list[int]:
    """Returns the exit codes of ended containers in the newest restart."""
    pods = [pod.get('status', {}).get('containerStatuses', []) for pod in newest_pods(all_pods)]
    states = [container.get('state', {}) for containers in pods for container in containers]
    return [state['terminated']['exitCode'] for state in states if 'terminated' in state]


def script(job: Job, options: XpkOptions) -> str:
    """Returns all commands in order for a shell, and the JobSet if xpk is installed."""
    lines = [
        '# points kubectl at the cluster:',
        list_command(job, options),
        '# unless the JobSet is there already:',
        create_command(job, options),
        f'# every {LOOK_SEC:.0f} s, until it is Completed or Failed:',
        *state_commands(job),
        logs_command(f'{job.name}{FIRST_POD}...'),
        '# to stop it after a checkpoint:',
        delete_command(job, options),
        '# the JobSet that xpk makes of this:',
    ]
    manifest = [*create_command(job, options), '--dry-run', '--output-manifest-file=jobset.yaml']
    if shutil.which('xpk') is None:
        return base.shell_lines(*lines, manifest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'jobset.yaml')
        base.read_output([*manifest[:-1], f'--output-manifest-file={path}'])
        return base.shell_lines(*lines, path.read_text().strip())


def check(job: Job, options: XpkOptions) -> None:
    """Raises ValueError for options that this engine does not support."""
    base.check_workdir(job, 'xpk')
    base.check_name('--cluster', options.cluster)
    base.check_positive(options, 'slices')
    if any('\n' in flag for flag in job.flags):
        raise ValueError('xpk puts the command into a line of YAML: no flag may have a line break.')


class XpkLaunch(base.JobLaunch):
    """A JobSet, which Kubernetes restarts, and the log of its first pod."""

    programs = (XPK, KUBECTL)
    restarts, pod, seen_restarts = 0, '', 0

    def submit(self) -> None:
        """Creates the JobSet, or finds it; an ended JobSet of the same name is replaced."""
        base.read_output(list_command(self.job, self.options))
        state, _ = parse_state(base.read_output(state_commands(self.job)[0]))
        if state in ('Completed', 'Failed'):
            self.say(f'JobSet {self.job.name} of an earlier launch is {state}: it is replaced')
            base.read_output(delete_command(self.job, self.options))
        if state == 'Running':
            self.say(f'JobSet {self.job.name} is there already')
        else:
            base.read_output(create_command(self.job, self.options))

    def poll(self) -> int | None:
        """Forwards the log; returns the exit status once the JobSet has ended."""
        if not self.is_due(LOOK_SEC) or (reading := self.query(self._read_state, 'JobSet')) is None:
            return None
        (state, restarts), pods = reading
        if restarts > self.seen_restarts:
            self.say(f'restart {restarts} of at most {self.job.max_restarts}')
            self.seen_restarts = restarts
        self._follow_log(pods)
        if state == 'Running':
            return None
        if self.stream is not None:
            self.stream.wait(GRACE_SEC if self.caught else LOOK_SEC)
        if state == NONE:
            self.say(f'JobSet {self.job.name} was deleted')
            return RESUME
        if state == 'Completed':
            return DONE
        status = base.combine_statuses(exit_codes(pods))
        if status == DONE:
            self.say(f'JobSet {self.job.name} has failed, and no pod tells how')
        return status or BAD_INPUT

    def _read_state(self) -> tuple[tuple[str, int], list[dict]]:
        """Returns the state with the restarts so far, and the pods."""
        jobset, pods = map(base.read_output, state_commands(self.job))
        return parse_state(jobset), json.loads(pods)['items']

    def _follow_log(self, pods: list[dict]) -> None:
        """Streams the log of the first pod; after a break, only new lines."""
        pod = first_pod(self.job, pods)
        if pod is None or (self.stream is not None and self.stream.poll() is None):
            return
        if pod != self.pod:
            self.stream = Stream(logs_command(pod))
        elif not exit_codes(pods):
            self.stream = Stream(logs_command(pod, '--tail=0'))
        self.pod = pod

    def stop_commands(self) -> list[list[str]]:
        """Returns the command that deletes the JobSet."""
        return [delete_command(self.job, self.options)]
