"""Property and equivalence: what every attention layer of the table promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention import ATTENTIONS
from modules.attention.softmax import visible_mean
from modules.kernels import kernels_for
from modules.norms import NORMS
from modules.options import declared_options as options_of
from modules.params import split_boxes
from modules.positions import POSITIONS
from modules.sequence import packed_rows, partial_rows, whole_rows

D, HEADS, LENGTH = 16, 4, 6


EXACT = {'none': {}, 'rmsnorm': {'eps': 0.0}, 'layernorm': {'eps': 0.0}}


def layer(
    name='softmax',
    n_kv_heads=HEADS,
    qk_norm='none',
    position='rope',
    kernels='reference',
    **options,
):
    more = {'slopes': POSITIONS[position].slopes} if POSITIONS[position].slopes else {}
    return ATTENTIONS[name](
        n_heads=HEADS,
        n_kv_heads=n_kv_heads,
        head_dim=D // HEADS,
        qk_norm=lambda name, over: NORMS[qk_norm](name=name, **EXACT[qk_norm]),
        rotate=POSITIONS[position].rotate,
        kernels=kernels_for('cpu', kernels),
        dtype=jnp.float32,
        **more,
        **options,
    )


def draw_x(batch=1, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=(batch, LENGTH, D)))


@functools.cache
def draw_params(module):
    init = jax.jit(module.init)
    params, specs = split_boxes(init(jax.random.key(0), draw_x(), whole_rows(LENGTH))['params'])
    return jax.tree.map(lambda w: w / 4 if w.ndim > 1 else w, params), specs


@functools.partial(jax.jit, static_argnums=0)
def run(module, variables, x_BTD, sequence):
    """As one program: operation by operation, each would be compiled by itself."""
    return module.apply(variables, x_BTD, sequence)


def apply(module, params, x_BTD, sequence=None):
    return run(module, {'params': params}, x_BTD, sequence or whole_rows(LENGTH))


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_no_token_sees_a_later_one(name):
    """Causality by gradient, and no token of another row: d out[t] / d x[s] = 0 unless s <= t."""
    module = layer(name)
    params, _ = draw_params(module)
    weigh_D = jnp.float32(np.random.default_rng(1).normal(size=D))
    row = whole_rows(LENGTH)
    slopes_BTBTD = jax.jit(
        jax.jacrev(lambda x: module.apply({'params': params}, x, row) @ weigh_D),
    )(draw_x(batch=2))
    seen = np.abs(slopes_BTBTD).max(-1).reshape(2 * LENGTH, 2 * LENGTH) > 0
    one = np.tril(np.ones((LENGTH, LENGTH), bool))
    np.testing.assert_array_equal(seen, np.kron(np.eye(2, dtype=bool), one))


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_no_token_sees_another_document(name):
    """A document in a row gives what it gives alone, since only distances matter to rope."""
    module = layer(name)
    params, _ = draw_params(module)
    x_BTD = draw_x()
    segments = jnp.int32([[1, 1, 2, 2, 2, 3]])
    packed = apply(module, params, x_BTD, packed_rows(segments))
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        alone = apply(module, params, x_BTD[:, start:stop], whole_rows(stop - start))
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=1e-4, atol=1e-5)
    assert np.abs(packed - apply(module, params, x_BTD)).max() > 0.01


def other_values(declared) -> list:
    """Values of an option besides its default: every choice, or one number within its bounds."""
    if declared.option.choices:
        return [choice for choice in declared.option.choices if choice != declared.default]
    if bool in declared.types:
        return [not declared.default]
    least = max(declared.option.minimum, 1)
    return [least + 1 if declared.default in (None, 0, least) else least]


def rows_with_every_option(name: str) -> list[dict]:
    """Options of an attention layer off their defaults, all at once, in as few rows as one of them
    has values; and each with the next row of positions that the layer takes.
    """
    values = {option: other_values(one) for option, one in options_of(ATTENTIONS[name]).items()}
    positions = [
        position
        for position, row in POSITIONS.items()
        if row.slopes is None or ATTENTIONS[name].takes_slopes
    ]
    count = max(len(positions), *map(len, values.values()))
    return [
        {'name': name, 'position': positions[i % len(positions)]}
        | {option: each[i % len(each)] for option, each in values.items()}
        for i in range(count)
    ]


def with_every_kernel() -> list:
    """Rows by kernels. Of the default tier are those with a layer or a value of an option that none
    before them has, each by one of the kernels.
    """
    seen, found = set(), []
    for name in ATTENTIONS:
        for i, row in enumerate(rows_with_every_option(name)):
            values = {(key, value) for key, value in row.items() if key != 'position'}
            is_new, seen = not values <= seen, seen | values
            found += [
                pytest.param(row, kernels, marks=[] if is_new and i % 2 == k else pytest.mark.full)
                for k, kernels in enumerate(('reference', 'xla'))
            ]
    return found


DOCUMENTS = ((0, 2), (2, 5), (5, 6))


def option_values(value) -> str:
    return '-'.join(map(str, value.values())) if isinstance(value, dict) else value


def drawn_variables(module):
    """Variables of all collections, without a program that initializes them."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), draw_x(), whole_rows(LENGTH))
    rng = np.random.default_rng(3)
    params = split_boxes(shapes['params'])[0]
    return jax.tree.map(
        lambda leaf: jnp.float32(rng.uniform(-1, 1, leaf.shape)), {**shapes, 'params': params}
    )


@pytest.mark.parametrize(('row', 'kernels'), with_every_kernel(), ids=option_values)
def test_no_option_lets_documents_see_each_other(row, kernels):
    """By gradient, exactly 0, also where another document is 1e8 times as large. Catches a sum over
    the row from which what came before is taken off, which leaves what it was rounded by.
    """
    module = layer(**row, qk_norm='rmsnorm', n_kv_heads=2, kernels=kernels)
    variables = drawn_variables(module)
    x_BTD, sequence = draw_x(), packed_rows(jnp.int32([[1, 1, 2, 2, 2, 3]]))
    of_document_T = jnp.int32(sequence.segments_BT[0] - 1)
    weigh_D = jnp.float32(np.random.default_rng(1).normal(size=D))

    @functools.partial(jax.jit)
    def slopes(loud):
        """Of what each document gives, in all inputs [3, T, D], with document `loud` loud."""
        size_T = jnp.where(of_document_T == loud, 1e8, 1.0)

        def of_documents(x_BTD):
            out_T = module.apply(variables, x_BTD, sequence)[0] @ weigh_D
            return jnp.zeros(len(DOCUMENTS)).at[of_document_T].add(out_T)

        return jax.jacrev(of_documents)(jnp.einsum('t,btd->btd', size_T, x_BTD))[:, 0]

    for loud in (-1, 0, 1):
        found = np.asarray(slopes(loud))
        for document, (start, stop) in enumerate(DOCUMENTS):
            others = np.delete(found[document], np.s_[start:stop], 0)
            np.testing.assert_array_equal(others, 0.0)
            assert loud == document or np.all(np.any(found[document, start:stop] != 0, -1))


@pytest.mark.parametrize('name', ATTENTIONS)
def test_grouped_heads_are_full_heads_with_repeated_weights(name):
    """Catches heads repeated in turns (0 1 0 1) where consecutive ones (0 0 1 1) share."""
    grouped, full = layer(name, n_kv_heads=2), layer(name)
    params, specs = draw_params(grouped)
    repeated = {
        key: jnp.repeat(w, HEADS // 2, axis=specs[key].axes.index('kv_heads'))
        if 'kv_heads' in specs[key].axes
        else w
        for key, w in params.items()
    }
    assert repeated['key'].shape == (D, HEADS, D // HEADS)
    np.testing.assert_allclose(
        apply(grouped, params, draw_x()), apply(full, repeated, draw_x()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize('name', ATTENTIONS)
def test_parameters_are_described_as_they_are_used(name):
    _, specs = draw_params(layer(name, n_kv_heads=2))
    assert {k: (s.role, s.fan_in) for k, s in specs.items()} == {
        'query': ('hidden', ('embed',)),
        'key': ('hidden', ('embed',)),
        'value': ('hidden', ('embed',)),
        'out': ('hidden', ('heads', 'head_dim')),
    }


@pytest.mark.parametrize('name', ATTENTIONS)
@pytest.mark.parametrize('key', ['query', pytest.param('key', marks=pytest.mark.full)])
def test_qk_norm_takes_the_scale_off_the_weights(name, key):
    """With it, logits do not depend on the scale of Wq or Wk; without, they do."""
    for qk_norm in ('rmsnorm', 'none'):
        module = layer(name, qk_norm=qk_norm)
        params, _ = draw_params(module)
        scaled = params | {key: 100 * params[key]}
        plain = apply(module, params, draw_x())
        change = np.abs(apply(module, scaled, draw_x()) - plain).max() / np.abs(plain).max()
        assert (change < 1e-4) == (qk_norm == 'rmsnorm')


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_value_norm_takes_the_scale_off_the_values(name):
    """And is a norm of its own, of each head: it has a gain."""
    for norm_values in (True, False):
        module = layer(name, qk_norm='rmsnorm', norm_values=norm_values)
        params, _ = draw_params(module)
        assert ('value_norm' in params) == norm_values
        scaled = params | {'value': 100 * params['value']}
        change = np.abs(apply(module, scaled, draw_x()) - apply(module, params, draw_x())).max()
        assert (change < 1e-4) == norm_values
    louder = params_with(layer(name, qk_norm='rmsnorm', norm_values=True), 2.0)
    module = layer(name, qk_norm='rmsnorm', norm_values=True)
    plain = apply(module, draw_params(module)[0], draw_x())
    np.testing.assert_allclose(apply(module, louder, draw_x()), 2 * plain, rtol=1e-5, atol=1e-6)


def params_with(module, gain):
    params, _ = draw_params(module)
    return params | {'value_norm': {'scale': gain * params['value_norm']['scale']}}


def gated(kind, x, w):
    """[T, N, 1 or H]; 1 where there is no gate."""
    if kind == 'none':
        return 1.0
    gate = 1 / (1 + np.exp(-np.tensordot(x, w['gate'], 1)))
    return gate[..., None] if kind == 'headwise' else gate


def numpy_attention(
    x,
    w,
    l2_scaled=None,
    softcap=0.0,
    logit_scale='root',
    sinks='none',
    affine_scaled=False,
    window=None,
    full_every=0,
    gate='none',
    block=1,
    mean=0.5,
    n_kv_heads=HEADS,
):
    """One row through a layer without positions, in float64, one head and query at a time."""
    width = D // HEADS
    out = np.zeros((len(x), D))
    scale = 1 / width if logit_scale == 'mup' else width**-0.5
    gates = gated(gate, x, w)
    for n in range(HEADS):
        kv = n * n_kv_heads // HEADS
        q, k, v = x @ w['query'][:, n], x @ w['key'][:, kv], x @ w['value'][:, kv]
        mixed = np.zeros_like(v)
        for t in range(len(x)):
            first = (
                0 if window is None or (full_every and block % full_every == 0) else t - window + 1
            )
            seen = slice(max(first, 0), t + 1)
            logits = k[seen] @ q[t] * (1.0 if l2_scaled == 'key' else scale)
            if logit_scale == 'learned':
                logits = logits * w['temperature'][n]
            if l2_scaled:
                temperature = w['temperature'][n] if logit_scale == 'learned' else 1.0
                logits = logits - temperature * scale * np.sum(k[seen] ** 2, -1) / 2
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            sunk = {'none': 0.0, 'off_by_one': 1.0}.get(sinks)
            sunk = np.exp(w['sinks'][n]) if sunk is None else sunk
            probs = np.exp(logits) / (np.sum(np.exp(logits)) + sunk)
            if affine_scaled:
                alpha = 1 / (1 + np.exp(-x[t] @ w['affine'][:, n]))
                probs = alpha * probs + (mean - alpha) / len(probs)
            mixed[t] = probs @ v[seen]
        mixed = mixed * (gates if isinstance(gates, float) else gates[:, n])
        out += mixed @ w['out'][n]
    return out


OPTIONS = [
    ('softmax', {}),
    ('softmax', {'n_kv_heads': 2}),
    ('softmax', {'logit_scale': 'mup'}),
    ('softmax', {'logit_scale': 'learned'}),
    ('softmax', {'softcap': 0.5}),
    ('softmax', {'sinks': 'off_by_one'}),
    ('softmax', {'sinks': 'learned'}),
    ('softmax', {'affine_scaled': True}),
    ('softmax', {'affine_scaled': True, 'window': 3, 'n_kv_heads': 2}),
    ('softmax', {'gate': 'headwise'}),
    ('softmax', {'gate': 'elementwise'}),
    ('softmax', {'window': 2}),
    ('softmax', {'window': 2, 'full_every': 3, 'block': 3}),
    ('softmax', {'window': 2, 'full_every': 3, 'block': 4, 'affine_scaled': True}),
    ('l2', {}),
    ('l2', {'l2_scaled': 'key'}),
    ('l2', {'logit_scale': 'learned', 'softcap': 1.0, 'sinks': 'learned', 'n_kv_heads': 2}),
]


def moved(params):
    """With vectors that are not what they start as."""
    rng = np.random.default_rng(3)

    def one(w):
        return w * jnp.float32(rng.uniform(0.5, 2.0, w.shape)) + 0.3 if w.ndim == 1 else w

    return jax.tree.map(one, params)


@pytest.mark.parametrize(('name', 'options'), OPTIONS, ids=str)
def test_an_attention_layer_is_its_equation(name, options):
    """Reference. Catches a softcap behind the sink, a temperature on the key term alone, a gate of
    another head, a mean over keys that are not seen, a window off by one.
    """
    module = layer(name, position='none', **options)
    params = moved(draw_params(module)[0])
    stats = {'stats': {'affine_mean': jnp.full(HEADS, 0.7)}} if module.affine_scaled else {}
    found = run(module, {'params': params, **stats}, draw_x(), whole_rows(LENGTH))
    w = {key: np.float64(value) for key, value in params.items()}
    of_l2 = {'l2_scaled': 'both'} if name == 'l2' else {}
    wanted = numpy_attention(np.float64(draw_x()[0]), w, mean=0.7, **(of_l2 | options))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_affine_scaling_follows_the_mean_of_its_scale():
    """In training alone, by a tenth of the way, padding left out; the present batch is scaled by
    the mean from before it.
    """
    module = layer(affine_scaled=True)
    params = draw_params(module)[0]
    valid = jnp.float32([[1, 1, 1, 0, 0, 0]])
    sequence = whole_rows(LENGTH).replace(valid_BT=valid)
    start = {'stats': {'affine_mean': jnp.full(HEADS, 0.5)}}
    trained, after = module.apply({'params': params, **start}, draw_x(), sequence, mutable='stats')
    evaluated = module.apply({'params': params, **start}, draw_x(), sequence)
    np.testing.assert_array_equal(trained, evaluated)
    alpha = 1 / (1 + np.exp(-np.float64(draw_x()[0, :3]) @ np.float64(params['affine'])))
    wanted = 0.9 * 0.5 + 0.1 * alpha.mean(0)
    np.testing.assert_allclose(after['stats']['affine_mean'], wanted, rtol=1e-5)


def mean_by_token(v_BKTH, segments_BT, window):
    """In float64, one token at a time."""
    v, means = np.float64(v_BKTH), np.zeros(v_BKTH.shape)
    for b, t in np.ndindex(len(v), v.shape[2]):
        first = max(0, t - window + 1)
        own = [s for s in range(first, t + 1) if segments_BT[b][s] == segments_BT[b][t]]
        means[b, :, t] = v[b][:, own].mean(1)
    return means


@pytest.mark.parametrize('window', [None, 1, 3, 4, 99])
def test_affine_scaling_is_the_mean_of_the_tokens_seen(window):
    """Reference, in documents that begin within pieces and with them, and in layers without their
    window. Catches a window that is cut off at its piece, and one that reaches over a document.
    """
    v = jnp.float32(np.random.default_rng(0).normal(size=(2, 2, 14, 3)))
    segments = np.repeat([[1, 2, 3, 4], [5, 6, 7, 7]], [1, 4, 8, 1], axis=1)
    sequence = packed_rows(jnp.int32(segments))
    for is_full in (None,) if window is None else (None, False, True):
        found = jax.jit(lambda v, is_full: visible_mean(v, sequence, window, is_full))(v, is_full)
        width = 14 if window is None or is_full else window
        np.testing.assert_allclose(found, mean_by_token(v, segments, width), rtol=0, atol=1e-6)


@pytest.mark.parametrize('window', [None, 3])
@pytest.mark.parametrize('value', [1e8, np.inf, np.nan])
def test_affine_scaling_stays_within_documents(value, window):
    """Values of one document, whatever they are, do nothing to the means of another, nor to their
    gradients. Catches sums over the row, in which 1e8 leaves 0 of the next document and inf nan.
    """
    v = jnp.float32(np.random.default_rng(0).normal(size=(1, 1, 8, 2)))
    segments = jnp.int32([[1, 1, 1, 2, 2, 2, 2, 3]])

    @functools.partial(jax.jit)
    def mean_and_slopes(v):
        def mean(v):
            return visible_mean(v, packed_rows(segments), window, None)

        found, pull = jax.vjp(mean, v)
        of_second = jnp.zeros_like(found).at[:, :, 3:7].set(1.0)
        return found[:, :, 3:7], *pull(of_second)

    plain = mean_and_slopes(v)
    loud = mean_and_slopes(v.at[:, :, jnp.array([1, 7])].set(value))
    jax.tree.map(np.testing.assert_array_equal, loud, plain)
    np.testing.assert_array_equal(np.delete(plain[1], np.s_[3:7], 2), 0.0)


@pytest.mark.default_rows('None-bfloat16')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('window', [None, 5000])
def test_affine_scaling_is_precise_in_long_rows(window, dtype):
    """Reference: 65,536 tokens in float64, the last documents short. Catches a difference of two
    sums over the row, which is off by 4e-3 in a document of two tokens, and sums in bfloat16.
    """
    length, starts = 2**16, np.array([0, 40_000, 65_500, 65_534])
    v = jnp.asarray(1 + np.random.default_rng(0).normal(size=(1, 1, length, 2)), dtype)
    total = np.cumsum(np.pad(np.float64(v), ((0, 0), (0, 0), (1, 0), (0, 0))), 2)
    place = np.arange(length)
    number = np.searchsorted(starts, place, side='right')
    first = starts[number - 1] if window is None else np.maximum(starts[number - 1], place - 4999)
    wanted = (total[:, :, place + 1] - total[:, :, first]) / (place + 1 - first)[:, None]
    sequence = packed_rows(jnp.int32(number[None]))
    found = jax.jit(lambda v: visible_mean(v, sequence, window, None))(v)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.full
def test_a_norm_over_the_model_sees_all_heads_together():
    """OLMo 2's: rms of the queries of a token over N * H features, with a gain of each."""
    module = layer(qk_norm='rmsnorm', qk_norm_over='model', n_kv_heads=2, position='none')
    params, _ = draw_params(module)
    assert params['query_norm']['scale'].shape == (D,)
    assert params['key_norm']['scale'].shape == (D // 2,)
    x, w = np.float64(draw_x()[0]), {k: np.float64(v) for k, v in params.items() if 'norm' not in k}
    for key in ('query', 'key'):  # a number of each token, so the row is read as weights of its own
        rms = np.sqrt(np.mean(np.tensordot(x, w[key], 1) ** 2, (1, 2)))
        w[key] = np.einsum('t,td,dnh->tnh', 1 / rms, x, w[key])
    w['value'] = np.tensordot(x, w['value'], 1)
    wanted = numpy_attention(np.eye(LENGTH), w, n_kv_heads=2)
    np.testing.assert_allclose(apply(module, params, draw_x())[0], wanted, rtol=1e-4, atol=1e-5)


CACHED = [
    *({'name': name} for name in ATTENTIONS),
    {'affine_scaled': True, 'window': 2, 'full_every': 2, 'block': 2},
]
CACHED_TOO = [
    {'position': 'none', 'n_kv_heads': 2},
    {'softcap': 0.5, 'logit_scale': 'learned', 'sinks': 'learned', 'gate': 'elementwise'},
    {'affine_scaled': True, 'window': 3, 'n_kv_heads': 2},
    {'window': 2, 'full_every': 2, 'block': 1, 'sinks': 'off_by_one', 'gate': 'headwise'},
    {'qk_norm': 'rmsnorm', 'qk_norm_over': 'model', 'norm_values': True},
    *({'position': name} for name, row in POSITIONS.items() if row.slopes),
]
PARTS = ((2, 2), (3, 1), (1, 1))  # columns read, and of the second row those that are no padding


@pytest.mark.default_rows("{'name': 'softmax'}")
@pytest.mark.parametrize(
    'options',
    [*CACHED, *(pytest.param(one, marks=pytest.mark.full) for one in CACHED_TOO)],
    ids=str,
)
def test_a_row_read_in_parts_is_the_row_read_whole(options):
    """Equivalence: many tokens, then fewer in one row than in the other, then one. Catches a key
    that padding has overwritten, a position that begins again, a state that padding adds to.
    """
    module = layer(**options)
    params, x_BTD = draw_params(module)[0], draw_x(batch=2)
    variables = {'params': moved(params)}
    if options.get('affine_scaled'):
        variables['stats'] = {'affine_mean': jnp.full(HEADS, 0.7)}
    wanted = run(module, variables, x_BTD, whole_rows(LENGTH))

    @functools.partial(jax.jit)
    def in_parts(x_BTD):
        cache, starts, parts = {}, jnp.zeros(2, jnp.int32), []
        for columns, second in PARTS:
            counts = jnp.int32([columns, second])
            index = starts[:, None] + jnp.arange(columns)[None]
            own = jnp.take_along_axis(x_BTD, jnp.minimum(index, LENGTH - 1)[..., None], 1)
            sequence = partial_rows(starts, counts, columns, LENGTH + 1)
            out, cache = module.apply(variables | cache, own, sequence, mutable=('cache',))
            parts.append(out)
            starts = starts + counts
        return parts

    starts = np.zeros(2, int)
    for (columns, second), part in zip(PARTS, in_parts(x_BTD), strict=True):
        for row, count in enumerate((columns, second)):
            own = wanted[row, starts[row] : starts[row] + count]
            np.testing.assert_allclose(part[row, :count], own, rtol=1e-5, atol=1e-5)
            starts[row] += count
