"""Contract: tutorials work as written, at small sizes; a tutorial's notebook is valid."""

import dataclasses
import inspect
import json
import re

import pytest

from docs import notebooks
from tests import tutorials
from tests.pages import TUTORIALS
from tpu import compiled_step
from tpu.chips import CHIPS, GIB, Topology
from tpu.measured import nearest_ratio
from tpu.trials import Trial

PAGE = """
# A page

```python
x = 2
```

    uv run train.py --help

<!-- shows: b -->
```text
old
```

Words, and [a link](../other.md).

```python
print(x, 'a')
print(x, 'b')
```

<!-- shows: b -->
```text
older
```
"""


@pytest.mark.parametrize(
    'name',
    [  # a minute each; two have no Python and no command beyond those of the others
        pytest.param(name, marks=getattr(pytest.mark, tier))
        for name in TUTORIALS
        for tier in ['product' if name in ('first_ablation', 'transferred_rate') else 'full']
    ],
)
def test_tutorial_works(name):
    tutorials.renew(name, small=True)


def test_printed_output_replaces_old_output(monkeypatch, tmp_path):
    ran = []

    def command(words, folder, status):
        ran.append(words)
        return 'a\nab\nc\nd\nb\n'

    monkeypatch.setattr(tutorials, 'command', command)
    page = tutorials.carry_out(PAGE, tmp_path)
    assert ran == [['train.py', '--help']]
    assert page == PAGE.replace('old\n', '...\nab\n...\nb\n', 1).replace('older', '...\n2 b')


def test_page_without_output_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match='never finds no line of\nhere'):
        tutorials.carry_out(
            "```python\nprint('here')\n```\n\n<!-- shows: never -->\n```text\n```", tmp_path
        )


@pytest.mark.parametrize('name', TUTORIALS)
def test_shown_lines_match_their_pattern(name):
    """A pattern of an older output would drop the line when the page is renewed."""
    for block in tutorials.PRINTED.finditer(TUTORIALS[name].read_text()):
        assert tutorials.select_lines(block['text'], block['shows']) == block['text']


def test_every_page_states_its_duration():
    for path in TUTORIALS.values():
        assert tutorials.MINUTES.search(path.read_text()), path


class TestPlans:
    """Plans take minutes, so their printed lines are compared with the code, without numbers."""

    def read_blocks(self):
        page = TUTORIALS['pod_you_do_not_hold'].read_text()
        blocks = [match['text'].splitlines() for match in tutorials.PRINTED.finditer(page)]
        return [[line for line in block if line != '...'] for block in blocks]

    def hide_numbers(self, lines):
        return [re.sub(r'\d+(?:[,.]\d+)*', '#', line) for line in lines]

    def estimate(self, chip, **fields):
        numbers = dict.fromkeys(
            (field.name for field in dataclasses.fields(compiled_step.StepEstimate)), 1.0
        )
        numbers |= {'compute_seconds': 2.0, 'chips': 4, 'unknown': (), 'launches': None}
        rates = compiled_step.device_rates(Topology(chip, CHIPS[chip], [], (1,)))
        return compiled_step.StepEstimate(
            **numbers | {'rates': rates, 'ratio': nearest_ratio(chip)} | fields
        )

    @pytest.mark.parametrize('block', [1, 2])
    def test_step_that_fits_prints_these_lines(self, block):
        lines = self.read_blocks()[block]
        topology, mesh = re.match(r'(\S+): .* mesh (.*);', lines[0]).groups()
        memory = re.findall(r'(?:, |  )([a-z ,]+) [\d.]+', lines[4])
        source = inspect.getsource(compiled_step.memory_by_kind)
        assert 'parameters' in memory and all(f"'{kind}'" in source for kind in memory)
        kernels, dtype = re.fullmatch(r'kernels: (.*); (.*) matmuls', lines[2]).groups()
        links = [line.split(':')[0] for line in lines if 'on links' in line]
        assert 'all-gather' in links
        collective = {'number': 2, 'bytes': 1e9, 'seconds': 1.0, 'waiting': 1.0}
        estimate = self.estimate(
            topology.partition(':')[0],
            topology=topology,
            mesh=mesh,
            kernels=dict(name.split('=') for name in kernels.split()),
            dtype=dtype,
            memory=dict.fromkeys(memory, 2e9),
            collectives=[collective | {'kind': kind} for kind in links],
        )
        assert self.hide_numbers(lines) == self.hide_numbers(estimate.format_lines())

    def test_step_beyond_memory_prints_these_lines(self):
        first, *lines = self.read_blocks()[0]
        trials = []
        for line in lines:
            changes = dict(re.findall(r'--config\.([\w.]+)=([-\w]+)', line))
            fits = self.estimate('v5e') if ': fits, ' in line else None
            trials.append(f'  {Trial(changes, fits, 2 * GIB, GIB).format_line()}')
        error = compiled_step.DoesNotFit(2 * GIB, GIB)
        printed = [f'v5e:2x2: does not fit. A step {error}.', *trials]
        assert ': fits, ' in lines[-1]
        assert self.hide_numbers([first, *lines]) == self.hide_numbers(printed)


def test_notebook_has_steps_and_output():
    cells = json.loads(json.dumps(notebooks.notebook(PAGE)))['cells']
    assert [(c['cell_type'], c['source'].splitlines()[0]) for c in cells] == [
        ('markdown', '# A page'),
        ('code', 'x = 2'),
        ('code', '!uv run train.py --help'),
        ('markdown', 'Words, and a link.'),
        ('code', "print(x, 'a')"),
    ]
    assert cells[4]['outputs'][0]['text'] == 'older\n'
