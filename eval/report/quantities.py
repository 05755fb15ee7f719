"""The quantities that `lm.diagnostics` records: their order, their groups, and which fit a page."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from eval.report.series import MAP_NUMBERS, MAP_STEPS, Series

# What a page shows first: what tells early that a run goes unstable.
FEW = (
    'attention_entropy_share',
    'attention_largest_logit',
    'residual_rms',
    'update_ratio_hidden',
    'log_z_mean',
)
# What figures for papers are drawn of where more was recorded than MOST_FIGURES.
DRAWN = {
    *FEW,
    'attention_entropy',
    'attention_first_token',
    'residual_largest',
    'residual_sink',
    'layer_grad_norm',
    'layer_param_norm',
}
MOST_FIGURES = 12
GROUPS = {  # name: how the quantities begin, the first group that fits
    'attention, by head': (
        'attention_entropy',
        'attention_largest',
        'attention_logit',
        'attention_first',
    ),
    'residual stream': ('residual_',),
    'outputs of sublayers': ('attention_output_', 'mlp_output_'),
    'readout': ('log_z_', 'logit_'),
    'updates': ('update_',),
    'gradients': ('gradient_', 'layer_grad_norm'),
    'weights': ('weight_', 'layer_param_norm'),
    'singular values': ('singular_value_', 'sigma_', 'gamma_'),
}
OTHERS = 'others'


def group_of(name: str) -> str:
    fitting = (group for group, starts in GROUPS.items() if name.startswith(starts))
    return next(fitting, OTHERS)


def recorded(all_series: Iterable[Series]) -> list[str]:
    """The names of all that was recorded, the few that matter first, then by group."""
    groups, few = [*GROUPS, OTHERS], list(FEW)
    names = dict.fromkeys(
        name for one in all_series for kind in (one.layers, one.scalars) for name in kind
    )
    rank = {name: i for i, name in enumerate(names)}
    return sorted(
        names,
        key=lambda name: (
            few.index(name) if name in few else len(few),
            groups.index(group_of(name)),
            rank[name],
        ),
    )


def drawn(all_series: Iterable[Series]) -> list[str]:
    """What is recorded per layer and drawn for papers: all of it, or DRAWN where it is much."""
    names = dict.fromkeys(name for one in all_series for name in one.layers)
    return [name for name in names if len(names) <= MOST_FIGURES or name in DRAWN]


def choices(names: Sequence[str]) -> list[dict[str, Any]]:
    """Of what the page lets one choose: {'group', 'label', 'names'}, the few that matter first."""
    few = [name for name in names if name in FEW] or list(names[:3])
    found = [{'group': '', 'label': 'the few that matter', 'names': few}]
    for group in [*GROUPS, OTHERS]:
        own = [name for name in names if group_of(name) == group]
        if len(own) > 1:
            found.append({'group': group, 'label': f'{group}: all', 'names': own})
        labels = [{'label': name.replace('_', ' '), 'names': [name]} for name in own]
        found += [{'group': group} | one for one in labels]
    return found


def room(all_series: Sequence[Series]) -> tuple[int, list[str], list[str]]:
    """(how many steps of each a page has room for, names of what it holds, those of which it holds
    each head): so that all has `MAP_NUMBERS` numbers at most. Where the fewest steps are too many,
    what matters less is left out, down to the few that matter most.
    """
    names = recorded(all_series)
    layers, heads = collections.Counter(), collections.Counter()
    for one in all_series:
        layers.update({name: len(values[0]) for name, (_, values) in one.layers.items() if values})
        layers.update(dict.fromkeys(one.scalars, 1))
        heads.update({name: sum(map(len, v[0])) for name, (_, v) in one.heads.items() if v})
    few, others = names[: len(FEW)], names[len(FEW) :]
    order = [(layers, few), (heads, few), (layers, others), (heads, others)]
    low, high = MAP_STEPS
    left, kept = MAP_NUMBERS // low, {id(layers): [], id(heads): []}
    for widths, own in order:
        for name in own:
            is_kept = widths is layers and own is few
            if name in widths and (is_kept or widths[name] <= left):
                left -= widths[name]
                kept[id(widths)].append(name)
    used = MAP_NUMBERS // low - left
    return min(high, max(low, MAP_NUMBERS // max(used, 1))), kept[id(layers)], kept[id(heads)]
