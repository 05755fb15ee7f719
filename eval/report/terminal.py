"""The table of a tuned sweep's arms, as the terminal prints it below the findings."""

from collections.abc import Sequence

from eval.report.arms import ARM, VERDICT_COLUMNS, has_sentences, terminal_rows
from lm.study.arm import Ablation
from lm.study.tables.ablation import arm_results
from lm.study.tables.text import format_table

WIDTH = 80  # characters; the default of most terminals
MIN_LABEL = 24  # characters of a long name; columns are dropped before it gets shorter
DROPPED_FIRST = ('runs', 'state', 'p')  # until the table fits


def format_arms(ablation: Ablation) -> list[str]:
    """Returns the table of arms in lines of at most WIDTH characters, then the open questions.

    It leaves out columns that are empty or constant, and those that the findings state in
    sentences. An arm's name is shortened in its middle if the table would be wider.
    """
    rows = terminal_rows(ablation)
    stated = VERDICT_COLUMNS if has_sentences(ablation) else ()
    names = [
        name
        for name in rows[0]
        if name == ARM or (name not in stated and _is_informative([row[name] for row in rows]))
    ]
    droppable = [name for name in DROPPED_FIRST if name in names]
    droppable += [name for name in reversed(names) if name.startswith('best ')]
    needed = min(MIN_LABEL, max(len(row[ARM]) for row in rows))
    while _label_width(rows, names) < needed and droppable:
        names.remove(droppable.pop(0))
    labels = shorten([row[ARM] for row in rows], _label_width(rows, names))
    labelled = [row | {ARM: label} for row, label in zip(rows, labels, strict=True)]
    lines = format_table(labelled, names, 'table').split('\n')
    caveats = [
        f'  {row.arm.name}: {"; ".join(row.caveats)}.'
        for row in arm_results(ablation)
        if row.caveats
    ]
    return [*lines, *(['What could still change the verdicts:', *caveats] if caveats else [])]


def _is_informative(cells: Sequence[str]) -> bool:
    return any(cells) and (len(cells) == 1 or len(set(cells)) > 1)


def _label_width(rows: Sequence[dict[str, str]], names: Sequence[str]) -> int:
    """Returns the characters that are left for the names of the arms."""
    columns = ([name, *(row[name] for row in rows)] for name in names if name != ARM)
    widths = [2 + max(map(len, column)) for column in columns]
    return WIDTH - sum(widths)


def shorten(labels: Sequence[str], width: int) -> list[str]:
    """Returns labels of at most `width` characters, without the middle of longer ones.

    Labels that this would make equal begin with their number.
    """

    def cut(label: str, width: int) -> str:
        head, tail = width // 2, width - 1 - width // 2
        return label if len(label) <= width else f'{label[:head]}…{label[len(label) - tail :]}'

    texts = [cut(label, width) for label in labels]
    if len(set(texts)) == len(set(labels)):
        return texts
    prefixes = [f'{i + 1} ' for i in range(len(labels))]
    return [p + cut(label, width - len(p)) for p, label in zip(prefixes, labels, strict=True)]
