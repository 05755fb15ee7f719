"""Bugs made by hand in what many devices need: meshes, kernels, plans, buckets, launchers."""

from tests.bugs.bug import Bug

PODS = {
    # Meshes.
    'an axis cut over what is taken': Bug(
        'modules/parallel/axes.py',
        '        free -= set(over)\n',
        '',
        'tests/lm/devices/test_mesh.py',
    ),
    'an axis cut unevenly': Bug(
        'modules/parallel/axes.py',
        'length % (n * size) == 0',
        'length % size == 0',
        'tests/lm/devices/test_mesh.py',
    ),
    'slices crossed by runs': Bug(
        'lm/devices/mesh.py',
        'across = [len(slices) if i == data',
        'across = [len(slices) if i == 0',
        'tests/lm/devices/test_mesh.py -k slices',
    ),
    'every host reads the first rows': Bug(
        'lm/devices/mesh.py',
        'return own[0] // len(own), len(by_part) // len(own)',
        'return 0, len(by_part) // len(own)',
        'tests/lm/devices/test_mesh.py -k hosts',
    ),
    'few axes make a matrix small': Bug(
        'lm/devices/mesh.py',
        'for axis in spec.axes) < 2:',
        'for axis in spec.axes) < 3:',
        'tests/lm/devices/test_mesh.py',
    ),
    "heads cut where their keys' are not": Bug(
        'modules/parallel/kernel_calls.py',
        'whole |= set(axes) if found else set()',
        'pass',
        'tests/modules/test_parallel.py',
    ),
    'runs not laid over devices first': Bug(
        'lm/devices/mesh.py',
        "PartitionSpec('run', *sharding.spec)",
        'PartitionSpec(None, *sharding.spec)',
        'tests/lm/devices/test_run_axis.py',
    ),
    # Kernels.
    'a class beyond the last': Bug(
        'modules/kernels/cross_entropy/tpu.py',
        'x = jnp.where(column < width, x, -jnp.inf)',
        'x = jnp.where(column <= width, x, -jnp.inf)',
        'tests/modules/test_cross_entropy_kernels.py',
    ),
    'a gradient of rows beyond the last': Bug(
        'modules/kernels/rms_norm/tpu.py',
        'jnp.where(row < rows, g * normal, 0.0)',
        'g * normal',
        'tests/modules/test_rms_norm_kernels.py',
    ),
    'powers of two that end too early': Bug(
        'modules/kernels/common/exponentials.py',
        'jnp.clip(n, -127.0, 0.0)',
        'jnp.clip(n, -63.0, 0.0)',
        'tests/modules/test_exponentials.py tests/modules/test_softmax_kernels.py',
    ),
    'sums of devices without their largest': Bug(
        'modules/kernels/common/exponentials.py',
        'terms = (mantissa * form.power(exponent - most) for',
        'terms = (mantissa for',
        'tests/modules/test_exponentials.py',
    ),
    'queries dealt in order': Bug(
        'modules/kernels/attention/splash.py',
        'np.stack([pieces[:, 0], pieces[::-1, 1]], 1)',
        'np.stack([pieces[:, 0], pieces[:, 1]], 1)',
        'tests/modules/test_fused_attention.py tests/modules/test_attention_kernels.py',
    ),
    'a window that sees one token more': Bug(
        'modules/kernels/attention/splash.py',
        '(scores.window - 1, 0), 0)',
        '(scores.window, 0), 0)',
        'tests/modules/test_fused_attention.py tests/modules/test_attention_kernels.py',
    ),
    # Optimizers of matrices, whose shape counts.
    'muon_scale=rms by fan_in alone': Bug(
        'modules/optim/muon.py',
        'ADAMW_RMS * math.sqrt(max(fan_in, fan_out))',
        'ADAMW_RMS * math.sqrt(fan_in)',
        'tests/modules/test_optim_muon.py',
    ),
    # Plans.
    'a scatter is as long as a gather': Bug(
        'tpu/collectives.py',
        'return size * (n - 1)\n',
        'return size * (n - 1) / n\n',
        'tests/tpu/test_collectives.py',
    ),
    'a line is as fast as a ring': Bug(
        'tpu/collectives.py',
        '(2 if ring else 1) / apart',
        '2 / apart',
        'tests/tpu/test_collectives.py',
    ),
    'a permutation the long way around': Bug(
        'tpu/collectives.py',
        'abs(way) > length / 2',
        'abs(way) > length',
        'tests/tpu/test_collectives.py',
    ),
    'a product counted once': Bug(
        'tpu/cost.py',
        'return 2.0 * one.arrays[0].size * math.prod(shape[i] for i in contracted)',
        'return 1.0 * one.arrays[0].size * math.prod(shape[i] for i in contracted)',
        'tests/tpu/test_hlo.py',
    ),
    'what a fusion returns of its operands, counted as written': Bug(
        'tpu/cost.py',
        "if one.opcode == 'fusion-start' and inner is not None:",
        'if False:',
        'tests/tpu/test_hlo.py',
    ),
    'attention charged by blocks and by the mask': Bug(
        'tpu/cost.py',
        'phase, share_computed(LENGTH, None)',
        'phase, CAUSAL',
        'tests/tpu/test_rates.py',
    ),
    'a bound at what products reach': Bug(
        'tpu/cost.py',
        'for n in (at_peak, flops))',
        'for n in (at_peak, at_peak))',
        'tests/tpu/test_rates.py',
    ),
    'columns that fill a tile for nothing': Bug(
        'tpu/rates.py',
        'for n in (contracted, columns))',
        'for n in (contracted,))',
        'tests/tpu/test_rates.py',
    ),
    'the first limit of a loop for all': Bug(
        'tpu/hlo.py',
        'rounds() or [here]',
        '[*rounds(), here][:1]',
        'tests/tpu/test_hlo.py',
    ),
    'a slice read as the whole': Bug(
        'tpu/cost.py',
        'if user.opcode in SLICES and user.operands[0] == name:',
        'if False:',
        'tests/tpu/test_hlo.py',
    ),
    'a nested fusion that is not read': Bug(
        'tpu/cost.py',
        'total = beyond() if inner[name].is_root else 0.0',
        'total = 0.0',
        'tests/tpu/test_hlo.py',
    ),
    'what does not fit is first': Bug(
        'tpu/trials.py',
        'return math.inf, trial.needed or math.inf',
        'return 0.0, trial.needed or math.inf',
        'tests/tpu/test_trials.py',
    ),
    'runs at once of one group': Bug(
        'tpu/sweep_plan.py',
        '            left -= used\n',
        '',
        'tests/tpu/test_trials.py',
    ),
    # Buckets and launchers.
    'one folder for all endpoints': Bug(
        'lm/storage/buckets.py',
        "f'{endpoint} {scheme}://",
        "f'{scheme}://",
        'tests/lm/storage/test_buckets.py',
    ),
    'a condition of a write that holds always': Bug(
        'lm/storage/buckets.py',
        'name, content, mode=how)',
        'name, content)',
        'tests/lm/storage/test_buckets.py',
    ),
    'the end of a large object': Bug(
        'lm/storage/buckets.py',
        'part = start, min(start + RANGE_BYTES, stored.size)',
        'part = start, min(start + RANGE_BYTES - 1, stored.size)',
        'tests/lm/storage/test_buckets.py',
    ),
    'a job that SLURM killed has failed': Bug(
        'tpu/launchers/slurm.py',
        'return SIGNALLED + int(number) if int(number or 0) else RESUME',
        'return SIGNALLED + int(number or 0)',
        'tests/tpu/test_launch_slurm.py',
    ),
    'a slice that is kept after bad input': Bug(
        'tpu/launchers/gcloud.py',
        '        elif self.created:\n',
        '        elif self.created and 1 not in self.statuses:\n',
        'tests/tpu/test_launch_gcloud.py',
    ),
    'a mesh over the chips of one slice of several': Bug(
        'tpu/check_training.py',
        'devices_of_slices(chips.accelerator, chips.flag) * chips.slices',
        'devices_of_slices(chips.accelerator, chips.flag)',
        'tests/tpu/test_check_training.py',
    ),
    'TensorCores counted as devices': Bug(
        'tpu/chips.py',
        'return chips_of(shape) * TPUS[kind].devices_a_chip',
        'return chips_of(shape) * TPUS[kind].cores',
        'tests/tpu/test_check_training.py',
    ),
    'a stopped job queues itself again': Bug(
        'tpu/launchers/slurm.py',
        '        base.run(hold)\n',
        '',
        'tests/tpu/test_launch_slurm.py',
    ),
}
