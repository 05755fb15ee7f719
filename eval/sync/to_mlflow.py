"""MLflow: a server, or a database such as sqlite:///mlflow.db.

A run is found again by a tag with its name. The times of points follow from the rows, and a
database stores two equal points once. Servers may not: for an existing run, the steps of a metric
are sent only after the last step that the server has of it.

Databases hold no infinity: MLflow returns LARGEST for it. NaN stays NaN.
"""

import contextlib
import logging
import math
import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from eval.sync.marks import NOTHING, without_password
from eval.sync.records import StepValues, TrackedRun, is_mesh
from lm.storage.files import first_line, open_regular

TAG = 'evenkeel.run'
LARGEST = 1.7976931348623157e308
MAX_POINTS, MAX_PARAMS = 1000, 100  # in a request
MAX_PARAM_CHARS, MAX_TAG_CHARS, MAX_NAME_CHARS = 6000, 8000, 250  # characters
RUN_STATUS = {'done': 'FINISHED', 'diverged': 'FAILED', 'failed': 'FAILED', 'stopped': 'KILLED'}
SQLITE, MIGRATIONS = 'sqlite:///', 'alembic_version'  # a table of every MLflow database
LOCKED_SEC = 10.0  # to wait for another process's lock of the database
# By default MLflow retries for four minutes, waits two minutes for an answer, and reports its use.
DEFAULTS = {
    'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '2',
    'MLFLOW_HTTP_REQUEST_TIMEOUT': '20',
    'MLFLOW_DISABLE_TELEMETRY': 'true',
}


def check_database(uri: str) -> None:
    """Raises ValueError for an sqlite file that is no database, is locked, or has other tables.

    MLflow would try it for a hundred seconds. A missing file is no error: it will be created.
    """
    path = Path(uri.removeprefix(SQLITE).partition('?')[0])
    if not uri.startswith(SQLITE) or path.name in ('', ':memory:') or not os.path.lexists(path):
        return
    open_regular(path).close()
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=LOCKED_SEC)) as database:
            rows = database.execute("select name from sqlite_master where type = 'table'")
            tables = {name for (name,) in rows}
    except sqlite3.Error as error:
        raise ValueError(
            f'{path} cannot be read as an SQLite database ({first_line(error)})'
        ) from error
    if tables and MIGRATIONS not in tables:
        raise ValueError(f'{path} is not an MLflow database: it has no table {MIGRATIONS}')


class Mlflow:
    """An experiment; `project` is its name, by default $MLFLOW_EXPERIMENT_NAME or evenkeel."""

    most_open: ClassVar[int] = 100_000  # a session holds no connection
    reopen_sec: ClassVar[float] = 0.0
    certain_after: ClassVar[str] = 'send'

    def __init__(self, uri: str | None, project: str | None):
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        check_database(uri or os.environ.get('MLFLOW_TRACKING_URI', ''))
        import mlflow

        for name in ('mlflow', 'alembic'):
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = uri or mlflow.get_tracking_uri()
        self.client = mlflow.MlflowClient(uri)
        self._project = project or os.environ.get('MLFLOW_EXPERIMENT_NAME') or 'evenkeel'
        self._experiment: str | None = None
        self.destination = f'{without_password(uri)} ({self._project})'

    def open(self, source: TrackedRun, name: str, began: float) -> 'MlflowSession':
        """Opens the run with this tag; creates it if the server does not have it.

        Args:
          source: the run.
          name: its name in the mark.
          began: start of its time axis, in seconds since 1970.
        """
        if self._experiment is None:
            experiment = self.client.get_experiment_by_name(self._project)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self.client.create_experiment(self._project)
            )
            self._experiment = experiment_id
        query = f"tags.`{TAG}` = '{name}'"
        runs = self.client.search_runs([self._experiment], query, max_results=1)
        tags = {TAG: name, 'evenkeel.workdir': str(source.run.folder.absolute())}
        if source.run.sweep:
            tags['evenkeel.sweep'] = source.run.sweep
        options = {'tags': tags, 'run_name': source.run.name, 'start_time': round(began * 1000)}
        run = runs[0] if runs else self.client.create_run(self._experiment, **options)
        session = MlflowSession(self.client, run, began, is_new=not runs)
        session.describe(source.config)
        return session


class MlflowSession:
    """A run of MLflow."""

    def __init__(self, client: Any, run: Any, began: float, is_new: bool):
        self._client, self._id, self._began = client, run.info.run_id, began
        self._is_new, self._params = is_new, run.data.params
        self._is_running = run.info.status == 'RUNNING'
        # The server's last step of each metric; only later steps are sent.
        self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}

    def describe(self, config: Mapping[str, Any]) -> None:
        """Sends the config as params. A param cannot change, so the fields of the mesh are tags."""
        from mlflow.entities import Param, RunTag

        texts = {path: str(x)[:MAX_PARAM_CHARS] for path, x in config.items() if x is not None}
        changed = {p for p, text in texts.items() if self._params.get(p, text) != text}
        new_params = [
            Param(path, text)
            for path, text in texts.items()
            if not is_mesh(path) and path not in self._params
        ]
        new_tags = [RunTag(path, text) for path, text in texts.items() if is_mesh(path)]
        new_tags += [RunTag(f'changed.{path}', texts[path]) for path in sorted(changed)]
        self._log(params=new_params, size=MAX_PARAMS)
        self._log(tags=new_tags, size=MAX_PARAMS)

    def last_step(self) -> int | None:
        return NOTHING if self._is_new else None

    def send(self, steps: Sequence[StepValues]) -> None:
        from mlflow.entities import Metric

        if not self._is_running:
            self._client.update_run(self._id, status='RUNNING')
            self._is_running = True
        points = [
            Metric(name, value, round((self._began + step.seconds) * 1000), step.step)
            for step in steps
            for name, value in ((metric_name(tag), x) for tag, x in step.values.items())
            if step.step > self._last_steps.get(name, NOTHING)
        ]
        self._log(metrics=points, size=MAX_POINTS)

    def _log(self, size: int, **entities: list[Any]) -> None:
        ((kind, entries),) = entities.items()
        for start in range(0, len(entries), size):
            self._client.log_batch(self._id, **{kind: entries[start : start + size]})

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        self._log(
            tags=[RunTag(name, str(x)[:MAX_TAG_CHARS]) for name, x in summary.items()],
            size=MAX_PARAMS,
        )
        self._client.set_terminated(self._id, RUN_STATUS.get(status, 'KILLED'))
        self._is_running = False

    def close(self) -> None: ...

    def read_points(self, name: str) -> dict[int, list[float]]:
        """Returns all values that the server has of a metric by step, with infinities restored."""
        points: dict[int, list[float]] = {}
        for point in self._client.get_metric_history(self._id, name):
            is_infinite = abs(point.value) >= LARGEST
            value = math.copysign(math.inf, point.value) if is_infinite else point.value
            points.setdefault(point.step, []).append(value)
        return points


def metric_name(tag: str) -> str:
    """Returns a tag in characters that MLflow accepts, such as 'entropy/layer_0/head_1'."""
    return re.sub(r'[^\w./ -]', '_', tag)[:MAX_NAME_CHARS]
