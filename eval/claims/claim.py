"""Claim files: a paper's statement, the runs that test it, and the criterion.

    PART = 'optimizers'
    STUDIES = {'whole': 'configs/studies/optimizers_tuned.py'}
    HOLDS = (
        {
            'study': 'whole',
            'arm': {'optim.name': 'muon'},
            'difference': (None, 0.0),
            'label': 'loss of Muon minus loss of AdamW (nats per token)',
        },
    )
    FIDELITY = {
        'Muon': {
            'setting': 'momentum 0.95, Nesterov, factor sqrt(max(1, outputs / inputs))',
            'published': 'the same with a factor of 0.2 sqrt(max(inputs, outputs))',
            'source': 'arXiv:2502.16982, section 2',
        },
    }

A study is a config file with config.tune, or `measure:NAME`; several claims may share a study. A
condition is a quantity (`eval.claims.evidence`) and its allowed range; its label names the quantity
and the unit on pages. A claim holds if all its conditions do. WITHDRAWN = 'reason' takes back the
verdict, whatever the evidence; CAUTION = 'text' warns the reader before the verdict. Both are on
one line. FIDELITY has the setting of each arm in this test, the published one, and its source.
CONTROL and TWIN are further conditions, which show whether the test can decide: CONTROL has effects
that it must find, and TWIN has the conditions of HOLDS for the method with a broken equation, which
must not all hold. NUISANCES names studies with the same arms in which a factor that the claim does
not mention, such as the initial scale of the embeddings, has another value. HOLDS is repeated
there, TWIN as far as it is on the same studies, and CONTROL where equal arms would meet HOLDS. The
first line of the file's docstring is the claim. Texts for each of HEADINGS follow: the paper, its
statement, the test here, and the criterion in words.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.evidence import MEASURE, QUANTITIES
from modules.choices import choose, suggest_nearest

FOLDER = Path('configs/claims')
HEADINGS = ('Paper', 'Says', 'Here', 'Counts')
PARTS = (
    *('optimizers', 'norms', 'placements', 'attention', 'activations', 'reparametrisations'),
    *('recipes', 'losses', 'scaling', 'data', 'weights', 'evaluation'),
)
# Constants of a file.
REQUIRED_CONSTANTS = ('PART', 'STUDIES', 'HOLDS', 'FIDELITY')
SENTENCE_CONSTANTS = ('WITHDRAWN', 'CAUTION')
GUARDS = ('CONTROL', 'TWIN')
NUISANCES = 'NUISANCES'
# Keys of conditions, besides the quantity.
STUDY_KEYS, MEASURE_KEYS = {'study', 'arm', 'against', 'label'}, {'study', 'value', 'label'}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A quantity of a study and its allowed range.

    of: selects the quantity, such as {'arm': {...}} or {'value': 'x'}. label: the quantity and its
    unit in words, or ''.
    """

    study: str
    quantity: str
    of: Mapping[str, Any]
    low: float
    high: float
    label: str = ''

    @property
    def range_text(self) -> str:
        """Returns 'at most 0.03', 'at least 1.2' or 'between -0.03 and 0.03'."""
        ends = {(False, True): f'at most {self.high:g}', (True, False): f'at least {self.low:g}'}
        finite = math.isfinite(self.low), math.isfinite(self.high)
        return ends.get(finite, f'between {self.low:g} and {self.high:g}')

    @property
    def is_met_by_equals(self) -> bool:
        """Whether a difference of 0 would meet it."""
        return self.low < 0 < self.high


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """NuisanceSetting of an arm in this test and as published, and where it was published."""

    setting: str
    published: str
    source: str


@dataclasses.dataclass(frozen=True)
class NuisanceSetting:
    """The conditions of a claim at another value of a nuisance factor.

    factor: such as 'initial scale of the embeddings'. reference: its value in the claim's own
    studies. value: its value in this setting. studies: the study of this setting by that of HOLDS.
    control: empty unless a condition `is_met_by_equals`. twin: those in the repeated studies.
    """

    factor: str
    reference: str
    value: str
    studies: Mapping[str, str]
    conditions: Sequence[Condition] = ()
    control: Sequence[Condition] = ()
    twin: Sequence[Condition] = ()


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a file.

    studies: {name: config file, as train.py takes it}. withdrawn: the reason to take back the
    verdict, or ''. caution: a warning on the verdict, or ''. fidelity: by the name of an arm.
    control: effects that the test must find. twin: the conditions for the method with a broken
    equation, which must not all hold. settings: where the conditions are repeated.
    """

    name: str
    title: str
    texts: Mapping[str, str]
    part: str
    studies: Mapping[str, str]
    conditions: Sequence[Condition]
    fidelity: Mapping[str, Fidelity]
    withdrawn: str = ''
    caution: str = ''
    control: Sequence[Condition] = ()
    twin: Sequence[Condition] = ()
    settings: Sequence[NuisanceSetting] = ()

    @property
    def digest(self) -> str:
        """Returns a digest of the criterion; it changes with any condition and its study.

        Texts, labels, FIDELITY, CONTROL, TWIN, NUISANCES and studies of these alone do not count.
        """
        conditions = [dataclasses.asdict(condition) for condition in self.conditions]
        names = {fields['study'] for fields in conditions}
        for fields in conditions:
            del fields['label']
        studies = {name: config for name, config in self.studies.items() if name in names}
        criteria = [studies, *conditions]
        return hashlib.sha256(json.dumps(criteria, sort_keys=True).encode()).hexdigest()[:12]


def read_claims(folder: Path = FOLDER, only: Iterable[str] = ()) -> list[Claim]:
    """Returns the claims of a folder by name, or only the claims named in `only`.

    Raises:
      ValueError: if the folder has no claims, a name is unknown, or a file is not a valid claim.
    """
    files = {path.stem: path for path in sorted(folder.glob('[!_]*.py'))}
    if not files:
        raise ValueError(
            f'{folder} must contain claim files (*.py), but has none. '
            f'Set --claims to a folder of claims, such as --claims={FOLDER}.'
        )
    chosen = list(only) or list(files)
    for name in chosen:
        if name not in files:
            raise ValueError(f'{folder} has no claim {name!r}{suggest_nearest(name, files)}')
    return [read_claim(files[name]) for name in chosen]


def read_claim(path: Path) -> Claim:
    """Returns the claim of a file, a Python module that is run.

    Raises:
      ValueError: for a file that fails or is not a valid claim; the message has the path.
    """
    try:
        return _build_claim(path.stem, runpy.run_path(str(path)))
    except SyntaxError as error:
        raise ValueError(f'{path}: {error.msg}, line {error.lineno}') from error
    except Exception as error:  # whatever the file raises
        raise ValueError(f'{path}: {error}') from error


def _build_claim(name: str, module: Mapping[str, Any]) -> Claim:
    title, texts = _parse_docstring(inspect.cleandoc(module['__doc__'] or ''))
    constants = {constant: value for constant, value in module.items() if constant[0] != '_'}
    for constant in constants:  # a misspelt WITHDRAWN would leave the verdict on the board
        choose(
            dict.fromkeys((*REQUIRED_CONSTANTS, *SENTENCE_CONSTANTS, *GUARDS, NUISANCES)),
            constant,
            'a constant of a claim',
        )
    if missing := [constant for constant in REQUIRED_CONSTANTS if not constants.get(constant)]:
        raise ValueError(
            f'a claim file must define {" and ".join(missing)}; see configs/claims/muon.py '
            'for an example'
        )
    if constants['PART'] not in PARTS:
        raise ValueError(f'PART must be one of {", ".join(PARTS)}, got {constants["PART"]!r}')
    studies = _parse_studies(constants['STUDIES'])
    conditions = _parse_conditions('HOLDS', constants['HOLDS'], studies)
    sentences: dict[str, Any] = {
        constant.lower(): _parse_line(constants[constant], constant)
        for constant in SENTENCE_CONSTANTS
        if constant in constants
    }
    if not isinstance(constants['FIDELITY'], dict):
        raise ValueError(f'FIDELITY must be a dict by arm, got {constants["FIDELITY"]!r}')
    fidelity = {arm: _parse_fidelity(arm, fields) for arm, fields in constants['FIDELITY'].items()}
    guards: dict[str, Any] = {
        constant.lower(): _parse_conditions(constant, constants.get(constant, ()), studies)
        for constant in GUARDS
    }
    _check_guards(conditions, **guards)
    claim = Claim(
        name, title, texts, constants['PART'], studies, conditions, fidelity, **sentences, **guards
    )
    rows = constants.get(NUISANCES, ())
    if not isinstance(rows, tuple | list):
        raise ValueError(f'{NUISANCES} must be a tuple of settings, got {rows!r}')
    return dataclasses.replace(claim, settings=[_parse_setting(fields, claim) for fields in rows])


def _parse_studies(studies: Any) -> dict[str, str]:
    """Returns {name: config file}. Raises ValueError for anything but a dict of such texts."""
    if not isinstance(studies, dict) or not all(isinstance(name, str) for name in studies):
        raise ValueError(
            f'STUDIES must be a dict of a config file, or {MEASURE}NAME, by name; got {studies!r}'
        )
    return {name: _parse_line(config, f'STUDIES[{name!r}]') for name, config in studies.items()}


def _parse_setting(fields: Any, claim: Claim) -> NuisanceSetting:
    """Returns a setting with the conditions and controls of a claim in its studies."""
    names = ('factor', 'reference', 'value', 'studies')
    if not isinstance(fields, dict) or {*fields} != {*names}:
        raise ValueError(
            f'each setting in {NUISANCES} must be a dict of {", ".join(names)}; got {fields}'
        )
    texts = {key: _parse_line(fields[key], f'{key} of {NUISANCES}') for key in names[:3]}
    studies = fields['studies']
    tested = {condition.study for condition in claim.conditions}
    is_dict = isinstance(studies, dict)
    if not is_dict or tested - {*studies} or {*studies, *studies.values()} - {*claim.studies}:
        raise ValueError(
            f'studies of {NUISANCES} must name, for each study in HOLDS ({", ".join(tested)}), '
            f'another of STUDIES ({", ".join(claim.studies)}); got {studies}'
        )
    conditions, control, twin = (
        [
            dataclasses.replace(condition, study=studies[condition.study])
            for condition in group
            if condition.study in studies
        ]
        for group in (claim.conditions, claim.control, claim.twin)
    )
    if not any(condition.is_met_by_equals for condition in conditions):
        control = []
    elif not control:
        raise ValueError(
            f'{NUISANCES} needs a CONTROL in one of the studies {", ".join(studies)}: a setting '
            'that finds no effect would meet a range that contains 0'
        )
    return NuisanceSetting(
        **texts, studies=studies, conditions=conditions, control=control, twin=twin
    )


def _parse_fidelity(arm: str, fields: Any) -> Fidelity:
    names = [field.name for field in dataclasses.fields(Fidelity)]
    if not isinstance(fields, dict) or {*fields} != {*names}:
        raise ValueError(f'FIDELITY[{arm!r}] must be a dict of {", ".join(names)}; got {fields}')
    return Fidelity(**{key: _parse_line(fields[key], f'FIDELITY[{arm!r}]') for key in names})


def _parse_line(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip() or '\n' in value:
        raise ValueError(f'{name} must be a non-empty text on one line, got {value!r}')
    return value.strip()


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Returns the first line, and the text under each heading joined to one line."""
    title, texts = doc.partition('\n')[0], {}
    for line in doc.splitlines()[1:]:
        heading, colon, content = line.partition(':')
        if colon and heading in HEADINGS:
            texts[heading] = content.strip()
        elif texts:
            texts[list(texts)[-1]] += f' {line.strip()}'
    texts = {heading: text.strip() for heading, text in texts.items()}
    if missing := [heading for heading in HEADINGS if not texts.get(heading)]:
        names = ', '.join(f'{heading}:' for heading in HEADINGS)
        raise ValueError(
            f'the docstring must have the headings {names}, but lacks '
            f'{", ".join(f"{heading}:" for heading in missing)}'
        )
    return title, texts


def _check_guards(
    conditions: Sequence[Condition], control: Sequence[Condition], twin: Sequence[Condition]
) -> None:
    """Raises ValueError for a guard without a label, and a twin that guards nothing."""
    for constant, guards in (('CONTROL', control), ('TWIN', twin)):
        if any(not guard.label for guard in guards):
            raise ValueError(f'each condition in {constant} must have a label')
    ranges = [(c.quantity, c.low, c.high) for c in conditions]
    for guard in twin:
        if (guard.quantity, guard.low, guard.high) not in ranges:
            raise ValueError(
                f'each condition in TWIN must have the quantity and the range of one in HOLDS, for '
                f'the broken method; got {guard.label!r}, {guard.range_text}'
            )
        if any(
            (guard.study, guard.quantity, guard.of) == (c.study, c.quantity, c.of) for c in control
        ):
            raise ValueError(
                f'a quantity in TWIN must not be in CONTROL too, where it guards nothing more; got '
                f'{guard.label!r}'
            )


def _parse_conditions(
    constant: str, rows: Any, studies: Mapping[str, str]
) -> tuple[Condition, ...]:
    """Returns the conditions of a constant. Raises ValueError for one that is none."""
    if not isinstance(rows, tuple | list):
        raise ValueError(f'{constant} must be a tuple of conditions, got {rows!r}')
    return tuple(_parse_condition(constant, fields, studies) for fields in rows)


def _parse_condition(constant: str, fields: Any, studies: Mapping[str, str]) -> Condition:
    if not isinstance(fields, dict):
        raise ValueError(f'each condition in {constant} must be a dict, got {fields!r}')
    if fields.get('study') not in studies:
        raise ValueError(
            f"the 'study' of a condition must be one of {', '.join(studies)}, got {fields!r}"
        )
    is_measure = studies[fields['study']].startswith(MEASURE)
    allowed, needed = (MEASURE_KEYS, 'value') if is_measure else (STUDY_KEYS, 'arm')
    quantities = ('within',) if is_measure else QUANTITIES
    present = fields.keys() & {*quantities}
    if len(present) != 1 or fields.keys() - allowed - present or needed not in fields:
        raise ValueError(
            f'a condition must have the keys {", ".join(sorted(allowed))}, and one of '
            f'{", ".join(quantities)}; got {", ".join(fields)}'
        )
    (quantity,) = present
    label = _parse_line(fields['label'], 'label') if 'label' in fields else ''
    of = {key: value for key, value in fields.items() if key not in ('study', 'label', quantity)}
    low, high = _parse_range(fields[quantity], quantity)
    return Condition(fields['study'], quantity, of, low, high, label)


def _parse_range(bounds: Any, quantity: str) -> tuple[float, float]:
    is_pair = isinstance(bounds, tuple) and len(bounds) == 2
    if not is_pair or not all(end is None or isinstance(end, int | float) for end in bounds):
        raise ValueError(
            f'{quantity} must be a pair (low, high) of numbers, one of which may be None; '
            f'got {bounds}'
        )
    low = -math.inf if bounds[0] is None else float(bounds[0])
    high = math.inf if bounds[1] is None else float(bounds[1])
    # A condition that every number meets would always hold.
    if not low < high or (math.isinf(low) and math.isinf(high)):
        raise ValueError(
            f'{quantity} must be a range with low < high and at least one finite end, got {bounds}'
        )
    return low, high
