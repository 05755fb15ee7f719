"""Property and equivalence: guarantees of every attention layer in the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention import ATTENTIONS
from modules.attention.softmax import visible_mean
from modules.kernels import kernels_for
from modules.norms import NORMS
from modules.options import declared_options
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
    slopes = {'slopes': POSITIONS[position].slopes} if POSITIONS[position].slopes else {}
    return ATTENTIONS[name](
        n_heads=HEADS,
        n_kv_heads=n_kv_heads,
        head_dim=D // HEADS,
        qk_norm=lambda name, over: NORMS[qk_norm](name=name, **EXACT[qk_norm]),
        rotate=POSITIONS[position].rotate,
        kernels=kernels_for('cpu', kernels),
        dtype=jnp.float32,
        **slopes,
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
    """Compiles the layer as a single program; eagerly, each operation would be compiled alone."""
    return module.apply(variables, x_BTD, sequence)


def apply(module, params, x_BTD, sequence=None):
    return run(module, {'params': params}, x_BTD, sequence or whole_rows(LENGTH))


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_attention_is_causal(name):
    """Causality by gradient, and independence of rows: d out[t] / d x[s] = 0 unless s <= t."""
    module = layer(name)
    params, _ = draw_params(module)
    weights_D = jnp.float32(np.random.default_rng(1).normal(size=D))
    row = whole_rows(LENGTH)
    jacobian_BTBTD = jax.jit(
        jax.jacrev(lambda x: module.apply({'params': params}, x, row) @ weights_D),
    )(draw_x(batch=2))
    depends = np.abs(jacobian_BTBTD).max(-1).reshape(2 * LENGTH, 2 * LENGTH) > 0
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    np.testing.assert_array_equal(depends, np.kron(np.eye(2, dtype=bool), causal))


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_documents_do_not_see_each_other(name):
    """A document in a row gives the same outputs as alone, since rope depends on distances only."""
    module = layer(name)
    params, _ = draw_params(module)
    x_BTD = draw_x()
    segments = jnp.int32([[1, 1, 2, 2, 2, 3]])
    packed = apply(module, params, x_BTD, packed_rows(segments))
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        outputs = apply(module, params, x_BTD[:, start:stop], whole_rows(stop - start))
        np.testing.assert_allclose(packed[:, start:stop], outputs, rtol=1e-4, atol=1e-5)
    assert np.abs(packed - apply(module, params, x_BTD)).max() > 0.01


def non_default_values(declared) -> list:
    """Returns other values than an option's default: every choice, or a number within bounds."""
    if declared.option.choices:
        return [choice for choice in declared.option.choices if choice != declared.default]
    if bool in declared.types:
        return [not declared.default]
    minimum = max(declared.option.minimum, 1)
    return [minimum + 1 if declared.default in (None, 0, minimum) else minimum]


def option_rows(name: str) -> list[dict]:
    """Returns options of an attention layer, all off their defaults.

    There are as many rows as an option has values, each with the next kind of positions that the
    layer supports.
    """
    values = {
        option: non_default_values(declared)
        for option, declared in declared_options(ATTENTIONS[name]).items()
    }
    positions = [
        position
        for position, row in POSITIONS.items()
        if row.slopes is None or ATTENTIONS[name].takes_slopes
    ]
    n_rows = max(len(positions), *map(len, values.values()))
    return [
        {'name': name, 'position': positions[i % len(positions)]}
        | {option: choices[i % len(choices)] for option, choices in values.items()}
        for i in range(n_rows)
    ]


def kernel_params() -> list:
    """Returns rows with each of two kernels.

    The default tier has the rows with a layer or an option value that no earlier row has, each with
    one of the kernels.
    """
    covered, params = set(), []
    for name in ATTENTIONS:
        for i, row in enumerate(option_rows(name)):
            values = {(key, value) for key, value in row.items() if key != 'position'}
            is_new, covered = not values <= covered, covered | values
            params += [
                pytest.param(row, kernels, marks=[] if is_new and i % 2 == k else pytest.mark.full)
                for k, kernels in enumerate(('reference', 'xla'))
            ]
    return params


DOCUMENTS = ((0, 2), (2, 5), (5, 6))


def row_id(value) -> str:
    return '-'.join(map(str, value.values())) if isinstance(value, dict) else value


def draw_variables(module):
    """Draws variables of all collections, without a program that initializes them."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), draw_x(), whole_rows(LENGTH))
    rng = np.random.default_rng(3)
    params = split_boxes(shapes['params'])[0]
    return jax.tree.map(
        lambda leaf: jnp.float32(rng.uniform(-1, 1, leaf.shape)), {**shapes, 'params': params}
    )


@pytest.mark.parametrize(('row', 'kernels'), kernel_params(), ids=row_id)
def test_no_option_leaks_between_documents(row, kernels):
    """The gradient is exactly 0, also if another document is 1e8 times as large. Catches a
    difference of prefix sums over the row, which carries the rounding error of earlier documents.
    """
    module = layer(**row, qk_norm='rmsnorm', n_kv_heads=2, kernels=kernels)
    variables = draw_variables(module)
    x_BTD, sequence = draw_x(), packed_rows(jnp.int32([[1, 1, 2, 2, 2, 3]]))
    document_T = jnp.int32(sequence.segments_BT[0] - 1)
    weights_D = jnp.float32(np.random.default_rng(1).normal(size=D))

    @functools.partial(jax.jit)
    def jacobian(loud):
        """Returns d (sum of each document's outputs) / d inputs, [3, T, D]; `loud` is scaled up."""
        size_T = jnp.where(document_T == loud, 1e8, 1.0)

        def document_sums(x_BTD):
            out_T = module.apply(variables, x_BTD, sequence)[0] @ weights_D
            return jnp.zeros(len(DOCUMENTS)).at[document_T].add(out_T)

        return jax.jacrev(document_sums)(jnp.einsum('t,btd->btd', size_T, x_BTD))[:, 0]

    for loud in (-1, 0, 1):
        slopes = np.asarray(jacobian(loud))
        for document, (start, stop) in enumerate(DOCUMENTS):
            outside = np.delete(slopes[document], np.s_[start:stop], 0)
            np.testing.assert_array_equal(outside, 0.0)
            assert loud == document or np.all(np.any(slopes[document, start:stop] != 0, -1))


@pytest.mark.parametrize('name', ATTENTIONS)
def test_grouped_heads_equal_repeated_heads(name):
    """Catches heads repeated in turns (0 1 0 1) instead of consecutively (0 0 1 1)."""
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


MATRICES = {
    'query': ('hidden', ('embed',)),
    'key': ('hidden', ('embed',)),
    'value': ('hidden', ('embed',)),
    'out': ('hidden', ('heads', 'head_dim')),
}
# Of recurrences: the filter of a feature is no matrix.
RECURRENT = MATRICES | {
    'gate': ('hidden', ('embed',)),
    'decay': ('hidden', ('embed',)),
    'decay_log_rate': ('vector', ()),
    'decay_step_bias': ('vector', ()),
    'output_scale': ('vector', ()),
    **{f'{matrix}_conv': ('vector', ()) for matrix in ('query', 'key', 'value')},
}
PARAMETERS = {'gla': RECURRENT, 'gated_delta': RECURRENT | {'write': ('hidden', ('embed',))}}


@pytest.mark.parametrize('name', ATTENTIONS)
def test_parameters_have_roles_and_fan_in(name):
    _, specs = draw_params(layer(name, n_kv_heads=2))
    expected = PARAMETERS.get(name, MATRICES)
    assert {k: (s.role, s.fan_in) for k, s in specs.items()} == expected


@pytest.mark.parametrize('name', ATTENTIONS)
@pytest.mark.parametrize('key', ['query', pytest.param('key', marks=pytest.mark.full)])
def test_qk_norm_removes_weight_scale(name, key):
    """With a qk_norm, logits do not depend on the scale of Wq or Wk; without, they do."""
    for qk_norm in ('rmsnorm', 'none'):
        module = layer(name, qk_norm=qk_norm)
        params, _ = draw_params(module)
        scaled = params | {key: 100 * params[key]}
        plain = apply(module, params, draw_x())
        change = np.abs(apply(module, scaled, draw_x()) - plain).max() / np.abs(plain).max()
        assert (change < 1e-4) == (qk_norm == 'rmsnorm')


@pytest.mark.default_rows('softmax')
@pytest.mark.parametrize('name', ATTENTIONS)
def test_value_norm_removes_value_scale(name):
    """The norm is separate for each head, and has a gain."""
    for norm_values in (True, False):
        module = layer(name, qk_norm='rmsnorm', norm_values=norm_values)
        params, _ = draw_params(module)
        assert ('value_norm' in params) == norm_values
        scaled = params | {'value': 100 * params['value']}
        change = np.abs(apply(module, scaled, draw_x()) - apply(module, params, draw_x())).max()
        assert (change < 1e-4) == norm_values
    if ATTENTIONS[name].operation == 'recurrence':  # has a norm of the output too
        return
    louder = scale_value_norm(layer(name, qk_norm='rmsnorm', norm_values=True), 2.0)
    module = layer(name, qk_norm='rmsnorm', norm_values=True)
    plain = apply(module, draw_params(module)[0], draw_x())
    np.testing.assert_allclose(apply(module, louder, draw_x()), 2 * plain, rtol=1e-5, atol=1e-6)


def scale_value_norm(module, gain):
    params, _ = draw_params(module)
    return params | {'value_norm': {'scale': gain * params['value_norm']['scale']}}


def numpy_gate(kind, x, w):
    """Returns the gate [T, N, 1 or H]; 1 without a gate."""
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
    """Computes one row of a layer without positions in float64, a head and a query at a time."""
    width = D // HEADS
    y_TD = np.zeros((len(x), D))
    scale = 1 / width if logit_scale == 'mup' else width**-0.5
    gates = numpy_gate(gate, x, w)
    for n in range(HEADS):
        kv = n * n_kv_heads // HEADS
        q, k, v = x @ w['query'][:, n], x @ w['key'][:, kv], x @ w['value'][:, kv]
        mixed = np.zeros_like(v)
        for t in range(len(x)):
            first = (
                0 if window is None or (full_every and block % full_every == 0) else t - window + 1
            )
            visible = slice(max(first, 0), t + 1)
            logits = k[visible] @ q[t] * (1.0 if l2_scaled == 'key' else scale)
            if logit_scale == 'learned':
                logits = logits * w['temperature'][n]
            if l2_scaled:
                temperature = w['temperature'][n] if logit_scale == 'learned' else 1.0
                logits = logits - temperature * scale * np.sum(k[visible] ** 2, -1) / 2
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            sink_weight = {'none': 0.0, 'off_by_one': 1.0}.get(sinks)
            sink_weight = np.exp(w['sinks'][n]) if sink_weight is None else sink_weight
            probs = np.exp(logits) / (np.sum(np.exp(logits)) + sink_weight)
            if affine_scaled:
                alpha = 1 / (1 + np.exp(-x[t] @ w['affine'][:, n]))
                probs = alpha * probs + (mean - alpha) / len(probs)
            mixed[t] = probs @ v[visible]
        mixed = mixed * (gates if isinstance(gates, float) else gates[:, n])
        y_TD += mixed @ w['out'][n]
    return y_TD


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


def perturb_vectors(params):
    """Changes vectors from their initial values."""
    rng = np.random.default_rng(3)

    def perturb(w):
        return w * jnp.float32(rng.uniform(0.5, 2.0, w.shape)) + 0.3 if w.ndim == 1 else w

    return jax.tree.map(perturb, params)


@pytest.mark.parametrize(('name', 'options'), OPTIONS, ids=str)
def test_attention_layer_matches_equation(name, options):
    """Reference. Catches a softcap behind the sink, a temperature only on the key term, a gate of
    another head, a mean over hidden keys, a window off by one.
    """
    module = layer(name, position='none', **options)
    params = perturb_vectors(draw_params(module)[0])
    stats = {'stats': {'affine_mean': jnp.full(HEADS, 0.7)}} if module.affine_scaled else {}
    y_BTD = run(module, {'params': params, **stats}, draw_x(), whole_rows(LENGTH))
    w = {key: np.float64(value) for key, value in params.items()}
    l2_options = {'l2_scaled': 'both'} if name == 'l2' else {}
    expected = numpy_attention(np.float64(draw_x()[0]), w, mean=0.7, **(l2_options | options))
    np.testing.assert_allclose(y_BTD[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_affine_scaling_tracks_mean_scale():
    """Only in training, by a tenth of the way, without padding; the batch is scaled by the mean
    from before it.
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
    expected = 0.9 * 0.5 + 0.1 * alpha.mean(0)
    np.testing.assert_allclose(after['stats']['affine_mean'], expected, rtol=1e-5)


def numpy_visible_mean(v_BKTH, segments_BT, window):
    """Computes the mean in float64, a token at a time."""
    v, means = np.float64(v_BKTH), np.zeros(v_BKTH.shape)
    for b, t in np.ndindex(len(v), v.shape[2]):
        first = max(0, t - window + 1)
        visible = [s for s in range(first, t + 1) if segments_BT[b][s] == segments_BT[b][t]]
        means[b, :, t] = v[b][:, visible].mean(1)
    return means


@pytest.mark.parametrize('window', [None, 1, 3, 4, 99])
def test_visible_mean_matches_reference(window):
    """Reference, with documents that start inside pieces and with them, and with full layers.
    Catches a window cut off at its piece, and a window that extends over a document.
    """
    v = jnp.float32(np.random.default_rng(0).normal(size=(2, 2, 14, 3)))
    segments = np.repeat([[1, 2, 3, 4], [5, 6, 7, 7]], [1, 4, 8, 1], axis=1)
    sequence = packed_rows(jnp.int32(segments))
    for is_full in (None,) if window is None else (None, False, True):
        means = jax.jit(lambda v, is_full: visible_mean(v, sequence, window, is_full))(v, is_full)
        width = 14 if window is None or is_full else window
        np.testing.assert_allclose(means, numpy_visible_mean(v, segments, width), rtol=0, atol=1e-6)


@pytest.mark.parametrize('window', [None, 3])
@pytest.mark.parametrize('value', [1e8, np.inf, np.nan])
def test_visible_mean_ignores_other_documents(value, window):
    """Values of a document, whatever they are, change neither the means of another nor their
    gradients. Catches sums over the row, where 1e8 rounds the next document to 0 and inf gives NaN.
    """
    v = jnp.float32(np.random.default_rng(0).normal(size=(1, 1, 8, 2)))
    segments = jnp.int32([[1, 1, 1, 2, 2, 2, 2, 3]])

    @functools.partial(jax.jit)
    def mean_and_slopes(v):
        def mean(v):
            return visible_mean(v, packed_rows(segments), window, None)

        means, pull = jax.vjp(mean, v)
        cotangent = jnp.zeros_like(means).at[:, :, 3:7].set(1.0)
        return means[:, :, 3:7], *pull(cotangent)

    plain = mean_and_slopes(v)
    loud = mean_and_slopes(v.at[:, :, jnp.array([1, 7])].set(value))
    jax.tree.map(np.testing.assert_array_equal, loud, plain)
    np.testing.assert_array_equal(np.delete(plain[1], np.s_[3:7], 2), 0.0)


@pytest.mark.default_rows('None-bfloat16')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('window', [None, 5000])
def test_visible_mean_is_precise_in_long_rows(window, dtype):
    """Reference: 65,536 tokens in float64, with short last documents. Catches a difference of two
    sums over the row, which is off by 4e-3 in a document of two tokens, and sums in bfloat16.
    """
    length, starts = 2**16, np.array([0, 40_000, 65_500, 65_534])
    v = jnp.asarray(1 + np.random.default_rng(0).normal(size=(1, 1, length, 2)), dtype)
    total = np.cumsum(np.pad(np.float64(v), ((0, 0), (0, 0), (1, 0), (0, 0))), 2)
    position = np.arange(length)
    document = np.searchsorted(starts, position, side='right')
    first = (
        starts[document - 1]
        if window is None
        else np.maximum(starts[document - 1], position - 4999)
    )
    expected = (total[:, :, position + 1] - total[:, :, first]) / (position + 1 - first)[:, None]
    sequence = packed_rows(jnp.int32(document[None]))
    means = jax.jit(lambda v: visible_mean(v, sequence, window, None))(v)
    assert means.dtype == jnp.float32
    np.testing.assert_allclose(means, expected, rtol=0, atol=2e-6)


@pytest.mark.full
def test_qk_norm_over_model_spans_heads():
    """As in OLMo 2: the rms of a token's queries over N * H features, with a gain for each."""
    module = layer(qk_norm='rmsnorm', qk_norm_over='model', n_kv_heads=2, position='none')
    params, _ = draw_params(module)
    assert params['query_norm']['scale'].shape == (D,)
    assert params['key_norm']['scale'].shape == (D // 2,)
    x, w = np.float64(draw_x()[0]), {k: np.float64(v) for k, v in params.items() if 'norm' not in k}
    for key in ('query', 'key'):  # the rms differs by token, so each token gets its own weights
        rms = np.sqrt(np.mean(np.tensordot(x, w[key], 1) ** 2, (1, 2)))
        w[key] = np.einsum('t,td,dnh->tnh', 1 / rms, x, w[key])
    w['value'] = np.tensordot(x, w['value'], 1)
    expected = numpy_attention(np.eye(LENGTH), w, n_kv_heads=2)
    np.testing.assert_allclose(apply(module, params, draw_x())[0], expected, rtol=1e-4, atol=1e-5)


CACHED = [
    *({'name': name} for name in ATTENTIONS),
    {'affine_scaled': True, 'window': 2, 'full_every': 2, 'block': 2},
]
CACHED_FULL_TIER = [
    {'position': 'none', 'n_kv_heads': 2},
    {'softcap': 0.5, 'logit_scale': 'learned', 'sinks': 'learned', 'gate': 'elementwise'},
    {'affine_scaled': True, 'window': 3, 'n_kv_heads': 2},
    {'window': 2, 'full_every': 2, 'block': 1, 'sinks': 'off_by_one', 'gate': 'headwise'},
    {'qk_norm': 'rmsnorm', 'qk_norm_over': 'model', 'norm_values': True},
    *({'position': name} for name, row in POSITIONS.items() if row.slopes),
]
PARTS = ((2, 2), (3, 1), (1, 1))  # columns of a part, and how many are tokens in the second row


@pytest.mark.default_rows("{'name': 'softmax'}")
@pytest.mark.parametrize(
    'options',
    [*CACHED, *(pytest.param(row, marks=pytest.mark.full) for row in CACHED_FULL_TIER)],
    ids=str,
)
def test_cached_row_equals_whole_row(options):
    """Equivalence: many tokens, then fewer in one row than in the other, then one. Catches a key
    overwritten by padding, a position that restarts, a state that padding adds to.
    """
    module = layer(**options)
    params, x_BTD = draw_params(module)[0], draw_x(batch=2)
    variables = {'params': perturb_vectors(params)}
    if options.get('affine_scaled'):
        variables['stats'] = {'affine_mean': jnp.full(HEADS, 0.7)}
    expected = run(module, variables, x_BTD, whole_rows(LENGTH))

    @functools.partial(jax.jit)
    def in_parts(x_BTD):
        cache, starts, parts = {}, jnp.zeros(2, jnp.int32), []
        for columns, second in PARTS:
            counts = jnp.int32([columns, second])
            index = starts[:, None] + jnp.arange(columns)[None]
            part_BTD = jnp.take_along_axis(x_BTD, jnp.minimum(index, LENGTH - 1)[..., None], 1)
            sequence = partial_rows(starts, counts, columns, LENGTH + 1)
            outputs, cache = module.apply(variables | cache, part_BTD, sequence, mutable=('cache',))
            parts.append(outputs)
            starts = starts + counts
        return parts

    starts = np.zeros(2, int)
    for (columns, second), part in zip(PARTS, in_parts(x_BTD), strict=True):
        for row, count in enumerate((columns, second)):
            part_BTD = expected[row, starts[row] : starts[row] + count]
            np.testing.assert_allclose(part[row, :count], part_BTD, rtol=1e-5, atol=1e-5)
            starts[row] += count
