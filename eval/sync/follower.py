"""Follows the runs of a workdir, a run or a sweep, and sends new rows to a tracker.

Runs take turns, each with a limited number of rows, so that no run waits for long. For each run the
follower holds its position in the files, its mark, and a session if the tracker has a free session.
An error of a run does not affect the others; it is retried in later rounds.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from eval.sync.marks import TrackerMark, file_name, read_mark
from eval.sync.records import (
    COMPLETE,
    StepTail,
    StepValues,
    TrackedRun,
    read_source,
    read_summary,
    short_digest,
)
from eval.sync.trackers import Session, Tracker
from lm.record.metrics import FILE
from lm.record.names import CONFIG, LOCK, SUMMARY, SWEEP
from lm.record.run import Run, list_runs
from lm.storage.files import UnreadableFile, first_line, hold_lock, is_locked

PACE_SEC = 5.0  # between rounds
TRIES = 4  # rounds without an answer, at the end
SLOWEST_SEC = 120.0  # between rounds while the tracker does not answer
FAILURES = 3  # runs in a row that fail: the tracker does not answer, and the round ends
PATIENCE_SEC = 60.0  # for a follower that is about to end because its training was killed
MAX_ERROR_CHARS = 300  # of an error
QUIET_SEC = 60.0  # without a training process, after which a run has ended
WATCHED = (CONFIG, FILE, SUMMARY)


@dataclasses.dataclass
class FollowedRun:
    """A run that is followed."""

    tail: StepTail
    stats: tuple = ()  # of its files at its last turn
    source: TrackedRun | None = None
    mark: TrackerMark | None = None
    closed_at: float = -float('inf')  # when its session was closed for another


class Follower:
    """Sends rows that runs have written since the last rows were sent.

    `sent` counts the steps sent so far; `errors` maps folders to the error of their last turn.

    Args:
      workdir: a run or a sweep.
      name: the tracker's name in TRACKERS.
      tracker: the tracker.
      say: prints a line.
    """

    def __init__(self, workdir: Path, name: str, tracker: Tracker, say: Callable[[str], None]):
        self._workdir, self._name, self._tracker, self._say = workdir, name, tracker, say
        self._followed: dict[Path, FollowedRun] = {}
        self._sessions: collections.OrderedDict[Path, Session] = collections.OrderedDict()
        self._last: Path | None = None  # the next round begins after it
        self._reported: set[str] = set()
        self.errors: dict[Path, str] = {}
        self.sent = 0

    @property
    def runs(self) -> int:
        return len(self._followed)

    def serve_round(self, is_last: bool = False) -> bool:
        """Serves each run once; returns whether some run has more to send now.

        is_last: whether this is the last round, which sends everything.
        """
        folders = [run.folder for run in list_runs(self._workdir)]
        start = folders.index(self._last) + 1 if self._last in folders else 0
        has_more, failures = False, 0
        for folder in folders[start:] + folders[:start]:
            followed = self._followed.setdefault(folder, FollowedRun(StepTail(Run(folder))))
            try:
                has_more |= self._serve(folder, followed, is_last)
                had_error = self.errors.pop(folder, None) is not None
                failures = failures if had_error else 0
            except Exception as error:  # of any kind: trackers have errors of their own
                self._handle_failure(folder, error)
                # A damaged file is no failure of the tracker.
                failures += not isinstance(error, UnreadableFile)
            if failures == FAILURES:
                self._last = folder
                return False
        self._last = None
        return has_more

    def _serve(self, folder: Path, followed: FollowedRun, is_last: bool) -> bool:
        stats = tuple(_read_stat(folder / name) for name in WATCHED)
        if stats == followed.stats or not (is_last or self._has_room(folder, followed)):
            return False
        if followed.mark is None or stats[:1] != followed.stats[:1]:
            self._identify_run(folder, followed)
        mark, summary = followed.mark, read_summary(Run(folder))
        assert mark is not None  # set by `_identify_run`
        steps, has_more = followed.tail.read()
        if not has_more and summary.get('status') in COMPLETE:
            steps += followed.tail.read_last()
        digest = short_digest(summary)
        has_ended = bool(summary) and not has_more and digest != mark.summary
        if has_ended or any(step.step > mark.step for step in steps):
            tail = followed.tail
            session = self._sessions.get(folder) or self._open(folder, followed)
            if followed.tail is not tail:  # the tracker lacks what the mark counts
                return True
            self._send(folder, followed, session, steps)
            if has_ended:
                session.end(summary['status'], summary)
                mark.summary = digest
                self._write_mark(folder, 'send')
                self._close(folder)
        followed.stats = followed.stats if has_more else stats
        return has_more

    def _has_room(self, folder: Path, followed: FollowedRun) -> bool:
        """Returns whether the run may have a session now.

        Another session may have to be closed for it.
        """
        if folder in self._sessions or len(self._sessions) < self._tracker.most_open:
            return True
        return time.monotonic() - followed.closed_at >= self._tracker.reopen_sec

    def _identify_run(self, folder: Path, followed: FollowedRun) -> None:
        """Reads which run the folder holds; another config than before means a new run."""
        source, mark = read_source(Run(folder)), read_mark(self._path(folder))
        if mark is None or mark.config != source.digest:
            self._close(folder)
            mark = TrackerMark.new(self._name, self._tracker.destination, source)
            mark.write(self._path(folder))
        elif followed.mark is not None:
            return  # the mesh may have changed
        followed.source, followed.mark, followed.tail = source, mark, StepTail(source.run)

    def _path(self, folder: Path) -> Path:
        return folder / file_name(self._name, self._tracker.destination)

    def _write_mark(self, folder: Path, after: str) -> None:
        if after == self._tracker.certain_after:
            mark = self._followed[folder].mark
            assert mark is not None  # a run with a session has one
            mark.write(self._path(folder))

    def _open(self, folder: Path, followed: FollowedRun) -> Session:
        """Opens the run. Its mark then has the last step that the tracker has."""
        while len(self._sessions) >= self._tracker.most_open:
            oldest = next(iter(self._sessions))
            self._close(oldest)
            self._followed[oldest].closed_at = time.monotonic()
        source, mark = followed.source, followed.mark
        assert source is not None and mark is not None  # set by `_identify_run`
        session = self._tracker.open(source, mark.run, mark.began)
        self._sessions[folder] = session
        # The tracker's own count decides: a killed process may have noted too much or too little.
        last_step = session.last_step()
        if last_step is not None and last_step < mark.step:
            followed.tail, mark.summary = StepTail(Run(folder)), ''
        mark.step = mark.step if last_step is None else last_step
        return session

    def _send(
        self, folder: Path, followed: FollowedRun, session: Session, steps: Sequence[StepValues]
    ) -> None:
        """Sends the steps that the tracker lacks: those after its last step."""
        mark = followed.mark
        assert mark is not None  # a run with a session has one
        self._sessions.move_to_end(folder)
        unsent: list[StepValues] = []
        for step in steps:
            if step.step > (unsent[-1].step if unsent else mark.step):
                unsent.append(step)
        if unsent:
            session.send(unsent)
            mark.step = unsent[-1].step
            self._write_mark(folder, 'send')
            self.sent += len(unsent)

    def _close(self, folder: Path) -> None:
        if session := self._sessions.pop(folder, None):
            try:
                session.close()
                self._write_mark(folder, 'close')
            except Exception as error:  # of any kind
                self._handle_failure(folder, error)

    def _handle_failure(self, folder: Path, error: Exception) -> None:
        """Reports the error once, and drops unsent state: the run is read again from its mark."""
        if session := self._sessions.pop(folder, None):
            with contextlib.suppress(Exception):
                session.close()
        self._followed[folder] = FollowedRun(StepTail(Run(folder)))
        self.errors[folder] = text = first_line(error, MAX_ERROR_CHARS) or type(error).__name__
        if text not in self._reported:
            self._say(f'{self._name}: {folder.name}: {text}')
        self._reported.add(text)

    def close(self) -> None:
        """Closes all sessions. The tracker then has their rows, or `errors` has the reason."""
        for folder in [*self._sessions]:
            self._close(folder)


def _read_stat(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):  # such as a link to itself
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return None


def follow(follower: Follower, has_ended: Callable[[float], bool]) -> bool:
    """Serves all runs until training has ended, then sends the rest; returns whether all was sent.

    has_ended: waits some seconds, or until training has ended; returns whether it has.
    """
    pace = PACE_SEC
    while True:
        has_more = follower.serve_round()
        pace = min(2 * pace, SLOWEST_SEC) if follower.errors else PACE_SEC
        if has_ended(0.0 if has_more else pace):
            return send_all(follower)


def send_all(follower: Follower, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Sends all rows on disk; returns whether the tracker has them. Tries TRIES times."""
    for attempt in range(TRIES):
        while follower.serve_round(is_last=True):
            pass
        follower.close()
        if not follower.errors:
            return True
        if attempt < TRIES - 1:
            sleep(2.0**attempt)
    return False


@contextlib.contextmanager
def hold_follower_lock(workdir: Path, name: str, destination: str) -> Generator[None]:
    """Holds the lock for sending rows of a folder to a destination; a cell uses its sweep's lock.

    Args:
      workdir: a run or a sweep.
      name: the tracker's name in TRACKERS.
      destination: the tracker's destination.

    Raises:
      InUseError: if another process holds it.
    """
    parent = workdir.absolute().parent
    folder = parent if (parent / SWEEP).exists() else workdir
    with hold_lock(
        folder / file_name(name, destination, 'lock'),
        in_use_message=f'another process is sending {folder} to {destination}; wait for it to end',
        wait_until=time.monotonic() + PATIENCE_SEC,
    ):
        yield


def is_training(workdir: Path) -> bool:
    """Returns whether a process holds a run of the folder."""
    folders = {workdir, *(run.folder for run in list_runs(workdir))}
    return any(is_locked(folder / LOCK) for folder in folders)


class Watch:
    """Waits for the end of another process's training: `has_ended` for `follow`.

    Training has ended if no process has held a run for QUIET_SEC. Between two groups of a sweep, no
    process holds a run for a while.
    """

    def __init__(self, workdir: Path):
        self._workdir, self._last_seen = workdir, time.monotonic()

    def __call__(self, seconds: float) -> bool:
        if is_training(self._workdir):
            self._last_seen = time.monotonic()
        time.sleep(seconds)
        return time.monotonic() - self._last_seen > QUIET_SEC
