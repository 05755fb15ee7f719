"""Fits the cost of few bits in the runs of configs/studies/format_law.py.

    uv run python -m tests.bench.format_law --sweep=WORKDIR

`L(width, E, M, B) - L(width) = a_width log2(B)^b / ((E + 0.5)^d (M + 0.5)^m)`, by least squares of
the losses' means over seeds. Prints the exponents with their standard errors, the error of the fit
and of formats that it has not seen, and how much two seeds differ. In the twin, each cost is that
of another format, drawn at random; it must not predict formats that it has not seen.
"""

import argparse
import collections
from pathlib import Path

from lm.launch.before_jax import prepare_process

NAMES = ('b', 'd', 'm')


def main() -> None:
    prepare_process()  # before JAX is imported
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sweep', type=Path, required=True)
    args = parser.parse_args()

    import numpy as np
    from scipy import optimize

    from lm.study.tables.results import gather
    from modules.precision.formats import parse_format

    losses = collections.defaultdict(list)
    for record in gather(args.sweep):
        name, block = record['kernels_x_format'] or '', int(record['kernels_x_block'] or 0)
        losses[record['d_model'], block, name].append(record['ce'])
    spread = np.sqrt(np.mean([np.var(values, ddof=1) for values in losses.values()]))
    wide = {width: np.mean(values) for (width, _, name), values in losses.items() if not name}
    keys = sorted(key for key in losses if key[2])
    widths = sorted(wide)
    rows = []
    for width, block, name in keys:
        format = parse_format(name)
        cost = np.mean(losses[width, block, name]) - wide[width]
        index = widths.index(width)
        rows.append((index, np.log2(block), format.exponent_bits, format.mantissa_bits, cost))
    index, blocks, exponents, mantissas, costs = map(np.array, zip(*rows, strict=True))

    def predict(parameters, chosen):
        scales, (b, d, m) = np.exp(parameters[: len(widths)]), parameters[len(widths) :]
        return (
            scales[index[chosen]]
            * blocks[chosen] ** b
            / (exponents[chosen] + 0.5) ** d
            / (mantissas[chosen] + 0.5) ** m
        )

    def fit(costs, chosen):
        start = np.array([0.0] * len(widths) + [1.0, 2.0, 2.0])
        return optimize.least_squares(lambda p: predict(p, chosen) - costs[chosen], start)

    def measure_unseen_error(costs):
        errors = np.zeros_like(costs)
        for name in {name for _, _, name in keys}:
            is_held_out = np.array([key[2] == name for key in keys])
            parameters = fit(costs, ~is_held_out).x
            errors[is_held_out] = predict(parameters, is_held_out) - costs[is_held_out]
        return np.sqrt(np.mean(errors**2))

    everything = np.ones(len(costs), bool)
    solution = fit(costs, everything)
    parameters, freedom = solution.x, len(costs) - len(solution.x)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac) * 2 * solution.cost / freedom
    deviations = np.sqrt(np.diag(covariance))
    random = np.random.default_rng(0)
    twins = [measure_unseen_error(random.permutation(costs)) for _ in range(20)]
    print('| width | values that share a scale | format | cost | fit |\n|---|---|---|---|---|')
    for (width, block, name), cost, value in zip(
        keys, costs, predict(parameters, everything), strict=True
    ):
        print(f'| {width} | {block} | `{name}` | {cost:.3f} | {value:.3f} |')
    print({w: f'{s:.3g}' for w, s in zip(widths, np.exp(parameters[: len(widths)]), strict=True)})
    for name, power, deviation in zip(
        NAMES, parameters[len(widths) :], deviations[len(widths) :], strict=True
    ):
        print(f'{name} = {power:.2f} ± {deviation:.2f}')
    print(f'error of the fit {np.sqrt(2 * solution.cost / len(costs)):.4f}')
    print(f'error of formats left out {measure_unseen_error(costs):.4f}')
    print(f'the same in 20 twins {min(twins):.4f} to {max(twins):.4f}')
    print(f'costs deviate by {np.std(costs):.4f}, losses of seeds by {spread:.4f}')


if __name__ == '__main__':
    main()
