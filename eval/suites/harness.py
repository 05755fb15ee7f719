"""Tasks of lm-evaluation-harness on a checkpoint."""

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.load import Checkpoint
from eval.suites.base import SuiteResult, Table
from lm.config.resolve import flatten
from lm.record.digests import hash_arrays, hash_record
from lm.storage.files import expand_home, first_line
from modules.choices import suggest_nearest
from modules.options import Option

RESAMPLES = 1000  # for standard errors without a closed form, such as word_perplexity's
OFFLINE = (
    'Without a network, set HF_DATASETS_OFFLINE=1 and HF_HUB_OFFLINE=1 to read earlier downloads '
    'from HF_DATASETS_CACHE and HF_HUB_CACHE (by default in HF_HOME). A task with "dataset_path: '
    'json" reads local files.'
)


def harness(
    checkpoint: Checkpoint,
    *,
    tasks: Annotated[
        str, Option('tasks of the harness or of include_path, as A+B; * matches any text')
    ] = '',
    include_path: Annotated[str, Option('folder with YAML files of your own tasks')] = '',
    limit: Annotated[int, Option('documents per task; 0: all', 0)] = 0,
    num_fewshot: Annotated[
        int, Option("examples before each question; -1: the task's default", -1)
    ] = -1,
    cache: Annotated[str, Option("folder that stores the model's answers; empty: none")] = '',
) -> SuiteResult:
    """Runs tasks of lm-evaluation-harness.

    Each metric is a number, TASK/METRIC, with its standard error, TASK/METRIC_stderr. A request is
    a document: BOS, the context, and the text that is scored or generated, truncated on the left to
    data.seq_len. Needs the extra `harness`. Source: github.com/EleutherAI/lm-evaluation-harness.

    Args:
      checkpoint: a loaded checkpoint.
      tasks: names joined by +; * matches any text.
      include_path: folder with YAML files of further tasks.
      limit: documents per task; 0: all.
      num_fewshot: examples before each question; -1: the task's default.
      cache: folder that stores the answers by checkpoint; '': none.
    """
    evaluator = _import_library('lm_eval.evaluator')
    from eval.suites.harness_lm import CheckpointLM

    names, manager = _find_tasks(tasks, include_path)
    with _silence_harness():
        loaded = _load_tasks(manager, names)
        evaluation = evaluator.simple_evaluate(
            CheckpointLM(checkpoint),
            tasks=loaded,
            task_manager=manager,
            limit=limit or None,
            num_fewshot=None if num_fewshot < 0 else num_fewshot,
            use_cache=_cache_path(checkpoint, cache) if cache else None,
            bootstrap_iters=RESAMPLES,
        )
    return _to_suite_result(evaluation)


def _import_library(name: str) -> Any:
    """Returns a module of lm_eval. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'--suite=harness needs lm-eval ({error}). Install it with pip install '
            '"evenkeel[harness]" or uv sync --extra harness.'
        ) from error


def _find_tasks(tasks: str, include_path: str) -> tuple[list[str], Any]:
    """Returns the names of the tasks, with patterns expanded, and the TaskManager.

    The harness takes 20 s to list its 14,000 names, so that it is done only if needed.

    Raises ValueError for an unknown name or a missing folder.
    """
    requested = [name for name in re.split(r'[+,\s]+', tasks) if name]
    if not requested:
        raise ValueError(
            'the suite harness needs at least one task: --suite=harness:TASK or TASK+TASK, such as '
            'harness:hellaswag+arc_easy. Set --harness.include_path=FOLDER for your own tasks.'
        )
    include_path = expand_home(include_path)
    if include_path and not Path(include_path).is_dir():
        raise ValueError(f'--harness.include_path={include_path} is not a folder.')
    task_manager = _import_library('lm_eval.tasks').TaskManager
    folder_manager = (
        task_manager(include_path=include_path, include_defaults=False) if include_path else None
    )
    # A group or tag in the folder may refer to tasks of the harness.
    if folder_manager is not None and set(requested) <= set(folder_manager.all_subtasks):
        return requested, folder_manager
    manager = task_manager(include_path=include_path or None)
    names: dict[str, None] = {}
    for name in requested:
        matches = manager.match_tasks([name]) if '*' in name else [name]
        unknown = [match for match in matches if match not in manager.task_index]
        if unknown or not matches:
            raise ValueError(
                f'the harness has no task {name!r} among its {len(manager.all_tasks):,} tasks, '
                f'groups and tags.{suggest_nearest(name, manager.all_tasks)}'
            )
        names |= dict.fromkeys(matches)
    return list(names), manager


def _load_tasks(manager: Any, names: list[str]) -> list[Any]:
    """Returns the tasks and groups with their data. Raises ValueError if a task has no data."""
    tasks = []
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # several libraries raise errors of their own types
            raise ValueError(
                f'the harness cannot read the task {name!r}: {type(error).__name__}: '
                f'{first_line(error, 300)}. {OFFLINE}'
            ) from error
        groups = loaded['groups']
        tasks += [groups[name]] if name in groups else loaded['tasks'].values()
    return tasks


@contextlib.contextmanager
def _silence_harness() -> Generator[None]:
    """Redirects the harness's output to stderr, and keeps its resampling in this process.

    A forked process would lack the threads of JAX.
    """
    previous = os.environ.get('DISABLE_MULTIPROC')
    os.environ['DISABLE_MULTIPROC'] = '1'
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if previous is None:
            del os.environ['DISABLE_MULTIPROC']
        else:
            os.environ['DISABLE_MULTIPROC'] = previous


def _cache_path(checkpoint: Checkpoint, folder: str) -> str:
    """Returns a path prefix that is unique to the model, as the harness's keys do not name it."""
    config = repr(sorted(flatten(checkpoint.recipe).items()))
    digest = hash_record({'arrays': hash_arrays(checkpoint.weights), 'config': config})
    cache_folder = Path(expand_home(folder))
    cache_folder.mkdir(parents=True, exist_ok=True)
    return str(cache_folder / f'{checkpoint.step}-{digest[:16]}')


def _to_suite_result(evaluation: Mapping[str, Any]) -> SuiteResult:
    numbers, rows = {}, []
    for task, metrics in evaluation['results'].items():
        for key, value in metrics.items():
            # Keys are METRIC,FILTER.
            metric, _, kind = key.partition(',')
            if not kind or not isinstance(value, int | float):
                continue  # the task's name, or an error without an estimate
            metric = metric if kind == 'none' else f'{metric},{kind}'
            numbers[f'{task}/{metric}'] = float(value)
            if '_stderr' not in metric:
                error = metrics.get(key.replace(',', '_stderr,', 1))
                error = error if isinstance(error, int | float) else None
                rows.append((task, metric, float(value), error, metrics.get('sample_len')))
    names = ('task', 'metric', 'value', 'standard error', 'documents')
    return SuiteResult(
        numbers, _document_items(evaluation), {'Tasks': Table.from_rows(names, rows)}
    )


def _document_items(evaluation: Mapping[str, Any]) -> dict[str, list]:
    """Returns a row for each document, as columns.

    `value` is the document's first metric with higher values better, or the log-probability in a
    perplexity. `metrics` has all metrics.
    """
    columns = {'item': [], 'task': [], 'metric': [], 'value': [], 'metrics': []}
    for task, documents in evaluation.get('samples', {}).items():
        higher_is_better = evaluation['higher_is_better'].get(task, {})
        for document in documents:
            metrics = {name: document[name] for name in document['metrics']}
            scalar_metrics = {
                name: value[0] if isinstance(value, tuple) else value
                for name, value in metrics.items()
                if isinstance(value, tuple) or higher_is_better.get(name)
            }
            name, value = next(iter(scalar_metrics.items()), ('', None))
            if not isinstance(value, int | float | np.number):
                continue  # the metric is defined only for all documents together
            kind = '' if document['filter'] == 'none' else f',{document["filter"]}'
            columns['item'].append(f'{task}/{document["doc_id"]}{kind}')
            columns['task'].append(task)
            columns['metric'].append(f'{name}{kind}')
            columns['value'].append(float(value))
            columns['metrics'].append(json.loads(json.dumps(metrics, default=str)))
    return columns
