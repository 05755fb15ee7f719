"""An estimate in words, and many in a table or a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from lm.run.table import as_table
from tpu.estimate import LEFT_OUT, Estimate
from tpu.trial import Trial

GB, GIB = 1e9, 2**30


def lines_of(found: Estimate) -> Iterator[str]:
    yield (
        f'{found.topology}: {found.chips:,} chips, mesh {found.mesh}; {found.parameters:,} '
        f'parameters, {found.tokens:,} tokens a step; compiled in {found.compile_seconds:.0f} s'
    )
    yield (
        f'memory: {found.memory_needed / GIB:.2f} of {found.memory_there / GIB:.2f} GiB a device: '
        + ', '.join(f'{kind} {size / GIB:.2f}' for kind, size in found.memory.items() if size > 1e6)
    )
    for sent in found.collectives:
        yield (
            f'{sent["kind"]}: {sent["number"]:,} a step, {sent["bytes"] / GB:,.3f} GB of results a '
            f'device, {1e3 * sent["seconds"]:,.1f} ms of its links'
        )
    yield (
        f'products: {found.flops / 1e12:,.2f} TFLOP a device, {1e3 * found.compute_seconds:,.1f} '
        f'ms; memory: {found.bytes / GB:,.2f} GB, {1e3 * found.memory_seconds:,.1f} ms; one '
        f'operation after the other {1e3 * found.operation_seconds:,.1f} ms; links '
        f'{1e3 * found.link_seconds:,.1f} ms ({found.rates.source})'
    )
    yield (
        f'a step takes at least {1e3 * found.step_seconds:,.1f} ms, bound by {found.bound_by}, and '
        f'{1e3 * found.step_seconds_exposed:,.1f} ms where nothing hides the links: model FLOP '
        f'utilisation at most {found.mfu:.1%} ({found.mfu_exposed:.1%})'
    )
    cost = '' if found.price is None else f', {found.price * found.chip_hours:,.0f} at its price'
    yield (
        f'{found.tokens_a_day / 1e9:,.1f} billion tokens a day; {found.steps:,} steps take '
        f'{found.steps * found.step_seconds / 3600:,.1f} hours, {found.chip_hours:,.0f} chip-hours'
        f'{cost}'
    )
    if found.unknown:
        yield f'NOTE: nobody says how many operations these have: {", ".join(found.unknown)}'
    yield f'left out: {"; ".join(LEFT_OUT)}'


def table_of(rows: Sequence[Trial]) -> Table:
    """One row each, the fastest first; then those that do not fit, and those not compiled."""
    return as_table([row.columns() for row in rows])


def picture(rows: Sequence[Trial], path: Path) -> None:
    """Seconds of a step against memory, a mark for each trial; the limit of memory as a line."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    top = max((1e3 * row.estimate.step_seconds for row in rows if row.estimate), default=1.0)
    figure, axes = plt.subplots(figsize=(10, 5.5), layout='constrained')
    tried = [row for row in rows if row.needed]
    for number, row in enumerate(tried, 1):
        fits = row.estimate is not None
        at = row.needed / GIB, 1e3 * row.estimate.step_seconds if fits else 1.05 * top
        color = ('tab:green' if number == 1 else 'tab:blue') if fits else 'tab:red'
        axes.plot(*at, 'o' if fits else 'x', color=color, label=f'{number}  {row.words}')
        axes.annotate(str(number), at, xytext=(5, 4), textcoords='offset points', fontsize=9)
    if tried and tried[0].estimate:
        axes.axvline(tried[0].there / GIB, color='gray', linestyle='--')
        axes.set_title(f'{tried[0].estimate.topology}; dashed: what there is; crosses do not fit')
    axes.set_xlabel('memory of a device, GiB')
    axes.set_ylabel('shortest step, ms')
    axes.margins(x=0.1, y=0.1)
    figure.legend(loc='outside right upper', fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
