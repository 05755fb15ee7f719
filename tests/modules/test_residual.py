"""Reference: each residual stream is its equation, in float64 NumPy after the published code.
Property: the starts that equal pre-norm, and matrices whose rows and columns sum to 1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.residual import STREAMS, Site, sinkhorn

B, T, D, BLOCKS = 2, 3, 6, 3
SUBLAYERS = [(name, block) for block in range(1, BLOCKS + 1) for name in ('attention', 'mlp')]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D))
MATRICES = {sublayer: RNG.normal(size=(D, D)) for sublayer in SUBLAYERS}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis):
    exp = np.exp(x - x.max(axis, keepdims=True))
    return exp / exp.sum(axis, keepdims=True)


def branch(x, sublayer, xp=np):
    """A sublayer with pre-norm; no two of them are equal."""
    return xp.tanh(x / xp.sqrt(xp.mean(x**2, -1, keepdims=True) + 1e-6) @ MATRICES[sublayer])


class Parameters(dict):
    """Draws each vector at its first use, and returns the same one later."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def site(self, name, block):
        def vector(vector_name, init, axes, shape, part='stream'):
            assert len(axes) == len(shape)
            key = (name, block, vector_name)
            if key not in self:
                start = np.float64(init(jax.random.key(len(self)), shape, jnp.float32))
                self[key] = self.draw(start)
            return jnp.float32(self[key])

        return Site(name, float(block), vector)


def walk(stream, parameters):
    """Returns the input of the last norm, as a model computes it."""
    carry = stream.split(jnp.float32(X))
    for block in range(1, BLOCKS + 1):
        carry = stream.enter(carry, parameters.site('block', block))
        for name in ('attention', 'mlp'):
            apply = functools.partial(branch, sublayer=(name, block), xp=jnp)
            carry = stream.connect(carry, parameters.site(name, block)._replace(branch=apply))
        carry = stream.leave(carry, parameters.site('block', block))
    return stream.join(carry, parameters.site('readout', 0))


def plain(p):
    x = X
    for sublayer in SUBLAYERS:
        x = x + branch(x, sublayer)
    return x


def x0_scalars(p):
    x = X
    for block in range(1, BLOCKS + 1):
        x = p['block', block, 'residual'] * x + p['block', block, 'x0'] * X
        for name in ('attention', 'mlp'):
            x = x + branch(x, (name, block))
    return x


def attention_residual(p, size=1):
    """Sums of `size` sublayers; a sum of none is no source."""

    def mix_sources(sources, w):
        v = np.stack(sources)
        k = v / np.sqrt(np.mean(v**2, -1, keepdims=True) + 1e-6)
        return np.einsum('sbt,sbtd->btd', softmax(k @ w, 0), v)

    sums, latest = [], X
    for i, (name, block) in enumerate(SUBLAYERS):
        y = branch(mix_sources([*sums, latest], p[name, block, 'query']), (name, block))
        if i % size == 0:
            sums, latest = [*sums, latest], y
        else:
            latest = latest + y
    return mix_sources([*sums, latest], p['readout', 0, 'query'])


def dense_former(p):
    sources, x = [X], X
    for block in range(1, BLOCKS + 1):
        for name in ('attention', 'mlp'):
            x = x + branch(x, (name, block))
        sources.append(x)
        x = sum(a * y for a, y in zip(p['block', block, 'depth'], sources, strict=False))
    return x


def hyper_connections(p, n=4):
    """Algorithm 2 of the paper, whose streams are the last axis but one."""
    h = np.repeat(X[:, :, None], n, 2)
    for name, block in SUBLAYERS:
        w = {key[2]: value for key, value in p.items() if key[:2] == (name, block)}
        z = h - h.mean(-1, keepdims=True)
        z = z / np.sqrt(np.mean(z**2, -1, keepdims=True) + 1e-6)
        alpha = w['mix'] + w['mix_scale'] * np.tanh(z @ w['mix_by_token'])
        beta = w['write'] + w['write_scale'] * np.tanh(z @ w['write_by_token'])
        mixed = np.swapaxes(alpha, -1, -2) @ h
        y = branch(mixed[:, :, 0], (name, block))
        h = beta[..., None] * y[:, :, None] + mixed[:, :, 1:]
    return h.sum(2)


def mhc(p, n=4, iterations=20):
    """The order of slices, epsilons and factors of MaxText; columns sum over streams."""
    h = np.repeat(X[:, :, None], n, 2)
    for name, block in SUBLAYERS:
        w = {key[2]: value for key, value in p.items() if key[:2] == (name, block)}
        z = h.reshape(B, T, n * D)
        z = z / np.sqrt(np.mean(z**2, -1, keepdims=True) + 1e-6)
        logits = z @ w['weights'].reshape(n * D, -1)
        pre, write, mix = (logits[..., a:b] for a, b in ((0, n), (n, 2 * n), (2 * n, None)))
        pre = sigmoid(w['read_scale'] * pre + w['biases'][:n])
        write = 2 * sigmoid(w['write_scale'] * write + w['biases'][n : 2 * n])
        mix = (w['mix_scale'] * mix + w['biases'][2 * n :]).reshape(B, T, n, n)
        mix = softmax(mix, -1) + 1e-6
        for i in range(2 * iterations - 1):
            mix = mix / (mix.sum(-2 if i % 2 == 0 else -1, keepdims=True) + 1e-6)
        y = branch(np.einsum('btn,btnd->btd', pre + 1e-6, h), (name, block))
        h = np.swapaxes(mix, -1, -2) @ h + write[..., None] * y[:, :, None]
    return h.sum(2)


REFERENCES = {
    'attention_residual': attention_residual,
    'dense_former': dense_former,
    'hyper_connections': hyper_connections,
    'mhc': mhc,
    'plain': plain,
    'x0_scalars': x0_scalars,
}


def draw_far(start):
    """Draws values far from the start, so that each factor has an effect."""
    return start + np.random.default_rng(start.size).normal(size=start.shape)


def test_every_stream_has_a_reference():
    assert REFERENCES.keys() == STREAMS.keys()


CASES = [
    *((name, {}, reference) for name, reference in REFERENCES.items()),
    ('attention_residual', {'depth_sums': 2}, functools.partial(attention_residual, size=3)),
    ('attention_residual', {'depth_sums': 6}, attention_residual),
    ('hyper_connections', {'n_streams': 1}, functools.partial(hyper_connections, n=1)),
    ('mhc', {'n_streams': 2, 'sinkhorn_iterations': 3}, functools.partial(mhc, n=2, iterations=3)),
]


@pytest.mark.parametrize(
    ('name', 'options', 'reference'), CASES, ids=[f'{name}-{options}' for name, options, _ in CASES]
)
def test_stream_is_its_equation(name, options, reference):
    """Catches slices in another order, a transposed mix, a missing epsilon or factor of 2, a source
    too many or too few, and slots that are read before they are written.
    """
    parameters = Parameters(draw_far)
    ours = walk(STREAMS[name](blocks=BLOCKS, **options), parameters)
    np.testing.assert_allclose(ours, reference(parameters), rtol=2e-4, atol=2e-5)


def at_start(name, **options):
    return walk(STREAMS[name](blocks=BLOCKS, **options), Parameters(lambda start: start))


FIRST_VERSION = {'residual_first': 1.0, 'residual_last': 1.0, 'x0_first': 0.0, 'x0_last': 0.0}


def test_starts_that_equal_pre_norm():
    """Both kinds of hyper-connections read out the sum of equal streams."""
    for name, options in (('dense_former', {}), ('x0_scalars', FIRST_VERSION)):
        np.testing.assert_allclose(at_start(name, **options), plain({}), rtol=1e-5, atol=1e-5)
    hyper = at_start('hyper_connections')
    np.testing.assert_allclose(hyper, 4 * plain({}), rtol=1e-5, atol=1e-5)
    without_weights = Parameters(lambda start: 0 * start)
    joined = walk(STREAMS['mhc'](blocks=BLOCKS), without_weights)
    np.testing.assert_allclose(joined, 4 * plain({}), rtol=1e-3, atol=1e-3)


def test_zero_queries_read_the_mean():
    """The mean of the embeddings and all sublayer outputs so far."""
    sources = [X]
    for sublayer in SUBLAYERS:
        sources.append(branch(np.mean(sources, 0), sublayer))
    np.testing.assert_allclose(
        at_start('attention_residual'), np.mean(sources, 0), rtol=1e-5, atol=1e-5
    )


def test_scalars_start_linear_in_depth():
    parameters = Parameters(lambda start: start)
    walk(STREAMS['x0_scalars'](blocks=BLOCKS), parameters)
    r, a = ([parameters['block', i, n] for i in (1, 2, 3)] for n in ('residual', 'x0'))
    np.testing.assert_allclose(r, [1.15, 1.1, 1.05], rtol=1e-6)
    np.testing.assert_allclose(a, [0.2, 0.125, 0.05], rtol=1e-6)


def test_sinkhorn_is_doubly_stochastic():
    """One iteration leaves the rows of far logits uneven; twenty do not."""
    logits = np.random.default_rng(0).normal(size=(4, 4, 7))
    sums = [np.asarray(sinkhorn(jnp.float32(logits), n).sum(1)) for n in (1, 20)]
    assert np.abs(sums[0] - 1).max() > 0.02
    np.testing.assert_allclose(sums[1], 1, atol=1e-4)
    np.testing.assert_allclose(sinkhorn(jnp.float32(logits), 20).sum(0), 1, atol=1e-4)


@pytest.mark.parametrize('name', STREAMS)
def test_observed_stream_can_be_shifted(name):
    """A shift of the recorded stream changes it by the shift, and keeps all shapes."""
    stream = STREAMS[name](blocks=BLOCKS)
    carry = jax.tree.map(lambda x: x + jnp.ones_like(x), stream.split(jnp.float32(X)))
    shifted = stream.replace(carry, stream.observe(carry) + 2)
    np.testing.assert_allclose(stream.observe(shifted), stream.observe(carry) + 2, rtol=1e-5)
    assert jax.tree.map(jnp.shape, shifted) == jax.tree.map(jnp.shape, carry)


# By hand, for D = 6 and 3 blocks. Attention residuals read 1 to 7 sources, or 1, 2, 2, 2, 3, 3, 3,
# each with a score and a weight. A sublayer of hyper-connections has its coefficients (4 x 6, or
# 4 x 4 x 6 from all streams), and 4 + 16 + 4 products for the input, the mix and the output.
PRODUCTS = [
    ('plain', {}, 0),
    ('x0_scalars', {}, 0),
    ('attention_residual', {}, 2 * 6 * 28),
    ('attention_residual', {'depth_sums': 2}, 2 * 6 * 16),
    ('dense_former', {}, 6 * (2 + 3 + 4)),
    ('hyper_connections', {}, 6 * 6 * 48),
    ('mhc', {}, 6 * 6 * 120),
]


@pytest.mark.parametrize(('name', 'options', 'expected'), PRODUCTS)
def test_products_are_counted(name, options, expected):
    """Only sources that exist, although a scan computes all slots of its buffer."""
    assert STREAMS[name].products(D, BLOCKS, **options) == expected
