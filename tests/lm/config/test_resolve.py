"""Contract: from the config that a user edits to the dataclasses that the code reads."""

import dataclasses
import functools
import json
import sys
import types
from pathlib import Path
from typing import Annotated

import pytest

import lm.config.fields
import lm.config.resolve
from configs import default
from lm.config.choice import AUTO
from lm.config.fields import CHOICES, FIELDS, is_passive
from lm.config.groups import OPTIMIZER
from lm.config.resolve import (
    differences,
    digest,
    flatten,
    identity,
    resolve,
    resolve_config,
    to_dict,
    to_json,
    unresolve_fields,
    update_recipe,
    with_dtype,
)
from lm.config.suggestions import MULTI_RUN_SECTIONS
from modules.norms import NORMS
from modules.options import Option, declared_options
from modules.placements import PLACEMENTS
from modules.reparam import REPARAMS
from tests.helpers import checked_config, tiny_config, tiny_raw


def test_default_config_resolves_and_survives_json():
    config = resolve(default.get_config())
    assert resolve(json.loads(to_json(config))) == config
    assert resolve(to_dict(config)) == config
    hash(config)  # programs are kept by config


def test_program_chooses_auto_dtype():
    """Runs that started on CPUs keep their names; on GPUs they have others."""
    raw = default.get_config()
    on_gpu, on_cpu = resolve(with_dtype(raw, 'bfloat16')), resolve(with_dtype(raw, 'float32'))
    assert (on_gpu.model.dtype, on_cpu.model.dtype, raw.model.dtype) == (
        'bfloat16',
        'float32',
        AUTO,
    )
    assert digest(on_cpu) == digest(resolve(raw)) != digest(on_gpu)
    raw.model.dtype = 'float32'
    assert with_dtype(raw, 'bfloat16') is raw and digest(resolve(raw)) == digest(on_cpu)


def test_unresolve_restores_none_and_auto():
    """This includes options that only another choice reads; values that are set otherwise stay."""
    raw = default.get_config()
    for changes in ({}, {'model.mlp': 'moe', 'mlp.n_experts': 3, 'attention.window': 8}):
        raw.update_from_flattened_dict(changes)
        given_paths = flatten(resolve(raw)).keys() & flatten(raw.to_dict()).keys()
        unresolved = unresolve_fields(resolve(raw))
        assert {path: unresolved[path] for path in given_paths} == {
            path: value for path, value in flatten(raw.to_dict()).items() if path in given_paths
        }
        assert all(
            unresolved[path] in (None, AUTO, FIELDS[path].default)
            for path in FIELDS.keys() - given_paths
        )


def test_infinite_clip_norm_survives_json():
    config = tiny_config({'optim.clip_norm': float('inf')})
    assert resolve(json.loads(to_json(config))) == config


def test_default_config_sets_only_fields_without_default():
    """Each value has its type, and every field without default elsewhere is set.

    An option of a part has its default in the part's signature; a number here would apply to all
    parts that read it. The length of the warm-up depends on the run, so no part knows it.
    """
    values = flatten(default.get_config().to_dict())
    for name in MULTI_RUN_SECTIONS:  # no field of one
        assert values.pop(name) is None
    assert values.keys() <= FIELDS.keys()
    for path, value in values.items():
        assert value is not None and type(value) in FIELDS[path].types, path
    needed = {path for path, field in FIELDS.items() if field.default is dataclasses.MISSING}
    assert needed <= values.keys()
    assert {path for path in values if FIELDS[path].is_part_option} == {'optim.warmup_steps'}


def test_default_config_accepts_further_options():
    """An unknown option is refused when the config is resolved, an unknown section at once."""
    config = default.get_config()
    config.optim.b2 = 0.5
    assert resolve(config).optim.b2 == 0.5
    config.model.n_layer = 3
    with pytest.raises(ValueError, match=r"field model\.n_layer\. Did you mean 'model.n_layers'"):
        resolve(config)
    with pytest.raises(AttributeError, match='"optimm" does not exist'):
        config.optimm = {}


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().model.d_model = 3


def test_unknown_field_names_the_nearest():
    raw = tiny_raw()
    raw['model']['n_layer'] = 3
    with pytest.raises(
        ValueError, match=r"no field model\.n_layer\. Did you mean 'model.n_layers'"
    ):
        resolve(raw)
    with pytest.raises(ValueError, match=r"no field optimm\. Did you mean 'optim'\?"):
        resolve(tiny_raw() | {'optimm': {}})


def test_missing_field_is_named():
    raw = tiny_raw()
    del raw['optim']['lr']
    with pytest.raises(ValueError, match=r'the config has no optim\.lr\. Start from'):
        resolve(raw)
    raw = tiny_raw()
    del raw['loss']
    with pytest.raises(ValueError, match=r'config has no loss\.name'):
        resolve(raw)


@pytest.mark.parametrize(
    ('path', 'value', 'message'),
    [
        ('model.n_layers', 2.0, 'model.n_layers must be int; got 2.0 of type float'),
        ('model.n_layers', True, 'must be int; got True of type bool'),
        ('model.tie_embeddings', 1, 'must be bool; got 1 of type int'),
        ('optim.lr', '3e-3', "optim.lr must be float; got '3e-3' of type str"),
        ('optim.lr', False, 'must be float; got False of type bool'),
        ('model.norm', None, 'model.norm must be str; got None'),
        ('norm.groups', 2.0, 'norm.groups must be int or None; got 2.0 of type float'),
        ('norm.eps', 'a', "norm.eps must be float or None; got 'a' of type str"),
    ],
)
def test_wrong_type_is_named(path, value, message):
    with pytest.raises(ValueError, match=message.replace('.', r'\.')):
        tiny_config({path: value})


def test_invalid_section_is_named():
    with pytest.raises(ValueError, match='section model must contain fields; got 3'):
        resolve(tiny_raw() | {'model': 3})


def test_int_becomes_float():
    lr = tiny_config({'optim.lr': 1}).optim.lr
    assert type(lr) is float
    assert lr == 1.0


def test_differences_map_path_to_old_and_new_value():
    before = tiny_config()
    after = tiny_config({'optim.lr': 0.5, 'model.norm': 'none'})
    assert differences(before, before) == {}
    assert differences(before, after) == {
        'optim.lr': (before.optim.lr, 0.5),
        'model.norm': (before.model.norm, 'none'),
        'model.final_norm': (before.model.final_norm, 'none'),
    }


def test_explicit_default_is_no_difference():
    assert differences(tiny_config(), tiny_config({'norm.eps': 1e-6})) == {}


def test_flatten_keeps_declaration_order():
    paths = list(flatten(tiny_config()))
    assert paths[:2] == ['model.d_model', 'model.n_layers']
    assert paths == list(FIELDS)


class TestAuto:
    """'auto' and None resolve to values that follow from other fields."""

    @pytest.mark.parametrize('name', PLACEMENTS)
    def test_placement_chooses_its_needs(self, name):
        config, row = checked_config({'model.placement': name}), PLACEMENTS[name]
        assert config.model.mlp == row.needs.get('mlp', 'dense')
        assert config.model.reparam == row.needs.get('reparam', 'none')
        assert config.attention.options['norm_values'] == row.needs.get('norm_values', False)
        assert config.model.final_norm == ('rmsnorm' if row.final_norm else 'none')

    def test_final_norm_takes_inline_options(self):
        assert tiny_config({'model.norm': 'rmsnorm:eps=0.1'}).model.final_norm == 'rmsnorm:eps=0.1'

    def test_norm_options_stay_none(self):
        config = tiny_config()
        assert (config.optim.b2, config.config.loss.z_loss) == (0.95, 1e-4)
        assert config.config.norm.eps is config.optim.decay_fraction is None

    def test_resolving_twice_changes_nothing(self):
        for name in PLACEMENTS:
            config = checked_config({'model.placement': name})
            assert resolve_config(config.config) == config


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'optim.decay_fraction': 0.2}, r'optim\.decay_fraction=0\.2 is not used by .*'
         r'schedule=constant.* used with optim\.schedule=warmup_stable_decay'),
        ({'mlp.n_experts': 4}, r'mlp\.n_experts=4 .*model\.mlp=dense.* with model\.mlp=moe'),
        ({'loss.balance_loss': 0.1}, r'loss\.balance_loss=0\.1 .* with model\.mlp=moe'),
        ({'norm.groups': 2}, r'norm\.groups=2 .*model\.norm=rmsnorm'),
        ({'model.norm': 'rmsnorm:eps=0.1', 'norm.eps': 0.2}, r'norm\.eps=0\.2 is not used by'),
    ],
)  # fmt: skip
def test_unread_option_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(changes)


class TestIdentity:
    """Property: the name of a run depends on these values alone."""

    @pytest.mark.parametrize('path', sorted(FIELDS))
    def test_default_is_left_out(self, path):
        """The record looks as if the field did not exist yet."""
        for changes in ({}, {'model.placement': 'wide', 'model.norm': 'powernorm'}):
            config = checked_config(changes)
            keys = {key for key in identity(config) if key == path or key.endswith(f':{path}')}
            had_none = path == 'model.n_kv_heads' or FIELDS[path].default is dataclasses.MISSING
            assert not keys or had_none

    def test_unset_options_are_left_out(self):
        for name in PLACEMENTS:
            changes = {'model.placement': name, 'optim.eps': None, 'optim.warmup_steps': None}
            keys = {key for key in identity(checked_config(changes)) if ':' in key}
            needs = {'model.attention=softmax:norm_values'} & {
                f'model.attention=softmax:{key}' for key in PLACEMENTS[name].needs
            }
            assert keys == needs

    @pytest.mark.parametrize('name', NORMS)
    def test_explicit_part_default_changes_nothing(self, name):
        """The default is given in the section, or after the name."""
        plain = tiny_config({'model.norm': name})
        for option, declared in declared_options(NORMS[name]).items():
            if declared.default is not None:
                in_section = {'model.norm': name, f'norm.{option}': declared.default}
                inline = {'model.norm': f'{name}: {option} = {declared.default}'}
                assert (
                    digest(tiny_config(in_section)) == digest(tiny_config(inline)) == digest(plain)
                )

    def test_explicit_auto_value_changes_nothing(self):
        for name in PLACEMENTS:
            config = checked_config({'model.placement': name})
            spelt = {path: flatten(config)[path] for path in lm.config.resolve.DERIVED_DEFAULTS}
            again = resolve(to_dict(update_recipe(config, spelt)))
            assert identity(again) == identity(checked_config({'model.placement': name}))
            assert not identity(again).keys() & {'model.mlp', 'model.final_norm'}

    def test_option_location_changes_nothing(self):
        section = tiny_config({'norm.scale': False})
        inline = tiny_config({'model.norm': 'rmsnorm:scale=False'})
        one_norm = tiny_config({'model.norm': 'rmsnorm:scale=False', 'model.final_norm': 'rmsnorm'})
        assert digest(section) == digest(inline) != digest(one_norm)

    def test_option_counts_for_each_reader(self):
        """1e-6 is the default of rmsnorm, but not of powernorm."""
        changes = {'model.norm': 'powernorm', 'model.qk_norm': 'rmsnorm'}
        keys = identity(tiny_config(changes | {'norm.eps': 1e-6}))
        assert 'model.norm=powernorm:eps' in keys and 'model.qk_norm=rmsnorm:eps' not in keys

    @pytest.mark.parametrize('path', sorted(FIELDS))
    def test_other_values_change_the_digest(self, path):
        """Every field, in a config whose parts read it, except fields that only observe a run."""
        base = first_readers().get(path, checked_config({}))
        values = [value for value in other_values(path) if value != flatten(base)[path]]
        assert values or len(FIELDS[path].choice.table) == 1
        for value in values:
            assert (digest(update_recipe(base, {path: value})) == digest(base)) == is_passive(path)

    def test_family_digests_differ(self):
        names, n = set(), 0
        for scale in ('', ':scale=False'):
            for final in ('auto', 'rmsnorm', 'rmsnorm:scale=False', 'none'):
                for qk in ('none', 'rmsnorm', 'rmsnorm:scale=False'):
                    for eps in (None, 0.1):
                        changes = {'model.norm': f'rmsnorm{scale}', 'model.final_norm': final}
                        changes |= {'model.qk_norm': qk, 'norm.eps': eps}
                        names.add(digest(tiny_config(changes)))
                        n += 1
        assert len(names) == n * 3 // 4  # auto is one of the others

    def test_new_field_changes_nothing(self, monkeypatch):
        line = "    readout_bias: Annotated[bool, 'add a bias to the readout'] = False\n"
        auto = "    mixer: Annotated[str, Choice(MLPS, 'mlp', auto=True)] = AUTO\n"
        later = config_module(monkeypatch, line, f'{line}    shiny: bool = False\n{auto}')
        for changes in ({}, {'model.placement': 'wide'}, {'model.norm': 'powernorm'}):
            raw = tiny_raw(changes)
            assert later.digest(later.resolve(raw)) == digest(resolve(raw))
        raw['model']['shiny'] = True
        assert later.digest(later.resolve(raw)) != digest(resolve(tiny_raw(changes)))

    def test_new_option_changes_nothing(self, monkeypatch):
        class Shining(NORMS['rmsnorm']):
            shine: Annotated[float, Option('how much')] = 0.5

        raw, before = tiny_raw(), digest(tiny_config())
        monkeypatch.setitem(NORMS, 'rmsnorm', Shining)
        later = config_module(monkeypatch)
        for shine in (None, 0.5):
            raw['norm']['shine'] = shine
            assert later.digest(later.resolve(raw)) == before
        raw['norm']['shine'] = 0.25
        assert later.digest(later.resolve(raw)) != before


USUAL = ('none', 'dense', *(v for v in flatten(tiny_config()).values() if isinstance(v, str)))
READERS = (
    {},
    {'model.placement': 'mix'},
    {'model.placement': 'wide'},
    {'kernels.attention': 'splash'},
    {'model.mlp': 'random_features'},
    {'model.mlp': 'moe', 'mlp.router_z_loss': True},
    {'model.readout': 'cosines'},
    *({'model.reparam': name} for name in REPARAMS),
    *({'model.norm': name} for name in NORMS),
    {'scaling.name': 'complete_p', 'scaling.base_width': 8, 'scaling.base_depth': 1},
    {'scaling.name': 'hyper_p'},
    {'model.attention': 'gla', 'kernels.recurrence': 'chunked'},
    *(
        {path: name}
        for path in (
            'optim.decay_rule',
            'data.objective',
            'model.attention',
            'model.stream',
            'model.activation',
            'loss.name',
            'optim.name',
            'optim.schedule',
            'optim.average',
            'kernels.implementation',
            'kernels.matmul',
        )
        for name in CHOICES[path].table
    ),
)


@functools.cache
def first_readers():
    """Returns {field: the first config of READERS with a part that reads it}."""
    configs = {}
    for config in map(checked_config, READERS):
        configs = dict.fromkeys(config.readers, config) | configs
    return configs


def other_values(path):
    """Returns values that are no default of any part."""
    field = FIELDS[path]
    kind = next(kind for kind in field.types if kind is not types.NoneType)
    if field.choice:
        return [name for name in field.choice.table if name not in USUAL]
    if path.endswith(f'_{OPTIMIZER}'):  # of a group
        return ['lion']
    if path == 'model.pattern':
        return ['l2+softmax']
    if path == 'attention.output_gate':  # the default of the rows that have it is silu
        return ['none']
    if kind is bool:
        name = path.split('.')[1]
        declared = [
            d for part in NORMS.values() for n, d in declared_options(part).items() if n == name
        ]
        return [not declared[0].default] if path.startswith('norm.') else [True, False]
    if field.option and field.option.choices:
        choices = [name for name in field.option.choices if name != field.default]
        return [name for name in choices if name not in USUAL] or choices
    return [f'{path}x' if kind is str else kind(17)]


def config_module(monkeypatch, line='', replacement=''):
    """Returns lm/config/resolve.py as it would be after a change of lm/config/fields.py."""
    for module in (lm.config.fields, lm.config.resolve):
        text = Path(module.__file__).read_text()
        if module is lm.config.fields:
            assert line in text
            text = text.replace(line, replacement, 1) if line else text
        later = types.ModuleType(module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, later)
        exec(compile(text, module.__name__, 'exec'), vars(later))
    return later
