"""Contract: tutorials work as written, at small sizes; a tutorial's notebook is valid."""

import json

import pytest

from docs import notebooks
from tests import tutorials
from tests.pages import TUTORIALS

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


def test_every_page_states_its_duration():
    for path in TUTORIALS.values():
        assert tutorials.MINUTES.search(path.read_text()), path


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
