"""Bugs made by hand in modules/, one line each (`tests.bugs`)."""

from typing import NamedTuple


class Bug(NamedTuple):
    """In `file`, the text `right` becomes `wrong`; `tests` are arguments of pytest."""

    file: str
    right: str
    wrong: str
    tests: str


BUGS_IN_MODULES = {
    'rms of a sum': Bug(
        'modules/norms/rmsnorm.py',
        'jnp.mean(x**2, -1, keepdims=True) + eps)',
        'jnp.sum(x**2, -1, keepdims=True) + eps)',
        'tests/modules/test_norms.py -k "rmsnorm and forward"',
    ),
    'variance of what is not centred': Bug(
        'modules/norms/layernorm.py',
        'centred * jax.lax.rsqrt(jnp.mean(centred**2',
        'centred * jax.lax.rsqrt(jnp.mean(x**2',
        'tests/modules/test_norms.py -k "layernorm and forward"',
    ),
    'running averages kept, not moved': Bug(
        'modules/norms/batchnorm.py',
        'mean.value = mean.value + self.momentum * (seen_mean - mean.value)\n'
        '                variance.value',
        'mean.value = seen_mean + self.momentum * (mean.value - seen_mean)\n'
        '                variance.value',
        'tests/modules/test_norms.py -k "batchnorm and forward"',
    ),
    "PowerNorm's gradient without its estimate": Bug(
        'modules/norms/running.py',
        'h = g - (1 - ema_decay) * along(running_gz, g) * z',
        'h = g',
        'tests/modules/test_running_norms.py -k power',
    ),
    'outliers of the biased variance': Bug(
        'modules/norms/running.py',
        'jnp.var(jnp.sqrt(window), ddof=1)',
        'jnp.var(jnp.sqrt(window))',
        'tests/modules/test_running_norms.py -k outliers',
    ),
    'a gate without its sigmoid': Bug(
        'modules/norms/rmsnorm.py',
        '(y * nn.sigmoid(gate))',
        '(y * gate)',
        'tests/modules/test_norms.py -k "gated and forward"',
    ),
    'mix rounds up': Bug(
        'modules/placements.py',
        'first = math.floor(mix_fraction * blocks + 1e-9)',
        'first = math.ceil(mix_fraction * blocks)',
        'tests/modules/test_placements.py',
    ),
    'a bias that experts share': Bug(
        'modules/products.py',
        "zeros = declare(nn.initializers.zeros, 'vector', (*axes[:n_batch], *axes[after:]))",
        "zeros = declare(nn.initializers.ones, 'vector', (*axes[:n_batch], *axes[after:]))",
        'tests/modules/test_products.py tests/modules/test_mlp.py',
    ),
    'a window one token wider': Bug(
        'modules/kernels/attention/reference.py',
        'within = back < window if',
        'within = back <= window if',
        'tests/modules/test_attention_kernels.py -k scores',
    ),
    'a kernel that refuses nothing': Bug(
        'modules/kernels/attention/__init__.py',
        '    if lacking:\n',
        '    if lacking and False:\n',
        'tests/modules/test_attention_kernels.py',
    ),
    'columns of two slices of a row count twice': Bug(
        'modules/kernels/gpu_rows.py',
        'return jnp.where(self.columns(part) >= part.fresh, values, otherwise)',
        'return values',
        'tests/modules/test_gpu_kernels.py -k rms_norm_of',
    ),
    'sums of threads that are not scaled to one exponent': Bug(
        'modules/kernels/gpu_rows.py',
        'jnp.sum(mantissa * form.power(exponent - most))',
        'jnp.sum(mantissa)',
        'tests/modules/test_gpu_kernels.py -k softmax_is',
    ),
    'padding takes experts': Bug(
        'modules/mlp.py',
        'mask_ME = mask_ME * valid_M1',
        'mask_ME = mask_ME',
        'tests/modules/test_mlp.py',
    ),
    'a chain of one link': Bug(
        'modules/reparam/__init__.py',
        'made = chain(made, REPARAMS[name]',
        'made = chain(made, REPARAMS["none"]',
        'tests/modules/test_reparam.py',
    ),
    'tokens without weight count': Bug(
        'modules/losses/base.py',
        'jnp.sum(weights.reshape(-1) * term)',
        'jnp.sum(term)',
        'tests/contracts/test_losses.py',
    ),
    'a warm-up that starts at 0': Bug(
        'modules/optim/schedules.py',
        '(step + 1) / jnp.maximum(warmup_steps, 1.0)',
        'step / jnp.maximum(warmup_steps, 1.0)',
        'tests/modules/test_optim.py',
    ),
    'a partition with labels swapped': Bug(
        'modules/optim/base.py',
        "spec.role if spec.role in roles else 'others'",
        "spec.role if spec.role in ('vector',) and 'vector' in roles else 'others'",
        'tests/modules/test_optim.py',
    ),
    'vectors decay': Bug(
        'modules/scaling/parametrization.py',
        'decays = spec.decayed',
        'decays = True',
        'tests/modules/test_scaling.py tests/lm/test_step.py -k "decay or standard or asks"',
    ),
    'a shift that folding loses': Bug(
        'modules/norms/fold.py',
        'bias_O = added_O if bias_O is None else added_O + bias_O',
        'bias_O = added_O if bias_O is None else bias_O',
        'tests/modules/test_fold.py',
    ),
    'a maximum that tiles do not carry on': Bug(
        'modules/kernels/attention/blocked.py',
        'weights, kept = jnp.exp(logits - new), jnp.exp(largest - new)',
        'weights, kept = jnp.exp(logits - new), jnp.ones_like(new)',
        'tests/modules/test_attention_kernels.py -k tiles',
    ),
    'a softcap without its slope': Bug(
        'modules/kernels/attention/blocked.py',
        'grad_scores = grad_logits if slope is None else slope * grad_logits',
        'grad_scores = grad_logits',
        'tests/modules/test_attention_kernels.py -k equations',
    ),
    'positions that begin again in each part': Bug(
        'modules/sequence.py',
        'positions_BT = start_B[:, None] + column_1T',
        'positions_BT = 0 * start_B[:, None] + column_1T',
        'tests/modules/test_attention.py -k parts',
    ),
    'a temperature on the products alone': Bug(
        'modules/attention/softmax.py',
        'bias_BKS = bias_BNS * jnp.broadcast_to(temperature_N[None, :, None], bias_BNS.shape)',
        'bias_BKS = bias_BNS',
        'tests/modules/test_attention.py -k equation',
    ),
    'the mean of values over all tokens before': Bug(
        'modules/attention/affine.py',
        'narrow_BT = jnp.maximum(start_BT, place_BT - window + 1)',
        'narrow_BT = jnp.maximum(start_BT, place_BT - window)',
        'tests/modules/test_attention.py -k affine',
    ),
    'a state of the document before': Bug(
        'modules/kernels/linear_attention/chunked.py',
        'goes_on_BT = (start_BT < first).astype(v_BKTH.dtype)',
        'goes_on_BT = jnp.ones_like(start_BT).astype(v_BKTH.dtype)',
        'tests/modules/test_linear_attention_kernels.py',
    ),
    'vectors of the power iteration are not kept': Bug(
        'modules/reparam/spectral.py',
        "return stored['matrix'] * per_matrix(stored['gain'] / largest, spec), u",
        "return stored['matrix'] * per_matrix(stored['gain'] / largest, spec), 0 * u + 1",
        'tests/modules/test_reparam_spectral.py',
    ),
    'no gradient through sigma': Bug(
        'modules/spectrum.py',
        "back = _product('...io,...i->...o', matrices, v)\n    return jnp.sum",
        "back = _product('...io,...i->...o', fixed, v)\n    return jnp.sum",
        'tests/modules/test_reparam_spectral.py',
    ),
    'slopes of heads in another order': Bug(
        'modules/positions.py',
        'slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]',
        'slopes = [2.0 ** (-8 * n / power) for n in range(power, 0, -1)]',
        'tests/modules/test_positions.py',
    ),
    'filled-up tokens that count': Bug(
        'modules/losses/chunked.py',
        'jnp.pad(array, widths)',
        "jnp.pad(array, widths, mode='edge')",
        'tests/modules/test_chunked_losses.py -k equal_all',
    ),
    "the objective's gradient for every term": Bug(
        'modules/losses/chunked.py',
        '    if asked:\n',
        '    if asked and own is None and not cotangents:\n',
        'tests/modules/test_chunked_losses.py -k every_term',
    ),
    'rounds of as many tokens on a device as on all': Bug(
        'modules/losses/chunked.py',
        'own = max(1, chunk // pieces_of(over))',
        'own = chunk',
        'tests/modules/test_chunks_on_devices.py -k between',
    ),
    "a readout's gradient of some devices": Bug(
        'modules/losses/devices.py',
        'return jax.lax.psum(own, rest)',
        'return own',
        'tests/modules/test_chunks_on_devices.py -k is_the_loss',
    ),
    "a readout's gradient that is summed as products take it": Bug(
        'modules/losses/chunked.py',
        'lambda leaf, dtype: leaf.astype(dtype)',
        'lambda leaf, dtype: leaf',
        'tests/modules/test_chunks_on_devices.py -k narrow',
    ),
    'a readout that is gathered as it is stored': Bug(
        'modules/losses/devices.py',
        'narrow = readout.weight_DV.astype(readout.dtype)',
        'narrow = readout.weight_DV',
        'tests/modules/test_chunks_on_devices.py -k narrow',
    ),
    'a table that is gathered along its other side': Bug(
        'modules/losses/devices.py',
        'if not readout.is_table:',
        'if True:',
        'tests/modules/test_chunks_on_devices.py -k between',
    ),
    'coverage of a part of a row': Bug(
        'modules/losses/devices.py',
        "or (whole_rows and 'context' in wanted)",
        '',
        'tests/modules/test_chunks_on_devices.py -k left_to_xla',
    ),
    'generalised cross-entropy the other way': Bug(
        'modules/losses/comp_sum.py',
        'power_M = (1 - tau) * ce_M',
        'power_M = (tau - 1) * ce_M',
        'tests/modules/test_losses.py -k comp_sum',
    ),
    'one size for the updates of all layers': Bug(
        'modules/params.py',
        'if i not in batch_axes(spec)',
        'if True',
        'tests/lm/test_optimizers.py -k size_of_updates',
    ),
    'draws that are not divided by their chance': Bug(
        'modules/kernels/matmul/wta_crs.py',
        'jnp.where(chance_K > 0, ends_M[-1] /',
        'jnp.where(chance_K > 0, 1.0 /',
        'tests/modules/test_wta_crs.py -k unbiased',
    ),
    'a set of rows for each product of an input': Bug(
        'modules/products.py',
        '    if isinstance(x, jax.Array):\n',
        '    x = x.x if isinstance(x, Input) else x\n    if isinstance(x, jax.Array):\n',
        'tests/modules/test_wta_crs.py -k "kept_for_the or keys_move"',
    ),
}
