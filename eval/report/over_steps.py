"""A figure for papers of what tells early that runs go unstable, over steps."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from eval.compare import Comparison
from eval.report.depth import shown
from eval.report.quantities import FEW
from eval.report.series import Series

All = Mapping[str, Series]  # by workdir
RATE = 'learning_rate'
WIDEST_OF_TWO = 32  # characters of a name that fits beside another


def drawable(comparisons: Sequence[Comparison], series: All) -> list[str]:
    """Those of the few that matter which have numbers of some run that is shown, and RATE."""
    runs = [series[workdir] for comparison in comparisons for workdir in shown(comparison)]
    return [name for name in (*FEW, RATE) if any(len(_lines(one, name)[0]) for one in runs)]


def over_steps(
    figure: Figure,
    comparisons: Sequence[Comparison],
    looks: Sequence[Mapping[str, str]],
    series: All,
    name: str,
) -> None:
    """A line for each run of each variant, at its best learning rate: the mean over layers, with a
    band from the least to the greatest layer. Logarithmic where all values are positive and the
    greatest is a hundred times the least.
    """
    figure.set_size_inches(4.6, 3.4)
    axes, drawn = figure.subplots(), []
    for comparison, look in zip(comparisons, looks, strict=True):
        for i, workdir in enumerate(shown(comparison)):
            steps_S, values_SL = _lines(series[workdir], name)
            if not len(steps_S):
                continue
            label = {} if i else {'label': comparison.variant.name}
            style = {'color': look['color'], 'ls': look['dash'], 'alpha': 0.8} | label
            axes.plot(steps_S, values_SL.mean(1), **style)
            low, high = values_SL.min(1), values_SL.max(1)
            axes.fill_between(steps_S, low, high, color=look['color'], alpha=0.1, lw=0)
            drawn += [low.min(), high.max()]
    if min(drawn) > 0 and max(drawn) > 100 * min(drawn):
        axes.set_yscale('log')
    axes.set(xlabel='step', ylabel=name.replace('_', ' '))
    if len(comparisons) > 1:
        longest = max(len(comparison.variant.name) for comparison in comparisons)
        columns = 2 if longest <= WIDEST_OF_TWO else 1
        figure.legend(loc='outside upper center', ncols=columns, fontsize=7)


def _lines(one: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[S] steps and [S, L] values, of the steps at which all layers have one; one column for what
    is of the whole model.
    """
    of_model = one.rates if name == RATE else one.scalars.get(name)
    steps, values = of_model or one.layers.get(name) or ([], [])
    values_SL = np.array(values, float).reshape(len(steps), -1 if steps else 0)
    kept_S = np.isfinite(values_SL).all(1)
    return np.array(steps)[kept_S], values_SL[kept_S]
