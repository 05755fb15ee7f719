"""What a config comes to: the chosen rows of all tables with their options, each looked up once.

`lm.config.resolve.resolve` makes a Recipe. Everything behind it takes the Recipe or a part of it, and never
looks a name up again.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from lm.config.choice import Choice, shares_of
from lm.config.fields import (
    CHOICES,
    FIELDS,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from modules import options
from modules.kernels import OPERATIONS
from modules.losses import AUXILIARIES

# The attribute of a Recipe, where it is not called as the field that names its part.
ATTRIBUTES = {
    'loss.name': 'loss',
    'optim.name': 'optimizer',
    'optim.decay_rule': 'decay',
    'scaling.name': 'scaling',
}
NORM_SITES = ('model.norm', 'model.embedding_norm', 'model.final_norm', 'model.qk_norm')


@dataclasses.dataclass(frozen=True)
class Part:
    """A row that a config has chosen, with its options.

    path: the field that names it. section: the section of the config that has its options, '' where
    none has. options: all that the row has, as given or else as published. inline: those that the
    config gives behind the name. share: of the whole, where the field names several with shares.
    """

    path: str
    name: str
    row: Any
    section: str
    options: Mapping[str, Any]
    inline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.0

    def __str__(self) -> str:
        """'optim.name=adamw', as the config says it."""
        return f'{self.path}={self.name}'

    def build(self, **wiring: Any) -> Any:
        """row(...) with its options, and with what it has a field for of `wiring`."""
        return options.build(self.row, self.options, **wiring)

    def numbers(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The options, those that are traced from `hyper` ({'optim.b1': scalar, ...})."""
        paths = {name: f'{self.section}.{name}' for name in self.options}
        traced = {name: hyper[path] for name, path in paths.items() if path in hyper}
        return {**self.options, **traced}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A resolved config: its fields, and the parts that they name.

    config: the fields as config.json has them; everything else follows from it, so that two recipes
    are equal where their configs are. scaling: the parametrisation. kernels: those that the config
    names, by operation; the others depend on the devices. auxiliaries: losses that layers sow.
    """

    config: Config
    norm: Part
    placement: Part
    attention: Part
    qk_norm: Part
    activation: Part
    position: Part
    reparam: tuple[Part, ...]
    remat: Part
    embedding_norm: Part
    final_norm: Part
    mlp: Part
    auxiliaries: tuple[Part, ...]
    loss: Part
    optimizer: Part
    others: Part
    schedule: Part
    decay: Part
    average: Part
    scaling: Part
    init: Part
    objective: tuple[Part, ...]
    eval_objectives: tuple[Part, ...]
    implementation: Part | None
    kernels: Mapping[str, Part]

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Recipe) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def __reduce__(self):  # rows hold functions that cannot be pickled
        return recipe_of, (self.config,)

    def __repr__(self) -> str:
        return f'Recipe({self.config})'

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def optim(self) -> OptimConfig:
        return self.config.optim

    @property
    def data(self) -> DataConfig:
        return self.config.data

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def mesh(self) -> MeshConfig:
        return self.config.mesh

    @property
    def parts(self) -> Iterator[Part]:
        """All that is chosen, in the order of the fields; auxiliary losses behind their layers."""
        for field in dataclasses.fields(self):
            found = vars(self)[field.name]
            found = tuple(found.values()) if field.name == 'kernels' else found
            yield from (one for one in _listed(found) if isinstance(one, Part))

    @property
    def readers(self) -> dict[str, list[Part]]:
        """{path of an option: the parts that read it}."""
        return readers_of(list(self.parts))

    @functools.cached_property
    def traced(self) -> dict[str, float]:
        """What a program takes as data: {path: number} of traced fields, and of traced options that
        a part reads.

        What is None is left out: an option whose parts have different defaults, or what is not
        asked for.
        """
        found, readers = {}, self.readers
        for path, field in FIELDS.items():
            section, name = path.split('.')
            value = vars(vars(self.config)[section])[name]
            is_traced = field.option is not None and field.option.traced
            if is_traced and value is not None and (not field.of_parts or path in readers):
                found[path] = value
        return found

    @property
    def norms(self) -> dict[str, Part]:
        """The norm of each site, by the field that names it."""
        sites = (self.norm, self.embedding_norm, self.final_norm, self.qk_norm)
        return dict(zip(NORM_SITES, sites, strict=True))

    @property
    def optimizers(self) -> dict[str, Part]:
        """The optimizers of hidden matrices and of the others, by the field that names each."""
        return {self.optimizer.path: self.optimizer, self.others.path: self.others}

    @property
    def objectives(self) -> tuple[Part, ...]:
        """Objectives of training, then those of evaluation."""
        return (*self.objective, *self.eval_objectives)

    @property
    def head_dim(self) -> int:
        return self.model.d_model // self.model.n_heads

    @property
    def stream_width(self) -> int:
        """Coordinates of the residual stream: model.d_model, less what the norm does without."""
        return self.model.d_model - self.norm.row.drops

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        return self.data.batch_size // self.train.microbatches

    def widths_at(self, path: str) -> tuple[int, ...]:
        """How many features the norm that the field `path` names normalizes together."""
        if path != self.qk_norm.path:
            return (self.stream_width,)
        if self.attention.options['qk_norm_over'] == 'head':
            return (self.head_dim,)
        heads = {self.model.n_heads, self.model.n_kv_heads}
        return tuple(sorted(self.head_dim * n for n in heads))

    @property
    def in_forward_mode(self) -> dict[str, str]:
        """{what was chosen: what it differentiates in forward mode, 'logits' or 'gradient'}."""
        asked = {str(part): part.row.needs.forward_mode for part in self.optimizers.values()}
        if self.optim.ghost_radius is not None:
            asked['optim.ghost_radius'] = 'logits'
        return {asker: what for asker, what in asked.items() if what}


def _listed(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def rows_at(path: str, value: str) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """`Choice.parts` of what a field names; a ValueError says which other field has such a row."""
    try:
        return CHOICES[path].parts(path, value)
    except ValueError as error:
        tables = {id(choice.table): field for field, choice in reversed(CHOICES.items())}
        fields = [field for field in tables.values() if value in CHOICES[field].table]
        elsewhere = f' {value!r} is one of {" and of ".join(fields)}.' if fields else ''
        raise ValueError(f'{error}{elsewhere}') from None


def chosen_by(config: Config) -> dict[str, tuple[Part, ...]]:
    """What each field names, in the order of the fields; 'auto' names nothing yet.

    Raises ValueError for a name that there is not, with the nearest.
    """
    found = {}
    for path, choice in CHOICES.items():
        section, field = path.split('.')
        value = vars(vars(config)[section])[field]
        shares = shares_of(path, value) if choice.shares else {}
        found[path] = tuple(
            _part(config, path, name, row, choice.section, inline, shares.get(name, 1.0))
            for name, row, inline in rows_at(path, value)
            if row is not None or not choice.auto
        )
    return found


def _part(
    config: Config,
    path: str,
    name: str,
    row: Any,
    section: str,
    inline: Mapping[str, Any],
    share: float = 1.0,
) -> Part:
    """With its options: behind the name, or else in the section, or else as published."""
    of_section = vars(vars(config)[section]) if section else {}
    found = {}
    for option, declared in options.options(row).items():
        value = inline.get(option, of_section.get(option))
        found[option] = declared.default if value is None else value
    return Part(path, name, row, section, found, inline, share)


def sown_by(choice: Choice, row: Any) -> dict[str, Any]:
    """The rows of AUXILIARIES that a row of the choice's table names, by name."""
    return {name: AUXILIARIES[name] for name in row.auxiliary} if choice.sows else {}


def auxiliaries_of(config: Config, part: Part) -> tuple[Part, ...]:
    """The losses that the layers of a part sow."""
    terms = sown_by(CHOICES[part.path], part.row)
    return tuple(_part(config, part.path, name, row, 'loss', {}) for name, row in terms.items())


def parts_of(config: Config) -> list[Part]:
    """All that a config names, in the order of its fields; auxiliary losses follow their layer."""
    found = []
    for parts in chosen_by(config).values():
        found += parts
        found += [term for part in parts for term in auxiliaries_of(config, part)]
    return found


def readers_of(parts: list[Part]) -> dict[str, list[Part]]:
    """{path of an option: the parts that read it}; one behind a name is no path's."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        for name in part.options if part.section else ():
            if name not in part.inline:
                found.setdefault(f'{part.section}.{name}', []).append(part)
    return found


def recipe_of(config: Config) -> Recipe:
    """The parts that a config names whose options are filled in (`lm.config.resolve.settle`)."""
    found, kernels = {}, {}
    for path, parts in chosen_by(config).items():
        section, field = path.split('.')
        one = next(iter(parts), None)
        if section == 'kernels' and field in OPERATIONS:
            kernels |= {field: one} if one else {}
        else:
            found[ATTRIBUTES.get(path, field)] = parts if CHOICES[path].several else one
    return Recipe(
        config,
        **found,
        auxiliaries=auxiliaries_of(config, found['mlp']),
        kernels=kernels,
    )
