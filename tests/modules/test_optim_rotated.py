"""SOAP, Conda, ARO and Shampoo: optimizers in rotated coordinates."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import OPTIMIZERS, unbox_state
from modules.optim.base import compute_if
from modules.optim.muon import COEFFICIENTS
from modules.optim.rotated import aro, conda, shampoo, soap, soap_muon
from modules.params import ParamSpec
from tests.modules.optim_trajectories import MATRIX, assert_follows, trajectory

SOAP_CASES = [
    ('square every 1', 'square', {'soap_every': 1}),
    ('square every 10', 'square', {'soap_every': 10}),
    ('wide', 'wide', {'soap_every': 3, 'soap_max_dim': 4}),
    ('tall', 'tall', {'soap_every': 3, 'soap_max_dim': 4}),
    ('tall', 'tall', {'soap_every': 3, 'soap_sides': 'smaller'}),
]
CONDA_CASES = [
    ('square', 'square', {'conda_every': 10}),
    ('wide', 'wide', {'conda_every': 10}),
    ('tall', 'tall', {'conda_every': 10}),
    ('once', 'wide', {}),
    ('every', 'tall', {'conda_every': 1, 'conda_scale': 1.0}),
]

ARO_CASES = [
    ('sink', 'wide', {}),
    ('sink square', 'square', {}),
    ('row', 'wide', {'aro_map': 'row'}),
    ('sign', 'wide', {'aro_map': 'sign'}),
]
SHAMPOO_CASES = [
    ('none', 'square', {'shampoo_graft': False}),
    ('wide', 'wide', {'shampoo_graft': False}),
    ('adam', 'square', {}),
    ('every 10', 'square', {'shampoo_every': 10}),
]

ROWS = {'aro': aro, 'conda': conda, 'shampoo': shampoo, 'soap': soap, 'soap_muon': soap_muon}


def directions(make, grads, spec=MATRIX):
    """Returns the directions of gradients [T, ...] by `make(specs)`, in float64; and the states."""
    with jax.enable_x64(True):
        tx = make({'w': spec})
        weight = {'w': jnp.zeros(grads.shape[1:])}

        def step(state, grad):
            direction, state = tx.update({'w': grad}, state, weight)
            return state, (direction['w'], state)

        def run(grads):
            return jax.lax.scan(step, unbox_state(tx.init(weight)), grads)[1]

        return jax.device_get(jax.jit(run)(jnp.asarray(grads)))


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def orthogonal(size):
    return np.linalg.qr(draw(size, size))[0]


def orthogonal_factor(matrix):
    left_vectors, _, right_vectors = np.linalg.svd(matrix, full_matrices=False)
    return left_vectors @ right_vectors


def soap_muon_reference(grads, b1=0.95, b2=0.9, eps=1e-8):
    """Algorithm 3 of SOAP with a refresh at each step, then Newton-Schulz on singular values.

    The first gradient only makes the bases. In their own order the vectors need no sorting.
    """
    rows, columns = grads.shape[1:]
    momentum, second, updates, bases = 0, 0, [], []
    products = [np.zeros((rows, rows)), np.zeros((columns, columns))]
    for t, grad in enumerate(grads):
        direction = np.zeros_like(grad)
        if t > 0:
            left_basis, right_basis = bases
            momentum = b1 * momentum + (1 - b1) * grad
            second = b2 * second + (1 - b2) * (left_basis.T @ grad @ right_basis) ** 2
            direction = left_basis.T @ momentum @ right_basis / (np.sqrt(second) + eps)
            direction = left_basis @ direction @ right_basis.T
            direction *= np.sqrt(1 - b2**t) / (1 - b1**t)
        products = [
            b2 * p + (1 - b2) * gram
            for p, gram in zip(products, (grad @ grad.T, grad.T @ grad), strict=True)
        ]
        if t == 0:
            bases = [np.linalg.eigh(p)[1][:, ::-1] for p in products]
        else:
            bases = [np.linalg.qr(p @ basis)[0] for p, basis in zip(products, bases, strict=True)]
        left_vectors, values, right_vectors = np.linalg.svd(direction, full_matrices=False)
        values = values / (np.linalg.norm(values) + eps)
        for _ in range(5):
            a, b, c = COEFFICIENTS
            values = a * values + b * values**3 + c * values**5
        updates.append(np.sqrt(max(1, columns / rows)) * left_vectors * values @ right_vectors)
    return np.array(updates)


def test_soap_muon_orthogonalizes_soap():
    """In float64. Square matrices: others have gradients without unique bases.

    Catches an orthogonalised gradient or momentum, a refresh every 10 steps, SOAP's b2, and a
    first update that is not zero.
    """
    grads = draw(5, 4, 4) + 2 * np.eye(4) * np.arange(1, 5)
    actual, _ = directions(soap_muon, grads)
    expected = soap_muon_reference(grads)
    assert not actual[0].any() and np.abs(expected[1:]).max() > 0.3
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_soap_muon_reads_muon_options():
    """Singular values of 1 by 12 convergent steps, times the factor of the shape."""
    options = {'muon_polynomial': 'convergent', 'muon_steps': 12, 'soap_sides': 'smaller'}
    actual, _ = directions(functools.partial(soap_muon, **options), draw(4, 3, 12))
    values = np.linalg.svd(actual[1:], compute_uv=False)
    np.testing.assert_allclose(values, 2, rtol=1e-3)


@pytest.mark.default_rows('soap')
@pytest.mark.parametrize('name', ROWS)
def test_stacked_layers_are_separate_with_heads_merged(name):
    """Equivalence. Catches a decomposition or a norm over the layers, and heads on one side."""
    grads = draw(4, 2, 3, 2, 2)
    spec = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
    make = functools.partial(ROWS[name], **({'soap_every': 2} if name == 'soap' else {}))
    stacked, _ = directions(make, grads, spec)
    single, _ = directions(make, grads[:, 1].reshape(4, 3, 4))
    np.testing.assert_allclose(stacked[:, 1].reshape(4, 3, 4), single, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('name', [*ROWS, 'fira', 'galore'])
def test_mapped_runs_branch_like_a_single_run(name):
    """Property of the program: mapped runs branch like a single run. Catches a `cond` on a mapped
    count, which computes both of its branches in every step.
    """
    tx = OPTIMIZERS[name]({'w': MATRIX})
    weights = {'w': jnp.zeros((2, 3, 5))}
    states = jax.vmap(lambda weight: unbox_state(tx.init(weight)))(weights)

    def count_branches(update, *args):
        names = [equation.primitive.name for equation in jax.make_jaxpr(update)(*args).eqns]
        return names.count('cond')

    single = jax.tree.map(lambda leaf: leaf[0], (weights, states, weights))
    assert (
        count_branches(jax.vmap(tx.update), weights, states, weights)
        == count_branches(tx.update, *single)
        > 0
    )


@pytest.mark.default_rows('galore', 'conda')
@pytest.mark.parametrize('name', ['soap', 'conda', 'galore', 'fira'])
def test_directions_ignore_singular_vector_signs(name, monkeypatch):
    """Property, as their docstrings say; other libraries have other signs than LAPACK."""
    refresh = {'soap_every': 2, 'conda_every': 2, 'projection_every': 2, 'rank': 2}
    parameters = inspect.signature(OPTIMIZERS[name]).parameters
    make = functools.partial(
        OPTIMIZERS[name], **{k: v for k, v in refresh.items() if k in parameters}
    )
    grads, (eigh, svd) = draw(6, 3, 5), (jnp.linalg.eigh, jnp.linalg.svd)
    plain, _ = directions(make, grads)

    def flipped_svd(x, full_matrices):
        left_vectors, values, right_vectors = svd(x, full_matrices=full_matrices)
        flip = 1.0 - 2.0 * (jnp.arange(values.shape[-1]) % 2)
        return left_vectors * flip[None], values, flip[:, None] * right_vectors

    def flipped_eigh(x):
        values, vectors = eigh(x)
        return values, vectors * (1.0 - 2.0 * (jnp.arange(values.shape[-1]) % 2))[None]

    monkeypatch.setattr(jnp.linalg, 'svd', flipped_svd)
    monkeypatch.setattr(jnp.linalg, 'eigh', flipped_eigh)
    flipped, _ = directions(make, grads)
    np.testing.assert_allclose(flipped, plain, rtol=1e-9, atol=1e-12)


def test_mapped_runs_compute_only_when_due():
    """Equivalence. Catches a decomposition that runs get before they are due."""
    fallback, due = jnp.zeros((3, 2)), jnp.array([True, False, True])
    selected = jax.vmap(lambda due, fallback: compute_if(due, lambda: fallback + 1, fallback))(
        due, fallback
    )
    np.testing.assert_array_equal(selected, [[1, 1], [0, 0], [1, 1]])


class TestSoap:
    @pytest.mark.parametrize(('case', 'shape', 'options'), SOAP_CASES)
    def test_follows_authors_code(self, case, shape, options):
        """Reference, to 1e-7 in float64. Catches bases used too early, a second moment that is not
        put in order, and a correction that counts the first call.
        """
        with jax.enable_x64(True):
            make = functools.partial(soap, **options)
            actual = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(actual, 'make_soap', case, shape, rtol=1e-7)

    @pytest.mark.parametrize('side', ['left', 'right'])
    def test_rotated_gradients_rotate_directions(self, side):
        """Property. Catches moments that are kept in a basis which has since been left."""
        grads = draw(7, 4, 4)
        turn = orthogonal(4)
        make = functools.partial(soap, soap_every=2)
        plain, _ = directions(make, grads)
        rotated, expected = (turn @ x if side == 'left' else x @ turn for x in (grads, plain))
        np.testing.assert_allclose(directions(make, rotated)[0], expected, atol=1e-9)

    def test_soap_without_rotation_is_delayed_adam(self):
        """Equivalence. Catches sides above soap_max_dim that are rotated, and a bias correction
        that counts the first gradient.
        """
        grads = draw(5, 3, 4)
        actual, state = directions(functools.partial(soap, soap_max_dim=2, eps=1e-30), grads)
        adam, _ = directions(lambda _: optax.scale_by_adam(0.95, 0.95, eps=1e-30), grads[1:])
        np.testing.assert_array_equal(actual[0], 0)
        np.testing.assert_allclose(actual[1:], adam, rtol=1e-9)
        assert state.of.keys() == {'momentum', 'second'}

    def test_side_above_max_dim_is_not_rotated(self):
        """Contract. Catches a basis that is kept, and paid for, where none is used."""
        _, state = directions(functools.partial(soap, soap_max_dim=3), draw(2, 3, 4))
        assert state.of.keys() == {'momentum', 'second', 'left_products', 'left_basis'}


class TestConda:
    @pytest.mark.parametrize(('case', 'shape', 'options'), CONDA_CASES)
    def test_follows_authors_code(self, case, shape, options):
        """Reference, to 1e-7 in float64. Catches the wrong side, vectors in rows, and singular
        vectors of the moment of before the gradient.
        """
        with jax.enable_x64(True):
            make = functools.partial(conda, **options)
            actual = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(actual, 'make_conda', case, shape, rtol=1e-7)

    def test_rotated_smaller_side_rotates_directions(self):
        """Property. Catches a second moment of gradients that were not rotated."""
        grads, turn = draw(7, 3, 5), orthogonal(3)
        make = functools.partial(conda, conda_every=100)
        plain, _ = directions(make, grads)
        np.testing.assert_allclose(directions(make, turn @ grads)[0], turn @ plain, atol=1e-9)
        mirrored, _ = directions(make, np.swapaxes(grads, 1, 2) @ turn.T)
        np.testing.assert_allclose(mirrored, np.swapaxes(turn @ plain, 1, 2), atol=1e-9)

    def test_basis_changes_every_period(self):
        """Property. Catches a period counted from 0, and a period that ends an update early."""
        make = functools.partial(conda, conda_every=3)
        bases = directions(make, draw(7, 3, 5))[1].of['basis']['w']
        changes = [not np.array_equal(a, b) for a, b in itertools.pairwise(bases)]
        assert changes == [False, False, True, False, False, True]


class TestAro:
    @pytest.mark.parametrize(('case', 'shape', 'options'), ARO_CASES)
    def test_follows_authors_code(self, case, shape, options):
        """Reference, to 1e-7 in float64. Catches a direction in the last rotation, and rows and
        columns in the other order.
        """
        with jax.enable_x64(True):
            make = functools.partial(aro, aro_scale=1.0, **options)
            actual = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(actual, 'make_aro', case, shape, rtol=1e-7)

    @pytest.mark.parametrize('name', ['sink', 'row', 'sign'])
    def test_direction_rms_is_aro_scale(self, name):
        """Property. Catches norms of 1 in the place of the root of the width."""
        updates, _ = directions(functools.partial(aro, aro_map=name), draw(3, 4, 12))
        sizes = np.sqrt(np.mean(np.square(updates), axis=(1, 2)))
        np.testing.assert_allclose(sizes, 0.2, rtol=1e-5)

    def test_constant_gradient_converges_to_orthogonal_factor(self):
        """Property: the fixed point that the paper derives. Catches a rotation that is not carried
        from update to update, or not turned back.
        """
        left_vectors, right_vectors = orthogonal(4), orthogonal(6)[:4]
        gradient = left_vectors @ np.diag([8.0, 4.0, 2.0, 1.0]) @ right_vectors
        make = functools.partial(aro, aro_map='row', aro_scale=1.0)
        actual, _ = directions(make, np.stack([gradient] * 40))
        expected = np.sqrt(6) * orthogonal_factor(gradient)
        np.testing.assert_allclose(actual[-1], expected, atol=1e-4)

    def test_rotates_the_residual_stream(self):
        """Equivalence of a matrix out of the stream and one into it. Catches a side by order."""
        out_spec = ParamSpec('hidden', ('mlp', 'embed'), ('mlp',))
        grads = draw(3, 3, 5)
        into, _ = directions(aro, grads)
        outward, state = directions(aro, np.swapaxes(grads, 1, 2), out_spec)
        np.testing.assert_allclose(np.swapaxes(outward, 1, 2), into, atol=1e-9)
        assert state.of['rotation']['w'].shape[1:] == (3, 3)

    def test_low_rank_gradients_give_finite_directions(self):
        """Contract. Catches Cholesky's failure on a matrix that is not positive definite."""
        grads = np.zeros((4, 5, 3))
        grads[1:, 0] = 1.0
        assert np.isfinite(directions(aro, grads)[0]).all()


class TestShampoo:
    @pytest.mark.parametrize(('case', 'shape', 'options'), SHAMPOO_CASES)
    def test_follows_published_code(self, case, shape, options):
        """Reference, to 1e-6 in float64. Catches another exponent, the norm of the gradient in
        the place of Adam's, and roots that are used before they are taken.
        """
        with jax.enable_x64(True):
            make = functools.partial(shampoo, shampoo_eps=1e-20, **options)
            actual = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(actual, 'make_shampoo', case, shape, rtol=1e-6)

    def test_first_direction_is_the_orthogonal_factor(self):
        """Closed form: (G G^T)^(-1/4) G (G^T G)^(-1/4). Catches exponents of 1/2."""
        grads = draw(1, 3, 5)
        make = functools.partial(shampoo, shampoo_graft=False, shampoo_eps=1e-14)
        actual, _ = directions(make, grads)
        np.testing.assert_allclose(actual[0], orthogonal_factor(grads[0]), atol=1e-5)

    def test_damping_scales_with_largest_eigenvalue(self):
        """Closed form of the first direction. Catches a share that is added as it is."""
        gradient = 1e-3 * draw(3, 3)
        make = functools.partial(shampoo, shampoo_graft=False, shampoo_eps=0.1)
        actual, _ = directions(make, gradient[None])
        left_vectors, values, right_vectors = np.linalg.svd(gradient)
        values = values / np.sqrt(values**2 + 0.1 * values[0] ** 2)
        np.testing.assert_allclose(
            actual[0], left_vectors @ np.diag(values) @ right_vectors, rtol=1e-9
        )
