"""A Recipe: a resolved config, with every row that it names and that row's options.

`lm.config.resolve.resolve` makes it. Everything behind takes the Recipe or a part of it, and never
looks up a name again.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from lm.config.choice import Choice, parse_shares
from lm.config.fields import (
    CHOICES,
    FIELDS,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    is_off,
)
from lm.config.other_programs import replacement_hint
from modules import options
from modules.kernels import OPERATIONS
from modules.losses import AUXILIARIES

# Attributes of a Recipe that are not called like the field that names the part.
ATTRIBUTES = {
    'loss.name': 'loss',
    'optim.name': 'optimizer',
    'optim.decay_rule': 'decay',
    'scaling.name': 'scaling',
}
SECTIONS = ('model', 'optim', 'data', 'train', 'mesh')  # that a Recipe has beside its parts
NORM_SITES = ('model.norm', 'model.embedding_norm', 'model.final_norm', 'model.qk_norm')


@dataclasses.dataclass(frozen=True)
class Part:
    """A row that a config names, with its options.

    path: the field that names it. section: the config section of its options, '' where it has none.
    options: every option of the row, as given or else as published. inline: the options given
    behind the name. share: this row's share, where the field names several.
    """

    path: str
    name: str
    row: Any
    section: str
    options: Mapping[str, Any]
    inline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.0

    def __str__(self) -> str:
        """Returns 'optim.name=adamw', as flags spell it."""
        return f'{self.path}={self.name}'

    def build(self, **wiring: Any) -> Any:
        """Returns row(...) with its options and with the `wiring` that it has fields for."""
        return options.build_part(self.row, self.options, **wiring)

    def option_values(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options; traced ones come from `hyper`, {'optim.b1': scalar, ...}."""
        paths = {name: f'{self.section}.{name}' for name in self.options}
        traced = {name: hyper[path] for name, path in paths.items() if path in hyper}
        return {**self.options, **traced}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A resolved config: its fields, and the parts that they name.

    config: the fields as config.json has them. Everything else follows from it, and two recipes are
    equal where their configs are. scaling: the parametrisation. kernels: by operation, those that
    the config names; the devices decide on the others. auxiliaries: losses that layers sow.
    """

    config: Config
    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig
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
    readout: Part
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
        return build_recipe, (self.config,)

    def __repr__(self) -> str:
        return f'Recipe({self.config})'

    @property
    def parts(self) -> Iterator[Part]:
        """Every chosen part, in the order of the fields."""
        for found in vars(self).copy().values():
            listed = found if isinstance(found, tuple) else (found,)
            yield from (one for one in listed if isinstance(one, Part))
        yield from self.kernels.values()

    @functools.cached_property
    def readers(self) -> dict[str, list[Part]]:
        """{path of an option: the parts that read it}; options behind a name have no path."""
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            for name in part.options if part.section else ():
                if name not in part.inline:
                    found.setdefault(f'{part.section}.{name}', []).append(part)
        return found

    @functools.cached_property
    def traced_values(self) -> dict[str, float]:
        """{path: number} of the traced fields, and of the traced options that a part reads: what a
        compiled program takes as data. What is None or off is left out.
        """
        found, readers = {}, self.readers
        for path, field in FIELDS.items():
            section, name = path.split('.')
            value = vars(vars(self.config)[section])[name]
            is_traced = field.option is not None and field.option.traced
            if (
                is_traced
                and not is_off(path, value)
                and (not field.is_part_option or path in readers)
            ):
                found[path] = value
        return found

    @property
    def dropout(self) -> dict[str, str]:
        """{what training drops a share of: the field with the share}, where that is not 0."""
        fields = {
            'attention': 'model.attention_dropout',
            'embedding': 'model.embedding_dropout',
            'residual': 'model.dropout',
        }
        return {what: path for what, path in fields.items() if path in self.traced_values}

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
        """The objectives of training, then those of evaluation."""
        return (*self.objective, *self.eval_objectives)

    @property
    def zero_starts(self) -> set[str]:
        """The matrices, of 'query' and 'readout', that scaling.zero_init or the parametrisation
        starts at 0.
        """
        asked = {self.config.scaling.zero_init, *self.scaling.row.zero}
        return {'query', 'readout'} if 'both' in asked else asked - {'none'}

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all heads together, which the output matrix of attention reads."""
        return self.model.n_heads * self.model.head_dim

    @property
    def stream_width(self) -> int:
        """Coordinates of the residual stream: model.d_model, less those that the norm drops."""
        return self.model.d_model - self.norm.row.dropped_coordinates

    @functools.cached_property
    def base(self) -> 'Recipe':
        """The model that a parametrisation scales against: this one at scaling.base_width, with
        scaling.base_heads or heads of equal width; itself where no width is given.

        Raises ValueError where a size of it would not be whole.
        """
        scaling = self.config.scaling
        if scaling.base_width is None:
            return self
        sizes = self.sizes_at(scaling.base_width, scaling.base_heads)
        if all(vars(self.model)[path.split('.')[1]] == size for path, size in sizes.items()):
            return self
        # Its heads may have another width than longrope's factors are for, which add no parameter.
        return build_recipe(update_config(self.config, sizes | {'attention.rope_scaling': 'none'}))

    def sizes_at(self, width: int, n_heads: int | None) -> dict[str, int]:
        """Returns {path: size} of this model at another width. MLPs, all heads together, and key
        and value heads grow alike; the depth stays, since all blocks have the same shapes.

        n_heads: None: as many as keep the head width. Raises ValueError where a size would not be
        whole.
        """
        model = self.model

        def scale_size(name: str, numerator: int, denominator: int) -> int:
            now = vars(model)[name]
            size, rest = divmod(now * numerator, denominator)
            if rest or not size:
                raise ValueError(
                    f'at a width of {width} this model would have {now * numerator / denominator:g} for '
                    f'model.{name}={now}, which must be whole. Choose a width that divides evenly, '
                    'or the number of heads of the base model (scaling.base_heads).'
                )
            return size

        heads = scale_size('n_heads', width, model.d_model) if n_heads is None else n_heads
        head_dim, rest = divmod(self.attention_width * width, model.d_model * heads)
        if rest or not head_dim:
            together = self.attention_width * width / model.d_model
            raise ValueError(
                'the number of heads (scaling.base_heads) must divide the width; got '
                f'{heads} heads for a width of {together:g}'
            )
        return {
            'model.d_model': width,
            'model.d_ff': scale_size('d_ff', width, model.d_model),
            'model.n_heads': heads,
            'model.head_dim': head_dim,
            'model.n_kv_heads': scale_size('n_kv_heads', heads, model.n_heads),
        }

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch."""
        return self.data.batch_size // self.train.microbatches

    def norm_widths(self, path: str) -> tuple[int, ...]:
        """Widths over which the norm named by the field `path` normalizes."""
        if path != self.qk_norm.path:
            return (self.stream_width,)
        if self.attention.options['qk_norm_over'] == 'head':
            return (self.head_dim,)
        heads = {self.model.n_heads, self.model.n_kv_heads}
        return tuple(sorted(self.head_dim * n for n in heads))

    @property
    def forward_mode_targets(self) -> dict[str, str]:
        """{what was chosen: what it differentiates in forward mode, 'logits' or 'gradient'}."""
        asked = {str(part): part.row.needs.forward_mode for part in self.optimizers.values()}
        if self.optim.ghost_radius is not None:
            asked['optim.ghost_radius'] = 'logits'
        return {asker: what for asker, what in asked.items() if what}


def parse_rows(path: str, value: str) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Returns `Choice.parts` of a field. Its ValueError names other fields that have such a row, or
    what there is instead of a name that other programs have.
    """
    try:
        return CHOICES[path].parse_rows(path, value)
    except ValueError as error:
        if said := replacement_hint(value):
            raise ValueError(f'{str(error).partition(" Did you mean")[0]} Here {said}.') from None
        tables = {id(choice.table): field for field, choice in reversed(CHOICES.items())}
        fields = [field for field in tables.values() if value in CHOICES[field].table]
        elsewhere = f' {value!r} is one of {" and of ".join(fields)}.' if fields else ''
        raise ValueError(f'{error}{elsewhere}') from None


def build_recipe(config: Config) -> Recipe:
    """Returns the parts that the fields of a config name; 'auto' names none yet.

    Options that are None are filled in as published, in the parts alone: `settle` has them in the
    config too. Raises ValueError for a name that there is not, with the nearest.
    """
    found, kernels = {}, {}
    for path, choice in CHOICES.items():
        section, field = path.split('.')
        value = vars(vars(config)[section])[field]
        shares = parse_shares(path, value) if choice.shares else {}
        parts = tuple(
            _build_part(config, path, name, row, choice.section, inline, shares.get(name, 1.0))
            for name, row, inline in parse_rows(path, value)
            if row is not None or not choice.auto
        )
        one = next(iter(parts), None)
        if section == 'kernels' and field in OPERATIONS:
            kernels |= {field: one} if one else {}
        else:
            found[ATTRIBUTES.get(path, field)] = parts if choice.several else one
        if choice.sows:
            sown = (sown_losses(choice, part.row).items() for part in parts)
            found['auxiliaries'] = tuple(
                _build_part(config, path, name, row, 'loss', {})
                for terms in sown
                for name, row in terms
            )
    sections = {name: vars(config)[name] for name in SECTIONS}
    return Recipe(config, **sections, **found, kernels=kernels)


def update_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with {'optim.lr': 0.01, ...} changed."""
    by_section: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section_name, name = path.split('.')
        by_section.setdefault(section_name, {})[name] = value
    sections = {
        name: dataclasses.replace(vars(config)[name], **fields)
        for name, fields in by_section.items()
    }
    return dataclasses.replace(config, **sections)


def _build_part(
    config: Config,
    path: str,
    name: str,
    row: Any,
    section: str,
    inline: Mapping[str, Any],
    share: float = 1.0,
) -> Part:
    """Takes each option from behind the name, or else the section, or else as published."""
    of_section = vars(vars(config)[section]) if section else {}
    found = {}
    for option, declared in options.declared_options(row).items():
        value = inline.get(option, of_section.get(option))
        found[option] = declared.default if value is None else value
    return Part(path, name, row, section, found, inline, share)


def sown_losses(choice: Choice, row: Any) -> dict[str, Any]:
    """Returns {name: row} of the auxiliary losses that a row sows."""
    return {name: AUXILIARIES[name] for name in row.auxiliary} if choice.sows else {}
