"""Contract: the seam between what a user edits and the dataclasses the code reads."""

import dataclasses
import json

import pytest

from configs import default
from lm.config import Config, differences, flatten, resolve, to_dict, to_json, types_of
from tests.helpers import tiny_config, tiny_raw


def test_default_config_resolves_and_survives_json():
    config = resolve(default.get_config())
    assert resolve(json.loads(to_json(config))) == config
    assert resolve(to_dict(config)) == config
    hash(config)  # programs are kept by config


def test_infinite_clip_norm_survives_json():
    config = tiny_config({'optim.clip_norm': float('inf')})
    assert resolve(json.loads(to_json(config))) == config


def test_defaults_stand_in_the_default_config_and_nowhere_else():
    """A field without a line there would take a hidden default; each is of its type."""
    given = flatten(default.get_config().to_dict())
    wanted = {
        f'{section.name}.{field.name}': field
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)
    }
    assert given.pop('sweep') is None  # describes many runs, and is no field of one
    assert given.keys() == wanted.keys()
    for path, field in wanted.items():
        assert field.default_factory is dataclasses.MISSING, path
        assert type(given[path]) in types_of(field.type), path


def test_what_may_be_left_to_the_part_is_none_by_default():
    """A number there would be the same for all parts that read it."""
    given = flatten(default.get_config().to_dict())
    optional = [
        f'{section.name}.{field.name}'
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)
        if type(None) in types_of(field.type)
    ]
    assert {path for path in given if path.startswith('norm.')} < set(optional)
    assert all(given[path] is None for path in optional)


def test_default_config_is_locked():
    config = default.get_config()
    with pytest.raises(AttributeError, match='n_layers'):  # ml_collections names the nearest
        config.model.n_layer = 3


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().model.d_model = 3


def test_unknown_field_names_the_nearest():
    raw = tiny_raw()
    raw['model']['n_layer'] = 3
    with pytest.raises(ValueError, match=r"no field model\.n_layer\. Did you mean 'n_layers'\?"):
        resolve(raw)
    with pytest.raises(ValueError, match=r"no field optimm\. Did you mean 'optim'\?"):
        resolve(tiny_raw() | {'optimm': {}})


def test_missing_field_is_named():
    raw = tiny_raw()
    del raw['optim']['b2']
    with pytest.raises(ValueError, match=r'config lacks optim\.b2'):
        resolve(raw)
    raw = tiny_raw()
    del raw['loss']
    with pytest.raises(ValueError, match='config lacks loss'):
        resolve(raw)


@pytest.mark.parametrize(
    ('path', 'value', 'said'),
    [
        ('model.n_layers', 2.0, 'model.n_layers must be int; got 2.0 of type float'),
        ('model.n_layers', True, 'must be int; got True of type bool'),
        ('model.tie_embeddings', 1, 'must be bool; got 1 of type int'),
        ('optim.lr', '3e-3', "optim.lr must be float; got '3e-3' of type str"),
        ('optim.lr', False, 'must be float; got False of type bool'),
        ('model.norm', None, 'model.norm must be str; got None'),
        ('norm.groups', 2.0, 'norm.groups must be int or None; got 2.0 of type float'),
        ('model.norm_eps', 'a', "model.norm_eps must be float or None; got 'a' of type str"),
    ],
)
def test_wrong_type_is_named(path, value, said):
    with pytest.raises(ValueError, match=said.replace('.', r'\.')):
        tiny_config({path: value})


def test_section_that_is_no_section_is_named():
    with pytest.raises(ValueError, match='section model must hold fields; got 3'):
        resolve(tiny_raw() | {'model': 3})


def test_int_is_read_as_float_where_a_float_is_wanted():
    lr = tiny_config({'optim.lr': 1}).optim.lr
    assert type(lr) is float
    assert lr == 1.0


def test_differences_are_old_and_new_value_by_path():
    old = tiny_config()
    new = tiny_config({'optim.lr': 0.5, 'model.norm': 'none'})
    assert differences(old, old) == {}
    assert differences(old, new) == {
        'optim.lr': (old.optim.lr, 0.5),
        'model.norm': (old.model.norm, 'none'),
    }


def test_flatten_keeps_declaration_order():
    paths = list(flatten(tiny_config()))
    assert paths[:2] == ['model.d_model', 'model.n_layers']
    assert paths[-1] == 'norm.removal_gap'
