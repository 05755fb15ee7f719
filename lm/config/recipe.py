"""The Recipe: a resolved config, with every row that it names and the options of that row.

`lm.config.resolve.resolve` makes it. All later code takes the Recipe or a part of it, and never
looks up a name again.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lm.config.choice import Choice, parse_shares
from lm.config.fields import (
    CHOICES,
    FIELDS,
    RUN_PATHS,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    is_off,
)
from lm.config.groups import OPTIMIZER, OPTIMIZER_OPTIONS, find_setting
from lm.config.other_programs import replacement_hint
from lm.config.pattern import ITEM_FIELDS, BlockPattern, Item, parse_pattern, tile
from lm.config.stages import TrainingStage, plan_stages, stage_changes
from lm.config.texts import parse_texts
from modules import options
from modules.kernels import OPERATIONS
from modules.losses import AUXILIARIES, parse_token_weights
from modules.losses.next_tokens import Stages
from modules.optim.groups import GROUPS, HIDDEN, OTHERS, find_group
from modules.params import ParamSpec
from modules.scaling.parametrization import RELATIVE

# Attributes of a Recipe that are not called like the field that names the part.
ATTRIBUTES = {
    'loss.name': 'loss',
    'optim.name': 'optimizer',
    'optim.decay_rule': 'decay',
    'scaling.name': 'scaling',
}
SECTIONS = ('model', 'optim', 'data', 'train', 'eval', 'mesh')  # that a Recipe has beside its parts
NORM_SITES = ('model.norm', 'model.embedding_norm', 'model.final_norm', 'model.qk_norm')


@dataclasses.dataclass(frozen=True)
class Part:
    """A row that a config names, with its options.

    Attributes:
      path: the field that names the row.
      name: the row's name in its table.
      row: the value in the table.
      section: the config section of its options; '' if it has none.
      options: every option of the row, as set or else its published default.
      inline: the options that follow the name in the field.
      share: this row's share, if the field names several.
      group_paths: the fields of groups of parameters that replace options of the section
        (`lm.config.groups`), by option.
    """

    path: str
    name: str
    row: Any
    section: str
    options: Mapping[str, Any]
    inline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 1.0
    group_paths: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Returns 'optim.name=adamw', as flags spell it."""
        return f'{self.path}={self.name}'

    def build(self, **wiring: Any) -> Any:
        """Returns row(...) with its options, and with the entries of `wiring` that are its
        fields.
        """
        return options.build_part(self.row, self.options, **wiring)

    def option_values(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options; the values of traced options are taken from `hyper`.

        hyper: {'optim.b1': scalar, ...}.
        """
        paths = {name: self.option_path(name) for name in self.options}
        traced = {name: hyper[path] for name, path in paths.items() if path in hyper}
        return {**self.options, **traced}

    def option_path(self, option: str) -> str:
        """Returns the config field of an option."""
        return self.group_paths.get(option, f'{self.section}.{option}')


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A resolved config: its fields, and the parts that they name.

    Recipes with equal configs are equal, because everything else follows from the config.

    Attributes:
      config: the fields, as config.json has them.
      scaling: the parametrisation.
      attention, mlp, position: of all blocks; with model.pattern, of the first block (`kinds` has
        the others).
      auxiliaries: losses that layers sow.
      kernels: {operation: kernel} as far as the config names kernels; devices choose the others.
    """

    config: Config
    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig
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
    stream: Part
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
        """All chosen parts, in the order of the fields; the optimizers of groups come last."""
        by_item = {field.partition('.')[2] for field in ITEM_FIELDS if self.pattern is not None}
        for name, value in vars(self).copy().items():
            if name in by_item:
                continue
            candidates = value if isinstance(value, tuple) else (value,)
            yield from (candidate for candidate in candidates if isinstance(candidate, Part))
        yield from self._item_parts()
        yield from self.kernels.values()
        yield from (part for path, part in self.optimizers.items() if path not in CHOICES)

    def _item_parts(self) -> Iterator[Part]:
        """Yields the parts of each item of the pattern; options that the item sets are inline."""
        for entry, kind in self._kinds_by_item if self.pattern is not None else ():
            changes = entry.changes(self.model)
            for field in ITEM_FIELDS:
                part = vars(kind)[field.partition('.')[2]]
                inline = {n: v for n, v in part.options.items() if part.option_path(n) in changes}
                yield dataclasses.replace(part, inline=inline)

    @functools.cached_property
    def pattern(self) -> BlockPattern | None:
        """The parsed model.pattern, or None."""
        return None if self.model.pattern is None else parse_pattern(self.model.pattern)

    @functools.cached_property
    def _kinds_by_item(self) -> list[tuple[Item, 'Recipe']]:
        """The different items of the pattern, each with the recipe of its blocks."""
        if self.pattern is None:
            return []
        entries = {entry.text: entry for entry in self.pattern.items}
        return [
            (entry, build_recipe(update_config(self.config, entry.changes(self.model))))
            for entry in entries.values()
        ]

    @functools.cached_property
    def kinds(self) -> dict[str, 'Recipe']:
        """The recipe of each kind of block, by its item of model.pattern.

        It is that of a model with this kind alone. Without a pattern: {'': the recipe itself}.
        """
        if self.pattern is None:
            return {'': self}
        kinds: dict[str, Recipe] = {}
        for entry, kind in self._kinds_by_item:
            if kind not in kinds.values():  # other words may mean the same blocks
                kinds[entry.text] = kind
        return kinds

    @functools.cached_property
    def first_layers(self) -> tuple['Recipe', ...]:
        """The recipes of the first blocks of a pattern, which are not repeated."""
        if self.pattern is None:
            return ()
        kinds = {entry.text: kind for entry, kind in self._kinds_by_item}
        return tuple(kinds[entry.text] for entry in self.pattern.first)

    @functools.cached_property
    def tiles(self) -> tuple[tuple['Recipe', ...], int, tuple['Recipe', ...]]:
        """(the recipes of the blocks of a period, the number of periods, those of the rest).

        The first blocks (`first_layers`) come before. Raises ValueError for a pattern longer than
        the model.
        """
        if self.pattern is None:
            return (self,), self.model.n_layers, ()
        kinds = {entry.text: kind for entry, kind in self._kinds_by_item}
        period, last = (
            [kinds[i.text] for i in p] for p in (self.pattern.period, self.pattern.last)
        )
        return tile(period, last, self.model.n_layers, len(self.first_layers))

    @property
    def layers(self) -> tuple['Recipe', ...]:
        """The recipe of each block, from the first to the last."""
        period, count, remainder = self.tiles
        return self.first_layers + period * count + remainder

    @property
    def is_mixed(self) -> bool:
        """Whether blocks are of several kinds."""
        return len(self.kinds) > 1

    @functools.cached_property
    def readers(self) -> dict[str, list[Part]]:
        """{path of an option: the parts that read it}; options that follow a name have no path."""
        readers: dict[str, list[Part]] = {}
        for part in self.parts:
            for name in part.options if part.section else ():
                if name not in part.inline:
                    readers.setdefault(part.option_path(name), []).append(part)
        return readers

    @functools.cached_property
    def traced_values(self) -> dict[str, float]:
        """{path: number} of the traced fields and of the traced options that a part reads.

        A compiled program takes these as arguments. Values that are None or off are left out.
        """
        traced, readers = {}, self.readers
        for path, field in FIELDS.items():
            section, name = path.split('.')
            value = vars(vars(self.config)[section])[name]
            is_traced = field.option is not None and field.option.traced
            if (
                is_traced
                and not is_off(path, value)
                and (not field.is_part_option or path in readers)
            ):
                traced[path] = value
        return traced | self.traced_formats

    @functools.cached_property
    def traced_formats(self) -> dict[str, float]:
        """{path: number} of the formats of kernels.matmul that are numbers of the program."""
        matmul = self.kernels.get('matmul')
        if matmul is None or not matmul.options.get('traced_formats'):
            return {}
        return {f'kernels.{name}': code for name, code in matmul.build().encode_formats().items()}

    @functools.cached_property
    def run_paths(self) -> frozenset[str]:
        """The fields in which runs of one program may differ."""
        return frozenset((*RUN_PATHS, *self.traced_formats))

    @property
    def dropout(self) -> dict[str, str]:
        """{what is dropped: the field with the rate}, for rates other than 0."""
        fields = {
            'attention': 'model.attention_dropout',
            'embedding': 'model.embedding_dropout',
            'residual': 'model.dropout',
        }
        return {site: path for site, path in fields.items() if path in self.traced_values}

    @functools.cached_property
    def token_weights(self) -> Stages | None:
        """The weights of the next tokens (`modules.losses.next_tokens`); None if training predicts
        one token, with the weight 1.

        Raises ValueError for a text that names no weights.
        """
        text = self.config.loss.token_weights
        stages = None if text is None else parse_token_weights('loss.token_weights', text)
        return None if stages is None or set(stages) == {((1.0, 1.0),)} else stages

    @functools.cached_property
    def stages(self) -> tuple[TrainingStage, ...]:
        """The stages of the run (`lm.config.stages`); one without train.stages.

        Raises ValueError if they cannot be parsed, or have no steps.
        """
        return plan_stages(self.config)

    @functools.cached_property
    def stage_recipes(self) -> tuple['Recipe', ...]:
        """The recipe of each stage: of a run whose batches all are those of the stage."""
        if self.train.stages is None:
            return (self,)
        return tuple(
            build_recipe(update_config(self.config, stage_changes(stage))) for stage in self.stages
        )

    @property
    def mean_batch_tokens(self) -> float:
        """Tokens of a step, padding included, on average over the steps of the run."""
        return self.stages[-1].stop_tokens / self.stages[-1].stop

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The sources of eval.texts by name; empty without one."""
        return {} if self.eval.texts is None else parse_texts(self.eval.texts)

    @property
    def texts_every(self) -> int:
        """Steps between evaluations of eval.texts; 0: only at the end."""
        interval = self.eval.texts_every
        return self.train.eval_every if interval is None else interval

    @property
    def suites_every(self) -> int:
        """Steps between evaluations of eval.suites; 0: only before training and at its end."""
        interval = self.eval.suites_every
        return self.train.eval_every if interval is None else interval

    @property
    def norms(self) -> dict[str, Part]:
        """The norm of each site, by the field that names it."""
        sites = (self.norm, self.embedding_norm, self.final_norm, self.qk_norm)
        return dict(zip(NORM_SITES, sites, strict=True))

    @functools.cached_property
    def group_optimizers(self) -> dict[str, Part]:
        """{group: its optimizer}. A group without settings of its optimizer has its parent's."""
        optimizers = {HIDDEN: self.optimizer, OTHERS: self.others}
        for group, (_, parent) in GROUPS.items():
            if group != OTHERS:
                optimizers[group] = _group_optimizer(self.config, group, optimizers[parent])
        return optimizers

    @property
    def optimizers(self) -> dict[str, Part]:
        """The optimizers by the field that names each: of hidden matrices, of all other
        parameters, and of groups with settings that replace some of these.
        """
        return {part.path: part for part in self.group_optimizers.values()}

    def find_optimizer(self, spec: ParamSpec) -> Part:
        """Returns the optimizer of a parameter."""
        return self.group_optimizers[find_group(spec)]

    def find_family(self, spec: ParamSpec) -> str:
        """Returns the family of a parameter's updates, by which a parametrisation scales them.

        It is RELATIVE if optim.match_norm sizes them by their matrix, and else that of the
        optimizer.
        """
        if self.optim.match_norm is not None and spec.role in self.matched_roles:
            return RELATIVE
        return self.find_optimizer(spec).row.family

    @property
    def matched_roles(self) -> list[str]:
        """The roles of optim.match_norm_roles."""
        return self.optim.match_norm_roles.split('+')

    @property
    def objectives(self) -> tuple[Part, ...]:
        """The training objectives, then the evaluation objectives."""
        return (*self.objective, *self.eval_objectives)

    @property
    def zero_starts(self) -> set[str]:
        """The matrices that start at 0, by scaling.zero_init or by the parametrisation.

        They are among 'query' and 'readout'.
        """
        requested = {self.config.scaling.zero_init, *self.scaling.row.zero}
        return {'query', 'readout'} if 'both' in requested else requested - {'none'}

    @property
    def head_dim(self) -> int:
        return cast(int, self.model.head_dim)  # None only where `lm.model.check` refuses it

    @property
    def attention_width(self) -> int:
        """Features of all heads together: the input width of the attention output matrix."""
        return self.model.n_heads * self.head_dim

    @property
    def stream_width(self) -> int:
        """Coordinates of the residual stream: model.d_model, less the coordinates that the norm
        drops.
        """
        return self.model.d_model - self.norm.row.dropped_coordinates

    @functools.cached_property
    def base(self) -> 'Recipe':
        """The model that a parametrisation scales against.

        It is this model at scaling.base_width, with scaling.base_heads heads, or else heads of the
        same width. Without scaling.base_width it is the model itself.

        Raises ValueError if one of its sizes would not be a whole number.
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
        """Returns {path: size} of this model at another width.

        MLPs, all heads together, and key and value heads grow in proportion. The depth stays, since
        all blocks have the same shapes.

        Args:
          width: model.d_model.
          n_heads: number of heads; None keeps the head width.

        Raises:
          ValueError: if a size would not be a whole number.
        """
        model = self.model

        def scale_size(name: str, numerator: int, denominator: int) -> int:
            size = vars(model)[name]
            scaled, remainder = divmod(size * numerator, denominator)
            if remainder or not scaled:
                raise ValueError(
                    f'at a width of {width}, model.{name}={size} would become '
                    f'{size * numerator / denominator:g}, which must be a whole number. Choose a '
                    'width that divides evenly, or set the number of heads of the base model '
                    '(scaling.base_heads).'
                )
            return scaled

        heads = scale_size('n_heads', width, model.d_model) if n_heads is None else n_heads
        head_dim, remainder = divmod(self.attention_width * width, model.d_model * heads)
        if remainder or not head_dim:
            total_width = self.attention_width * width / model.d_model
            raise ValueError(
                'the number of heads (scaling.base_heads) must divide the width; got '
                f'{heads} heads for a width of {total_width:g}'
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
        """Sequences in a microbatch."""
        return self.data.batch_size // self.train.microbatches

    def norm_widths(self, path: str) -> tuple[int, ...]:
        """Widths over which the norm that the field `path` names normalizes."""
        if path != self.qk_norm.path:
            return (self.stream_width,)
        if self.attention.options['qk_norm_over'] == 'none':
            return ()
        if self.attention.options['qk_norm_over'] == 'head':
            return (self.attention.options.get('key_width') or self.head_dim,)
        heads = {self.model.n_heads, cast(int, self.model.n_kv_heads)}  # resolved
        return tuple(sorted(self.head_dim * n for n in heads))

    @property
    def forward_mode_targets(self) -> dict[str, str]:
        """{the choice that needs forward-mode derivatives: 'logits' or 'gradient'}."""
        targets = {str(part): part.row.needs.forward_mode for part in self.optimizers.values()}
        if self.optim.ghost_radius is not None:
            targets['optim.ghost_radius'] = 'logits'
        return {chooser: target for chooser, target in targets.items() if target}


def parse_rows(path: str, value: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """Returns `Choice.parse_rows` of the field `path`.

    Its ValueError also names other fields that have such a row, or the alternative to a name that
    other programs use.
    """
    try:
        return CHOICES[path].parse_rows(path, value)
    except ValueError as error:
        if replacement := replacement_hint(value):
            raise ValueError(
                f'{str(error).partition(" Did you mean")[0]} '
                f'{replacement[0].upper()}{replacement[1:]}.'
            ) from None
        tables = {id(choice.table): field for field, choice in reversed(CHOICES.items())}
        fields = [field for field in tables.values() if value in CHOICES[field].table]
        elsewhere = f' {value!r} is a value of {" and ".join(fields)}.' if fields else ''
        raise ValueError(f'{error}{elsewhere}') from None


def build_recipe(config: Config) -> Recipe:
    """Returns the parts that the fields of a config name; 'auto' names none yet.

    Options that are None get their published default in the parts alone: `resolve_config` also
    fills them in in the config. Raises ValueError for an unknown name, with the nearest.
    """
    attributes, kernels = {}, {}
    for path, choice in CHOICES.items():
        section, field = path.split('.')
        value = vars(vars(config)[section])[field]
        shares = parse_shares(path, value) if choice.shares else {}
        parts = tuple(
            _build_part(
                config,
                path,
                name,
                row,
                choice.section,
                inline,
                shares.get(name, 1.0),
                OTHERS if path == 'optim.others' else HIDDEN,
            )
            for name, row, inline in parse_rows(path, value)
            if row is not None or not choice.auto
        )
        first = next(iter(parts), None)
        if section == 'kernels' and field in OPERATIONS:
            kernels |= {field: first} if first else {}
        else:
            attributes[ATTRIBUTES.get(path, field)] = parts if choice.several else first
        if choice.sows:
            sown = (sown_losses(choice, part.row, part.options).items() for part in parts)
            attributes['auxiliaries'] = tuple(
                _build_part(config, path, name, row, 'loss', {})
                for terms in sown
                for name, row in terms
            )
    sections = {name: vars(config)[name] for name in SECTIONS}
    recipe = Recipe(config, **sections, **attributes, kernels=kernels)
    if recipe.pattern is None:
        return recipe
    kinds = [*recipe.kinds.values()]
    first = {name: vars(kinds[0])[name] for name in (f.partition('.')[2] for f in ITEM_FIELDS)}
    sown = {part.name: part for kind in kinds for part in kind.auxiliaries}
    return dataclasses.replace(recipe, **first, auxiliaries=tuple(sown.values()))


def update_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with {'optim.lr': 0.01, ...} replaced."""
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
    group: str = HIDDEN,
) -> Part:
    """Takes each option from the name, or else from the group's fields, or else from the section,
    or else its published default.
    """
    section_values = vars(vars(config)[section]) if section else {}
    values, group_paths = {}, {}
    optim = {f'optim.{n}': v for n, v in section_values.items()} if group != HIDDEN else {}
    for option, declared in options.declared_options(row).items():
        value = inline.get(option, section_values.get(option))
        if group != HIDDEN and option in OPTIMIZER_OPTIONS and option not in inline:
            option_path, value = find_setting(optim, group, option)
            if option_path != f'{section}.{option}':
                group_paths[option] = option_path
        values[option] = declared.default if value is None else value
    return Part(path, name, row, section, values, inline, share, group_paths)


def _group_optimizer(config: Config, group: str, parent: Part) -> Part:
    """Returns the optimizer of a group.

    Args:
      config: has the settings of the group.
      group: a row of GROUPS.
      parent: the optimizer of its parent.

    Returns:
      The parent's, unless a setting of the group replaces its name or one of its options.
    """
    path = f'optim.{group}_{OPTIMIZER}'
    text = vars(config.optim)[f'{group}_{OPTIMIZER}']
    name, row, inline = parent.name, parent.row, parent.inline
    if text is not None:
        choice = dataclasses.replace(CHOICES['optim.others'], inline=True)
        ((name, row, inline),) = choice.parse_rows(path, text)
    part = _build_part(config, path, name, row, parent.section, inline, group=group)
    is_parents = text is None and part.group_paths == parent.group_paths
    return parent if is_parents else part


def sown_losses(
    choice: Choice, row: Any, part_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns {name: row} of the auxiliary losses that a row sows.

    Args:
      choice: the field that names the row.
      row: the row.
      part_options: its options; None: with any options.
    """
    return {
        name: AUXILIARIES[name]
        for name, (option, value) in (row.auxiliary.items() if choice.sows else ())
        if part_options is None or part_options[option] == value
    }
