"""Groups of parameters, which may have learning rates and other settings of their own.

A parameter belongs to the group that its declaration determines (`modules.params.ParamSpec`), never
to one by its name, so that a scanned model, a reparametrised weight and a new layer need no list of
patterns.
"""

from collections.abc import Callable, Mapping

from modules.params import LAYER, NORM, STREAM, ParamSpec

HIDDEN = 'hidden'  # the fields of the config section itself set it


# {group: (role, condition)}: a parameter is in the first group that has both.
MEMBERS: Mapping[str, tuple[str, Callable[[ParamSpec], bool]]] = {
    'router': ('hidden', lambda spec: 'router' in spec.axes),
    HIDDEN: ('hidden', lambda spec: True),
    'embedding': ('embedding', lambda spec: 'vocab' in spec.axes),
    'tables': ('embedding', lambda spec: True),
    'readout': ('readout', lambda spec: True),
    'norm': ('vector', lambda spec: spec.part == NORM),
    'stream': ('vector', lambda spec: spec.part == STREAM),
    'scalar': ('vector', lambda spec: not {*spec.axes} - {LAYER}),
    'vector': ('vector', lambda spec: True),
}
ROLE_OF = {group: role for group, (role, _) in MEMBERS.items()}
OTHERS = 'others'  # the parent of all groups but HIDDEN and the router
# {group: (its parameters, its parent, which gives it the settings that it does not set)}.
GROUPS: Mapping[str, tuple[str, str]] = {
    OTHERS: ('embeddings, readout and vectors', HIDDEN),
    'embedding': ('the word embedding', OTHERS),
    'tables': ('other tables', OTHERS),
    'readout': ('the readout', OTHERS),
    'norm': ('gains and biases of norms', OTHERS),
    'stream': ('factors of the stream', OTHERS),
    'scalar': ('single numbers', OTHERS),
    'vector': ('biases and other vectors', OTHERS),
    'router': ('routers of experts', HIDDEN),
}


def find_group(spec: ParamSpec) -> str:
    """Returns the group of a parameter: HIDDEN or a row of GROUPS.

    spec: describes the parameter.
    """
    return next(group for group, (role, has) in MEMBERS.items() if spec.role == role and has(spec))


def group_chain(group: str) -> tuple[str, ...]:
    """Returns the group and those it follows, without HIDDEN: ('readout', 'others').

    group: HIDDEN or a row of GROUPS.
    """
    chain: list[str] = []
    while group != HIDDEN:
        chain.append(group)
        _, group = GROUPS[group]
    return tuple(chain)
