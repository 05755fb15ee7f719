"""TPU slices of a GKE cluster, as a JobSet that xpk makes.

    python -m tpu.launch --engine=xpk --cluster=C --accelerator_type=v6e-16 --image=I \\
        -- train.py --config=... --workdir=...

xpk starts one pod a host. Its JobSet restarts all pods by itself where one ends with 42 or 127 to
255, or is evicted, at most --max_restarts times (xpk's own default is none); 1 and 2 are final. So
the launcher may go away: given again, the same command finds the JobSet and shows what it says.

What is asked how often: the JobSet, every LOOK_SEC, for as long as it waits in the queue or runs.
Pods have GRACE_SEC to save a checkpoint before they are killed (30 s by xpk's default).

Sources: AI-Hypercomputer/xpk src/xpk/parser/workload.py, commands/workload.py and core/
docker_container.py; kubernetes-sigs/jobset api/jobset/v1alpha2/jobset_types.go.
"""

import dataclasses
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lm.run.statuses import BAD_INPUT, DONE, RESUME
from tpu.launchers import base
from tpu.launchers.base import Engine, Job, option
from tpu.launchers.stream import Stream

LOOK_SEC = 10.0
GRACE_SEC = 120
MOST_FAILURES = 60  # of kubectl in a row
XPK = 'pip install xpk (github.com/AI-Hypercomputer/xpk)'
KUBECTL = 'gcloud components install kubectl'
FIRST_POD = '-slice-job-0-0-'  # xpk: WORKLOAD-slice-job-SLICE-HOST-xxxxx
JOBSET_LABEL = 'jobset.sigs.k8s.io/jobset-name'
ATTEMPT_LABEL = 'jobset.sigs.k8s.io/restart-attempt'
NONE = ''  # the state of a JobSet that is not there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    cluster: str = option('GKE cluster, as xpk has created it.')
    accelerator_type: str = option('Such as v6e-16 or v5litepod-256: version and chips, or cores.')
    image: str = option('Docker image with this repository and its environment.')
    zone: str = option('Zone of the cluster; default that of gcloud.', '')
    project: str = option('Google Cloud project; default that of gcloud.', '')
    slices: int = option('Slices that train one run together.', 1)
    spot: bool = option('Cheaper slices, which may be preempted at any time.', False)
    folder: str = option('Folder of this repository in the image; default its working folder.', '')
    submit_flags: str = option('More flags, for xpk workload create.', '')


def workload(verb: str, options: Options, *flags: str) -> list[str]:
    places = [f'--cluster={options.cluster}']
    places += [f'--zone={options.zone}'] if options.zone else []
    places += [f'--project={options.project}'] if options.project else []
    return ['xpk', 'workload', verb, *flags, *places]


def create(job: Job, options: Options) -> list[str]:
    """train.py takes all chips of its host; xpk would start two containers on one of v7x."""
    one = ['--no-use-parallel-containers'] if options.accelerator_type.startswith('tpu7x') else []
    return workload(
        'create',
        options,
        f'--workload={job.name}',
        f'--tpu-type={options.accelerator_type}',
        f'--num-slices={options.slices}',
        f'--docker-image={options.image}',
        f'--max-restarts={job.max_restarts}',
        f'--termination-grace-period-seconds={GRACE_SEC}',
        *(['--spot'] if options.spot else []),
        *one,
        *shlex.split(options.submit_flags),
        f'--command={container(job, options)}',
    )


def container(job: Job, options: Options) -> str:
    """`exec`, as xpk sends SIGTERM to the shell that runs the command, and to nothing below it."""
    train = f'exec {job.command("python3")}'
    return f'cd {shlex.quote(options.folder)} && {train}' if options.folder else train


def manifest(job: Job, options: Options, file: str) -> list[str]:
    """Writes the JobSet to `file` and sends nothing."""
    return [*create(job, options), '--dry-run', f'--output-manifest-file={file}']


def delete(job: Job, options: Options) -> list[str]:
    """Its pods get SIGTERM, and SIGKILL after GRACE_SEC."""
    return workload('delete', options, f'--workload={job.name}', '--force')


def find(job: Job, options: Options) -> list[str]:
    """Points kubectl at the cluster, which xpk does by the way."""
    return workload('list', options, f'--filter-by-job={job.name}')


def look(job: Job) -> list[str]:
    return ['kubectl', 'get', 'jobset', job.name, '--ignore-not-found', '--output=json']


def pods(job: Job) -> list[str]:
    return ['kubectl', 'get', 'pods', f'--selector={JOBSET_LABEL}={job.name}', '--output=json']


def logs(pod: str, *flags: str) -> list[str]:
    return ['kubectl', 'logs', '--follow', pod, *flags]


def state_of(jobset: str) -> tuple[str, int]:
    """('Completed', 'Failed', 'Running' or NONE, restarts so far) of kubectl's JSON."""
    if not jobset.strip():
        return NONE, 0
    status = json.loads(jobset).get('status', {})
    ended = [
        condition['type']
        for condition in status.get('conditions', [])
        if condition['type'] in ('Completed', 'Failed') and condition['status'] == 'True'
    ]
    return (ended or ['Running'])[0], status.get('restarts', 0)


def newest(found: Iterable[dict]) -> list[dict]:
    """Pods of the newest restart: those before it may be there for a while."""
    found = list(found)
    attempts = [int(pod['metadata'].get('labels', {}).get(ATTEMPT_LABEL, 0)) for pod in found]
    return [pod for pod, n in zip(found, attempts, strict=True) if n == max(attempts)]


def first_pod(job: Job, found: Iterable[dict]) -> str | None:
    """The name of the first host's pod, once it has something to say."""
    for pod in newest(found):
        name = pod['metadata']['name']
        has_begun = pod.get('status', {}).get('phase') in ('Running', 'Succeeded', 'Failed')
        if name.startswith(job.name + FIRST_POD) and has_begun:
            return name
    return None


def exit_codes(found: Iterable[dict]) -> list[int]:
    """Of all containers of the newest restart that have ended."""
    states = [
        container.get('state', {})
        for pod in newest(found)
        for container in pod.get('status', {}).get('containerStatuses', [])
    ]
    return [state['terminated']['exitCode'] for state in states if 'terminated' in state]


def script(job: Job, options: Options) -> str:
    """What runs, in order, as lines for a shell; the JobSet too where xpk is installed."""
    selector = f'{job.name}{FIRST_POD}...'
    lines = [
        '# points kubectl at the cluster:',
        shlex.join(find(job, options)),
        '# unless the JobSet is there already:',
        shlex.join(create(job, options)),
        f'# every {LOOK_SEC:.0f} s, until it is Completed or Failed:',
        shlex.join(look(job)),
        shlex.join(pods(job)),
        shlex.join(logs(selector)),
        '# to stop it after a checkpoint:',
        shlex.join(delete(job, options)),
        '# the JobSet that xpk makes of this:',
    ]
    if shutil.which('xpk') is None:
        return '\n'.join([*lines, shlex.join(manifest(job, options, 'jobset.yaml'))]) + '\n'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, 'jobset.yaml')
        base.must(manifest(job, options, str(file)))
        return '\n'.join([*lines, file.read_text().strip()]) + '\n'


def check(job: Job, options: Options) -> None:
    base.check_workdir(job, 'xpk')
    base.check_name('--cluster', options.cluster)
    if options.slices < 1:
        raise ValueError(f'--slices must be at least 1; got {options.slices}.')
    if any('\n' in flag for flag in job.flags):
        raise ValueError('xpk puts the command into a line of YAML: no flag may have a line break.')


class Launch:
    """A JobSet, which restarts by itself, and the log of its first pod."""

    restarts = 0

    def __init__(self, job: Job, options: Options, caught: list[int], say: Callable[[str], None]):
        self.job, self.options, self.caught, self.say = job, options, caught, say
        self.stream: Stream | None = None
        self.pod = ''
        self.looked = self.failures = self.seen_restarts = 0

    def submit(self) -> None:
        base.must(find(self.job, self.options))
        state, _ = state_of(base.must(look(self.job)))
        if state in ('Completed', 'Failed'):
            self.say(f'JobSet {self.job.name} of an earlier launch is {state}: it is replaced')
            base.must(delete(self.job, self.options))
        if state == 'Running':
            self.say(f'JobSet {self.job.name} is there already')
        else:
            base.must(create(self.job, self.options))

    def poll(self) -> int | None:
        if time.monotonic() - self.looked < LOOK_SEC and self.looked:
            return None
        self.looked = time.monotonic()
        state, found = self._look()
        if state is None:
            return None
        self._follow(found)
        if state == 'Running':
            return None
        if self.stream is not None:
            self.stream.wait(GRACE_SEC if self.caught else LOOK_SEC)
        if state == NONE:
            self.say(f'JobSet {self.job.name} was deleted')
            return RESUME
        if state == 'Completed':
            return DONE
        status = base.worst(exit_codes(found))
        if status == DONE:
            self.say(f'JobSet {self.job.name} has failed, and no pod tells how')
        return status or BAD_INPUT

    def _look(self) -> tuple[str | None, list[dict]]:
        """State and pods; (None, []) where kubectl failed, which it may for a while."""
        try:
            state, restarts = state_of(base.must(look(self.job)))
            found = json.loads(base.must(pods(self.job)))['items']
        except ValueError as error:
            self.failures += 1
            if self.failures == MOST_FAILURES:
                raise ValueError(
                    f'{error}. The JobSet goes on, and the same command finds it.'
                ) from None
            return None, []
        self.failures = 0
        if restarts > self.seen_restarts:
            self.say(f'restart {restarts} of at most {self.job.max_restarts}')
            self.seen_restarts = restarts
        return state, found

    def _follow(self, found: list[dict]) -> None:
        """One stream a pod; where it broke, only what the pod says from now on."""
        pod = first_pod(self.job, found)
        if pod is None or (self.stream is not None and self.stream.poll() is None):
            return
        if pod != self.pod:
            self.stream = Stream(logs(pod))
        elif not exit_codes(found):
            self.stream = Stream(logs(pod, '--tail=0'))
        self.pod = pod

    def stop(self) -> None:
        base.answer(delete(self.job, self.options))

    def close(self) -> None:
        if self.stream is not None:
            self.stream.end()

    def by_hand(self) -> str:
        return shlex.join(delete(self.job, self.options))


ENGINE = Engine(Options, script, Launch, check, programs={'xpk': XPK, 'kubectl': KUBECTL})
