"""Hand-made workdirs, and a tracker that is a dict."""

import json
import math
from collections import Counter

from eval.sync.marks import NOTHING
from eval.sync.records import flatten_tree
from lm.record.metrics import NOT_FINITE
from lm.storage.files import format_json, seal_record

CONFIG = {'model': {'d_model': 8}, 'optim': {'lr': 0.001, 'beta2': None}, 'mesh': {'data': 1}}
INF, NAN = math.inf, math.nan


def rows_from(first, last, interval=10):
    """Yields rows as training does: of all steps, of layers and of validation at some steps."""
    for step in range(first, last + 1):
        odd = {3: INF, 5: -INF, 7: NAN}.get(step, 0.1 * step)
        yield {'step': step, 'loss': 1 / (step + 3), 'grad_norm': odd, 'step_sec': 0.5}
        if step % interval == 2:
            yield {'step': step, 'entropy': [[NAN, 0.25 * step], [1.0, INF]], 'rms': [1.0, 2.0]}
        if step % interval == 0:
            yield {'step': step, 'validation_ce': 2.0 + step}


def line(row):
    """Returns a line of metrics.jsonl, written independently of the recorder."""
    non_finite = {}

    def spell(value, tag):
        if isinstance(value, list):
            axis = 'head' if 'layer' in tag else 'layer'
            return [spell(element, f'{tag}/{axis}_{i}') for i, element in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            non_finite[tag] = str(value)
            return None
        return value

    row = {name: spell(value, name) for name, value in row.items()}
    return json.dumps(row | ({NOT_FINITE: non_finite} if non_finite else {})) + '\n'


def begin(folder, lr=0.001, mesh=1):
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {'optim': {'lr': lr, 'beta2': None}, 'mesh': {'data': mesh}}
    (folder / 'config.json').write_text(format_json(seal_record(config)))
    (folder / 'summary.json').unlink(missing_ok=True)


def train(folder, first, last):
    with (folder / 'metrics.jsonl').open('a') as file:
        file.writelines(map(line, rows_from(first, last)))


def go_back(folder, step):
    """Drops the rows after a step, as a run that resumes from a checkpoint does."""
    path = folder / 'metrics.jsonl'
    lines = [text for text in path.read_text().splitlines(True) if json.loads(text)['step'] <= step]
    new_path = path.with_suffix('.new')
    new_path.write_text(''.join(lines))
    new_path.replace(path)
    (folder / 'summary.json').unlink(missing_ok=True)


def end(folder, status='done', **numbers):
    record = {'status': status, 'parameters': 12, 'warnings': [], **numbers}
    (folder / 'summary.json').write_text(format_json(seal_record(record)))


def go_on(folder, behind, last, status='done'):
    """Repeats the steps after `behind`, and ends."""
    go_back(folder, behind)
    train(folder, behind + 1, last)
    end(folder, status)


def write_run(folder, first, last, status='done', lr=0.001, **numbers):
    """Writes a run that has ended, with the rows of these steps."""
    begin(folder, lr)
    train(folder, first, last)
    end(folder, status, **numbers)


def on_disk(folder):
    """Returns {(step, tag): value as text} of metrics.jsonl; text, as NaN equals nothing."""
    points = {}
    for text in (folder / 'metrics.jsonl').read_text().splitlines():
        row = json.loads(text)
        non_finite, step = row.pop(NOT_FINITE, {}), row.pop('step')
        lists = {name: value for name, value in row.items() if isinstance(value, list)}
        numbers = {name: value for name, value in row.items() if name not in lists}
        for name, layers in lists.items():
            for i, layer in enumerate(layers):
                heads = {f'{name}/layer_{i}': layer}
                if isinstance(layer, list):
                    heads = {
                        f'{name}/layer_{i}/head_{j}': element for j, element in enumerate(layer)
                    }
                numbers |= heads
        numbers |= {tag: float(spelled) for tag, spelled in non_finite.items()}
        points |= {(step, tag): repr(float(x)) for tag, x in numbers.items() if x is not None}
    return points


class FollowerKilled(BaseException):
    """Ends the follower at this point."""


class Server:
    """Runs by name.

    knows: whether it reports its last step (as W&B), or completes steps (as MLflow).
    """

    certain_after = 'send'
    destination = 'a dict'

    def __init__(self, knows=True, most_open=4, reopen_sec=0.0):
        self.knows, self.most_open, self.reopen_sec = knows, most_open, reopen_sec
        self.runs, self.open_now, self.most_seen, self.opened, self.asked = {}, 0, 0, Counter(), 0
        self.ends, self.kill, self.down, self.bad = {}, None, False, ()

    def open(self, source, name, began):
        self.asked += 1
        if self.down or source.run.name in self.bad:
            raise ConnectionError('no route to the tracker')
        self.open_now += 1
        self.most_seen = max(self.most_seen, self.open_now)
        self.opened[source.run.name] += 1
        is_new = name not in self.runs
        return Session(self, name, source, self.runs.setdefault(name, []), is_new)

    def points(self, name):
        """Returns {(step, tag): value}. Raises AssertionError if a point is there twice."""
        points = {}
        for step, tag, value in self.runs[name]:
            assert (step, tag) not in points, (step, tag)
            points[step, tag] = repr(float(value))
        return points


class Session:
    """An open run of a Server."""

    def __init__(self, server, name, source, points, is_new):
        self.server, self.name, self.config = server, name, flatten_tree(source.config)
        self.points, self.is_new = points, is_new
        self.before = {tag: step for step, tag, _ in points}

    def last_step(self):
        last = max((step for step, _, _ in self.points), default=NOTHING)
        return last if self.server.knows or self.is_new else None

    def send(self, steps):
        if self.server.down:
            raise ConnectionError('no route to the tracker')
        if self.server.kill == 'before':
            raise FollowerKilled
        for i, step in enumerate(steps):
            if self.server.kill == 'midway' and i == len(steps) // 2:
                raise FollowerKilled
            for n, (tag, value) in enumerate(step.values.items()):
                # A server that reports its last step stores each step whole.
                if self.server.kill == 'within' and i and n == 1 and not self.server.knows:
                    raise FollowerKilled
                if self.server.knows or step.step > self.before.get(tag, NOTHING):
                    self.points.append((step.step, tag, value))
        if self.server.kill == 'behind':
            raise FollowerKilled

    def end(self, status, summary):
        if self.server.kill == 'at the end':
            raise FollowerKilled
        self.server.ends.setdefault(self.name, []).append((status, summary))

    def close(self):
        self.server.open_now -= 1
