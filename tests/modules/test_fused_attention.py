"""Equivalence: the library's fused attention, computed in plain operations, equals the reference,
on one device and sharded over several. Contract: unsupported options are rejected by name before
anything is compiled, and its programs contain its calls
(tests/lm/devices/test_compiled_for_chips.py compiles them for TPUs).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import NamedSharding, PartitionSpec

from lm.config.fields import MeshConfig
from lm.config.resolve import resolve_config
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import batch_sharding, make_mesh, replicated_sharding, trace_on_mesh
from lm.devices.shardings import batch_shapes, state_layout
from lm.inference.load import replace_kernels
from lm.model.check import check
from lm.model.kernels import select_fused_attention, select_kernels
from lm.training.state import build_learner, make_hyper
from lm.training.step import make_train_step
from modules.kernels import kernels_for
from modules.kernels.attention import ATTENTION_KERNELS, Scores, attend, check_scores
from modules.kernels.attention.splash import (
    BlockSizes,
    computed_share,
    device_queries,
    kernel_block_sizes,
    select_block_sizes,
)
from modules.numerics import REMAT_POLICIES
from tests.helpers import BOS, VOCAB, tiny_config

PLAIN = Scores()
ROUNDING = {'float32': 2**-23, 'bfloat16': 2**-8}


@pytest.fixture
def plain_operations(monkeypatch):
    """Replaces the implementations that a CPU lacks in JAX's functions, for any type: float32
    separates mistakes from rounding.
    """
    fused, splash = jax.nn.dot_product_attention, splash_attention_kernel.make_splash_mha

    def in_xla(*arrays, implementation, **options):
        return fused(*arrays, implementation='xla', **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', in_xla)
    versions = 'jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version'
    monkeypatch.setattr(versions, lambda: 91000)
    interpreted = functools.partial(splash, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, 'make_splash_mha', interpreted)
    row = dataclasses.replace(ATTENTION_KERNELS['cudnn'], dtypes=None)
    monkeypatch.setitem(ATTENTION_KERNELS, 'cudnn', row)


def draw(length, n_heads=4, n_kv_heads=2, batch=2, head_dim=8, dtype='float32'):
    """Draws q, k, v, the cotangent of the output, segments and sinks: three documents, then
    padding.
    """
    rng = np.random.default_rng(length)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    arrays = [jnp.asarray(rng.normal(size=(batch, n, length, head_dim)), dtype) for n in heads]
    edges = [length // 5, length // 2, length - 2]
    row = (1 + np.searchsorted(edges, np.arange(length), side='right')) % 4
    segments = jnp.asarray(np.stack([np.roll(row, b) for b in range(batch)]), jnp.int32)
    return *arrays, segments, jnp.float32(rng.normal(size=n_heads))


def forward_and_gradients(name, scores, segmented, *arrays, **options):
    """Returns the output, and gradients of q, k, v and of sinks."""
    q, k, v, grad, segments, sinks = arrays
    sink_arrays = {'sinks_N': sinks} if scores.sinks else {}

    def run(q, k, v, sink_arrays):
        return attend(
            name, q, k, v, scores, segments if segmented else None, **sink_arrays, options=options
        )

    y, pull = jax.vjp(run, q, k, v, sink_arrays)
    return y, *jax.tree.leaves(pull(grad))


compiled = jax.jit(forward_and_gradients, static_argnums=(0, 1, 2))


def assert_close(actual, expected, rounding):
    for actual_array, expected_array in zip(actual, expected, strict=True):
        assert actual_array.dtype == expected_array.dtype
        expected_array = np.asarray(expected_array, np.float64)
        assert np.isfinite(expected_array).all()
        atol = 16 * rounding * np.abs(expected_array).max()
        np.testing.assert_allclose(
            np.asarray(actual_array, np.float64), expected_array, rtol=0, atol=atol
        )


SPLASH_SCORES = Scores(scale=0.3, softcap=0.7, window=5, sinks=True)


@pytest.mark.usefixtures('plain_operations')
@pytest.mark.parametrize(
    ('name', 'length', 'scores', 'segmented', 'dtype'),
    [
        pytest.param('cudnn', 8, PLAIN, False, 'float32', marks=pytest.mark.full),
        ('cudnn', 9, Scores(scale=0.3, window=3), True, 'float32'),
        pytest.param('cudnn', 12, Scores(window=1), False, 'float32', marks=pytest.mark.full),
        pytest.param('cudnn', 32, Scores(window=20), True, 'bfloat16', marks=pytest.mark.full),
        pytest.param('splash', 128, PLAIN, False, 'float32', marks=pytest.mark.full),
        ('splash', 100, SPLASH_SCORES, True, 'float32'),
        # a window across blocks
        pytest.param('splash', 256, Scores(window=200), True, 'bfloat16', marks=pytest.mark.full),
        pytest.param('splash', 2048, PLAIN, True, 'float32', marks=pytest.mark.full),  # of 1,024
        # nine blocks: a separate kernel computes the gradient of queries
        pytest.param('splash', 1152, PLAIN, True, 'float32', marks=pytest.mark.full),
    ],
    ids=str,
)
def test_fused_attention_matches_reference(name, length, scores, segmented, dtype):
    """Forward and gradient, in documents and grouped heads; 9 and 100 are padded. Catches a window
    off by one, missing documents or scale, visible padding, heads that share wrongly.
    """
    arrays = draw(length, dtype=dtype)
    ours = compiled(name, scores, segmented, *arrays)
    assert ours[0].shape == arrays[0].shape
    assert_close(ours, compiled('reference', scores, segmented, *arrays), ROUNDING[dtype])


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
def test_splash_uses_requested_blocks():
    """Reference: different sizes for queries and keys. Property: the program has these sizes, and
    the share of computed pairs follows from them. Catches a single size for both, and ignored
    options.
    """
    requested = {'splash_block_q': 128, 'splash_block_kv': 256, 'splash_block_kv_compute': 128}
    arrays = draw(512, batch=1)
    run = jax.jit(functools.partial(forward_and_gradients, 'splash', PLAIN, True, **requested))
    expected = compiled('reference', PLAIN, True, *arrays)
    assert_close(run(*arrays), expected, ROUNDING['float32'])
    sizes = kernel_block_sizes(select_block_sizes(512, requested=BlockSizes(**requested)), 512)
    assert [sizes[f'block_{name}'] for name in ('q', 'kv', 'kv_compute')] == [128, 256, 128]
    assert computed_share(512, None, requested=BlockSizes(**requested)) == 6 / 8
    assert computed_share(512, 129, requested=BlockSizes(**requested)) == 5 / 8
    assert select_block_sizes(640, requested=BlockSizes(**requested)) == (
        128,
        128,
        128,
    )  # rows that 256 does not divide


@pytest.mark.default_rows('cudnn')
@pytest.mark.usefixtures('plain_operations')
@pytest.mark.parametrize('name', ['cudnn', 'splash'])
def test_is_full_turns_window_off(name):
    """`is_full` is a traced scalar, as the layers of a scan differ; padded rows and documents."""
    q, k, v, _, segments, _ = draw(9)

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, is_full):
        return attend(name, q, k, v, Scores(window=3), segments, is_full=is_full)

    full, narrow = (run(name, is_full) for is_full in (True, False))
    assert_close([full, narrow], [run('reference', True), run('reference', False)], 2**-23)
    assert np.abs(full - narrow).max() > 0.1


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
@pytest.mark.parametrize('batch', [4, 3])
def test_splash_shards_batch(batch):
    """2 x 4 devices agree with one device, in the gradient of shared arrays too; three rows do not
    divide. Catches a gradient of sinks from one device only, or counted twice over `run`.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    arrays, scores = draw(128, batch=batch), Scores(sinks=True, window=9)
    rows = batch_sharding(mesh) if batch == 4 else replicated_sharding(mesh)
    run = trace_on_mesh(mesh, functools.partial(forward_and_gradients, 'splash', scores, True))
    sharded = jax.jit(run, in_shardings=(*[rows] * 5, replicated_sharding(mesh)))
    assert_close(sharded(*arrays), compiled('reference', scores, True, *arrays), 2**-23)
    text = sharded.lower(*arrays).as_text()
    heads, local_rows = 4, 1 if batch == 4 else 3
    assert f'tensor<{local_rows}x{heads}x128x8xf32>' in text


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
@pytest.mark.parametrize(
    ('sizes', 'length', 'scores'),
    [
        ({'data': 2, 'context': 2, 'tensor': 2}, 512, PLAIN),
        ({'data': 2, 'context': 4}, 1024, Scores(softcap=0.7, window=300, sinks=True)),
    ],
)
def test_splash_shards_tokens(sizes, length, scores):
    """Each device has queries of two pieces and all keys; documents extend over pieces. Catches
    queries that are computed at another position, and outputs that are not sent back.
    """
    mesh = make_mesh(MeshConfig(**sizes))
    arrays, n = draw(length), sizes['context']
    run = trace_on_mesh(mesh, functools.partial(forward_and_gradients, 'splash', scores, True))
    spec = PartitionSpec('data', 'tensor', 'context')
    sharded = jax.jit(
        run,
        in_shardings=(
            *[NamedSharding(mesh, spec)] * 4,
            NamedSharding(mesh, PartitionSpec('data')),
            replicated_sharding(mesh),
        ),
    )
    assert_close(sharded(*arrays), compiled('reference', scores, True, *arrays), 2**-23)
    heads = 4 // sizes.get('tensor', 1)
    assert f'tensor<1x{heads}x{length // n}x8xf32>' in sharded.lower(*arrays).as_text()


@pytest.mark.parametrize('parts', [2, 3, 4, 8])
def test_device_queries_balance_keys(parts):
    """Every query occurs once; an early piece is paired with a late one."""
    positions = device_queries(12 * parts, parts)
    assert sorted(positions.ravel()) == list(range(12 * parts))
    assert len({int(device_positions.sum()) for device_positions in positions}) == 1


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('splash', r'a multiple of 512; got 768\. Nearest that works: 1024'),
        ('cudnn', r'attention=cudnn needs whole rows. Choose .*=blocked.reference.splash'),
    ],
)
def test_unsupported_row_sharding_is_rejected(name, words, monkeypatch):
    changes = {'kernels.attention': name, 'data.seq_len': 768, 'mesh.context': 2}
    config = tiny_config(changes | {'data.batch_size': 8})
    mesh, home = make_mesh(config.mesh), ATTENTION_KERNELS[name].platforms[0]
    monkeypatch.setattr(
        'lm.devices.check_mesh.select_kernels', lambda config, platform: kernels_for(home, name)
    )
    with pytest.raises(ValueError, match=words):
        check_devices(config, mesh)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            {'kernels.attention': 'cudnn', 'model.dtype': 'float32'},
            r'model.dtype=float32 \(only bf',
        ),
        ({'kernels.implementation': 'cudnn', 'attention.softcap': 30.0}, r'cudnn .*softcap=30.0'),
        ({'kernels.attention': 'cudnn', 'attention.sinks': 'learned'}, r'sinks=True. .*splash'),
        (
            {'kernels.attention': 'cudnn', 'model.d_model': 8},
            r'width 4 \(only 8 to 256 in steps of 8\)',
        ),
        ({'kernels.attention': 'cudnn', 'model.d_model': 528}, r'heads of width 264'),
        ({'kernels.attention': 'splash', 'model.d_model': 528}, r'of width 264 .*: blocked, ref'),
        ({'kernels.attention': 'splash', 'model.attention': 'l2'}, r'key_bias=True. .*reference'),
        (
            {'data.seq_len': 1024, 'kernels.attention': 'splash', 'kernels.splash_block_q': 192},
            r'splash_block_q must .* 128 that divides data.seq_len, 1024; got 192. .* 128, 256, 5',
        ),
        (
            {
                'data.seq_len': 1024,
                'kernels.attention': 'splash',
                'kernels.splash_block_kv': 256,
                'kernels.splash_block_kv_compute': 512,
            },
            r'_compute must .* that divides kernels.splash_block_kv, 256; got 512. .* of 128, 256,',
        ),
        (
            {
                'data.seq_len': 4096,
                'kernels.attention': 'splash',
                'attention.window': 512,
                'kernels.splash_block_kv_compute': 1024,
            },
            r'_compute must .* that divides kernels.splash_block_kv, 512; got 1024',
        ),
    ],
    ids=str,
)
def test_unsupported_config_is_rejected(changes, words):
    """The error gives name and alternatives, before a model is built."""
    with pytest.raises(ValueError, match=words):
        check(tiny_config({'model.dtype': 'bfloat16'} | changes))


@pytest.mark.parametrize('field', ['slopes', 'key_bias'])
def test_splash_rejects_unsupported_scores(field):
    """It rejects a type that TPUs lack, too. The kernel itself checks too, without a checked
    config.
    """
    with pytest.raises(
        ValueError, match=f'splash does not support {field}=True. .*do: blocked, reference.$'
    ):
        check_scores('splash', Scores(**{field: True}))
    q = jax.ShapeDtypeStruct((1, 2, 128, 8), 'float64')
    with pytest.raises(ValueError, match=r'splash does not support model.dtype=float64 \(only bf'):
        attend('splash', q, q, q, PLAIN)


@pytest.mark.parametrize(('name', 'platform'), [('cudnn', 'gpu'), ('splash', 'tpu')])
def test_fused_kernel_rejects_other_platforms(name, platform):
    """Chosen directly or by the implementation: an error on other platforms."""
    assert kernels_for(platform, name) == kernels_for(platform, attention=name)
    for chosen in ({'implementation': name}, {'attention': name}):
        words = f'kernels.attention={name} runs only on {platform}, .* cpu. Choose auto, or blocked'
        with pytest.raises(ValueError, match=words):
            kernels_for('cpu', **chosen)
    assert kernels_for('cpu', name, attention='reference').kernel_name('attention') == 'reference'


BFLOAT16 = {'model.dtype': 'bfloat16', 'model.d_model': 32}
REASONS = {
    ('cudnn', 'model.dtype=float32 (only'): {'model.dtype': 'float32'},
    ('cudnn', 'heads of width 4 (only'): {'model.d_model': 8},
    ('splash', 'slopes=True'): {'model.position': 'alibi'},
    ('splash', 'prefix=True'): {'data.objective': 'prefix'},
    ('splash', 'no forward-mode derivative of the logits, which'): {'optim.ghost_radius': 1.0},
    ('cudnn', 'needs whole rows; got mesh.context=2'): {'mesh.context': 2},
    ('splash', 'must be a multiple of 512; got 8'): {'mesh.context': 2},
}


@pytest.mark.parametrize(('name', 'platform'), [('cudnn', 'gpu'), ('splash', 'tpu')])
def test_auto_selects_supported_fused_kernel(name, platform):
    """Otherwise the portable kernel, with the reason. Explicit choices stay."""
    kernels = select_kernels(tiny_config(BFLOAT16), platform)
    assert kernels.kernel_name('attention') == name
    assert select_kernels(tiny_config(BFLOAT16), 'cpu').kernel_name('attention') == 'blocked'
    for (kernel, words), changes in REASONS.items():
        if kernel == name:
            config = tiny_config(BFLOAT16 | changes)
            fused, reason = select_fused_attention(config, platform)
            assert (fused, words in reason) == ('', True), (words, reason)
            assert select_kernels(config, platform).kernel_name('attention') == 'blocked'
    for choice in ({'kernels.attention': 'reference'}, {'kernels.implementation': 'reference'}):
        config = tiny_config(BFLOAT16 | choice)
        assert select_fused_attention(config, platform) == ('', '')
        assert select_kernels(config, platform).kernel_name('attention') == 'reference'
    assert select_fused_attention(tiny_config({'model.attention': 'linear'}), platform) == ('', '')


def test_auto_selects_fused_loss_on_gpus():
    config = tiny_config(BFLOAT16)
    assert [
        select_kernels(config, platform).kernel_name('cross_entropy')
        for platform in ('gpu', 'tpu', 'cpu')
    ] == ['pallas', 'reference', 'reference']
    for changes in (
        {'kernels.cross_entropy': 'reference'},
        {'kernels.implementation': 'xla'},
        {'loss.name': 'focal'},
        {'mesh.tensor': 2},
        {'mesh.tensor': -1},
        {'optim.ghost_radius': 0.1},
    ):
        kernels = select_kernels(tiny_config(BFLOAT16 | changes), 'gpu')
        assert kernels.kernel_name('cross_entropy') == 'reference', changes


def test_loading_replaces_unavailable_kernels():
    """The platform's own kernels replace them, with a message; kernels that run stay."""
    chosen = {'kernels.attention': 'splash', 'kernels.splash_block_q': 128}
    messages, config = [], tiny_config(chosen | {'kernels.matmul': 'direct'})
    replaced = replace_kernels('cpu', config, messages.append)
    # No option of the replaced kernels is left, which folding would reject.
    assert resolve_config(replaced.config) == replaced
    assert {operation: part.name for operation, part in replaced.kernels.items()} == {
        'matmul': 'direct'
    }
    assert replaced.implementation is None
    assert len(messages) == 1 and re.match('kernels.attention=splash runs only on tpu', messages[0])
    assert replace_kernels('tpu', config, messages.append) is config
    assert len(messages) == 1


@pytest.mark.default_rows('cudnn')
@pytest.mark.parametrize('name', ['blocked', 'cudnn', 'splash'])
def test_remat_keeps_attention_outputs(monkeypatch, name):
    """Counts loops and calls in the traced gradient: remat adds none."""
    versions = 'jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version'
    monkeypatch.setattr(versions, lambda: 91000)
    q, k, v, *_ = draw(2048, dtype='bfloat16', batch=1)

    def count_calls(policy):
        def loss(q):  # a product with weights on either side, as in a block
            weights = jnp.eye(8, dtype=q.dtype)
            return jnp.sum(attend(name, q @ weights, k, v, PLAIN) @ weights)

        rematerialized = (
            loss if policy == 'none' else jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
        )
        text = str(jax.make_jaxpr(jax.grad(rematerialized))(q))
        return len(re.findall(r'while\[|pallas_call\[|dot_product_attention_(?:fwd|bwd)', text))

    assert 0 < count_calls('dots') == count_calls('none') < count_calls('full')
    assert all(
        count_calls(name) == count_calls('none') for name in ('mlp', 'attention', 'attended')
    )


@pytest.mark.parametrize('mask_documents', [True, False])
def test_gpu_step_calls_cudnn(monkeypatch, mask_documents):
    """Lowered without a GPU: the forward and the backward call, causal, with the window, and with a
    mask only if documents are separated. What cuDNN then computes is not tested here.
    """
    versions = 'jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version'
    monkeypatch.setattr(versions, lambda: 91000)  # of the library, which is not installed
    changes = {'model.dtype': 'bfloat16', 'data.mask_documents': mask_documents}
    config = tiny_config(changes | {'kernels.implementation': 'cudnn', 'attention.window': 3})
    check(config)
    learner = build_learner(config, VOCAB, BOS, 'gpu')
    hyper = jax.eval_shape(lambda: make_hyper(config))
    traced = jax.jit(make_train_step(learner)).trace(
        state_layout(learner)[0], batch_shapes(config), hyper
    )
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    calls = set(re.findall(r'@__cudnn\$(\w+)', text))
    forward = 'fmhaScaleBiasSoftmax' if mask_documents else 'fmhaSoftmax'
    assert calls == {forward, f'{forward}Backward'}
    options = text.replace(r'\22', '')  # quotation marks
    assert 'mask_type: CAUSAL' in options
    assert 'sliding_window_length: 3' in options
