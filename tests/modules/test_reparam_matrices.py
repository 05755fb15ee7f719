"""Reference and contract: the matrices of a parameter, and the roles that a map covers."""

import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec, as_matrices
from modules.reparam import REPARAMS
from modules.reparam.matrices import batch_spec, expand_per_matrix
from tests.modules.test_reparam import HOLDING, SPECS, param_shapes, sample

READOUT = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
QUERY = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
EXPERTS = ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',))
ALL = SPECS | {'readout': READOUT}
WITH_ROLES = [name for name in REPARAMS if name not in ('none', 'shared')]


def sample_all():
    return sample() | {'readout': jnp.float32(np.random.default_rng(3).normal(size=(6, 5)))}


@pytest.mark.parametrize(
    ('spec', 'shape', 'matrices_shape'),
    [
        (READOUT, (6, 5), (6, 5)),
        (SPECS['table'], (5, 6), (5, 6)),
        (SPECS['up'], (3, 6, 7), (3, 6, 7)),
        (SPECS['out'], (3, 2, 4, 6), (3, 8, 6)),
        (QUERY, (3, 6, 2, 4), (3, 6, 8)),
        (EXPERTS, (3, 2, 6, 7), (3, 2, 6, 7)),
    ],
)
def test_as_matrices_merges_heads_and_keeps_layers(spec, shape, matrices_shape):
    """Catches queries with a matrix per head, and layers taken together."""
    weight = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(as_matrices(spec, weight), weight.reshape(matrices_shape))
    numbers = jnp.arange(np.prod(matrices_shape[:-2], dtype=int)).reshape(matrices_shape[:-2])
    assert len(batch_spec(spec).axes) == numbers.ndim
    assert expand_per_matrix(numbers, spec).ndim == len(shape)


def test_rows_are_the_summed_axes_in_any_position():
    spec = ParamSpec('hidden', ('heads', 'embed', 'head_dim'), ('heads', 'head_dim'))
    weight = np.random.default_rng(0).normal(size=(2, 6, 4))
    expected = np.stack([weight[h, :, i] for h in range(2) for i in range(4)])
    np.testing.assert_allclose(as_matrices(spec, weight), expected, rtol=1e-6)


def test_as_matrices_rejects_vectors():
    with pytest.raises(ValueError, match='is not a matrix: the forward pass sums'):
        as_matrices(SPECS['scale'], np.ones((3, 6)))


@pytest.mark.parametrize('name', WITH_ROLES)
@pytest.mark.parametrize('roles', ['readout', 'hidden+embedding', 'embedding+readout+hidden'])
def test_map_covers_its_roles_only(name, roles):
    """The map represents the mapped matrices. Catches a role that is only looked up at init."""
    params, mapped_roles = sample_all(), roles.split('+')
    reparam = REPARAMS[name](ALL, param_shapes(params), roles=roles)
    stored, state = reparam.init(params)
    used, _ = reparam.apply(stored, state, True)
    noise = {k: jnp.float32(np.random.default_rng(4).normal(size=v.shape)) for k, v in used.items()}
    moved = {k: v if isinstance(v, dict) else v + noise[k] for k, v in stored.items()}
    moved, _ = reparam.after_update(moved, state)
    for key, spec in ALL.items():
        is_mapped = isinstance(stored[key], dict) or np.size(state[key]) > 0
        assert is_mapped == (spec.role in mapped_roles), key
        if not is_mapped:
            np.testing.assert_array_equal(used[key], params[key])
            np.testing.assert_array_equal(moved[key], params[key] + noise[key])
        elif name in HOLDING:
            np.testing.assert_allclose(used[key], params[key], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize('name', WITH_ROLES)
@pytest.mark.parametrize(
    ('roles', 'message'),
    [
        ('vector', "'vector' has no matrices. Choose one or more of embedding, hidden, readout"),
        ('hiden', "'hiden' is no role. .* Did you mean 'hidden'"),
        ('hidden+', "'' is no role"),
        ('hidden+readout+hidden', 'names a role twice. Name each'),
        ('hidden+readout', r"no parameter has the role 'readout' \(with model.tie_embeddings=True"),
    ],
)
def test_invalid_roles_are_refused(name, roles, message):
    with pytest.raises(ValueError, match=message):
        REPARAMS[name](SPECS, param_shapes(sample()), roles=roles)
