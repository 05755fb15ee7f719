"""Property: trainings that the hosts would refuse are refused at the launch, before any command of
a cloud runs; others pass.
"""

from pathlib import Path

import pytest

from lm.launch.command import ConfigParser
from lm.launch.exit_status import BAD_INPUT, DONE
from tpu import launch
from tpu.check_training import check_training, placeholder_devices
from tpu.launchers import ray, slurm, xpk
from tpu.launchers.base import Chips

ROOT = Path(__file__).parents[2]
V6E_16 = Chips('v6e-16')
FLAGS = ['--engine=gcloud', '--zone=z', '--accelerator_type=v6e-16', '--runtime_version=r']
TRAIN = ['train.py', '--config=configs/default.py', '--workdir=/shared/run']


def check(chips=V6E_16, sweep=None, tune=None, **changes) -> str:
    config = ConfigParser('config').parse(str(ROOT / 'configs' / 'default.py'))
    paths = {name.replace('_', '.', 1): value for name, value in changes.items()}
    with config.unlocked():
        for path, value in {'data.batch_size': 64, **paths}.items():
            section, name = path.split('.')
            config[section][name] = value
    return check_training(config.to_dict() | {'sweep': sweep, 'tune': tune}, paths, chips)


@pytest.mark.parametrize(
    ('chips', 'changes'),
    [
        (V6E_16, {}),
        (V6E_16, {'mesh_fsdp': 16}),
        (V6E_16, {'mesh_axes': 'auto', 'data_batch_size': 8}),  # the hosts choose
        (V6E_16, {'sweep': {'train.seed': (0, 1)}, 'data_batch_size': 8}),  # a cell has one host
        (V6E_16, {'sweep': {'optim.name': ('adamw', 'lion')}, 'tune': {'optim.lr': 1e-3}}),
        (Chips('v6e-16', slices=2), {'mesh_data': 2, 'mesh_fsdp': 16}),
        (Chips(), {'mesh_fsdp': 3, 'model_d_model': 96, 'model_n_heads': 4}),  # how many is unknown
        (V6E_16, {'data_source': 'text:/only/hosts/see/*.txt'}),
    ],
)
def test_valid_trainings_pass(chips, changes):
    assert check(chips, **changes) == ''


@pytest.mark.parametrize(
    ('chips', 'changes', 'message'),
    [
        (V6E_16, {'model_norm': 'rmsnrm'}, "Did you mean 'rmsnorm'?"),
        (V6E_16, {'model_n_heads': 3}, 'model.n_heads must divide model.d_model'),
        (V6E_16, {'mesh_fsdp': 3}, 'mesh.fsdp=3 needs 3 devices'),
        (V6E_16, {'mesh_fsdp': 32}, 'mesh.fsdp must be between 1 and 16, the number of devices'),
        (V6E_16, {'mesh_data': 1, 'mesh_fsdp': 8}, 'leaves 8 idle'),
        (V6E_16, {'data_batch_size': 8}, 'data.batch_size must be a multiple of'),
        (
            Chips('v6e-16', slices=4),
            {'mesh_data': 2, 'mesh_fsdp': 32},
            'multiple of the number of slices, 4',
        ),
        (Chips(devices=16), {'mesh_fsdp': 3}, 'mesh.fsdp=3 needs 3 devices'),
        (
            V6E_16,
            {'sweep': {'mesh.fsdp': (1, 32)}},
            'needs 32 devices by its mesh, and there are 16',
        ),
        (V6E_16, {'sweep': {'optim.name': ('adamw', 'loin')}}, "Did you mean 'lion'?"),
        (Chips('v6x-16'), {}, '--accelerator_type must be a kind of TPU and its size'),
        (Chips(f'v6e-{"9" * 400}'), {}, 'Nearest that is offered: v6e-256, which has 256 chips'),
        (Chips(f'v2-{"9" * 400}'), {}, '--accelerator_type must be a kind of TPU and its size'),
        (Chips('v6e-20'), {}, 'Nearest that is offered: v6e-16, which has 16 chips (4x4).'),
    ],
)
def test_invalid_trainings_are_refused(chips, changes, message):
    with pytest.raises(ValueError) as error:
        check(chips, **changes)
    assert message in str(error.value)


def test_hosts_check_remote_init_from():
    """The source's config holds the model, so its parts cannot be checked here."""
    message = check(train_init_from='/shared/runs/base', model_norm='rmsnrm')
    text = 'is not seen from here: the hosts check the config'
    assert message == f'train.init_from=/shared/runs/base {text}\n'
    assert text in check(train_init_from='gs://bucket/runs/base')


@pytest.mark.parametrize(
    ('chips', 'devices', 'slices'),
    [
        (Chips('v6e-16', slices=2), 32, 2),
        (Chips('v5litepod-256'), 256, 1),
        (Chips('v5p-32'), 16, 1),  # TensorCores
        (Chips('v4-8'), 4, 1),
        (Chips('v3-32'), 32, 1),
        (Chips('tpu7x-16'), 16, 1),  # eight chips of two devices
        (Chips('v6e-4x4'), 16, 1),
        (ray.RayOptions(topology='4x4', accelerator_version='v6e', slices=2).chips(), 32, 2),
        (ray.RayOptions(nodes=2, resources='CPU=8,GPU=8').chips(), 16, 1),
        (ray.RayOptions(nodes=2).chips(), 0, 0),
        (slurm.SlurmOptions(nodes=4, submit_flags='--partition=gpu --gres=gpu:8').chips(), 32, 1),
        (slurm.SlurmOptions(nodes=2, submit_flags='--gres=gpu:h100:4').chips(), 8, 1),
        (slurm.SlurmOptions(nodes=2, submit_flags='--gpus-per-node=8').chips(), 16, 1),
        (slurm.SlurmOptions(nodes=2).chips(), 0, 0),
        (xpk.XpkOptions(cluster='c', image='i', accelerator_type='v6e-8', slices=2).chips(), 16, 2),
    ],
)
def test_devices_and_slices_are_counted(chips, devices, slices):
    placeholders = placeholder_devices(chips)
    assert (
        len(placeholders) == devices
        and len({device.slice_index for device in placeholders}) == slices
    )


@pytest.mark.full  # programs that import JAX
@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--config.model.nrm=rmsnorm', "no field model.nrm. Did you mean 'model.norm'?"),
        (
            '--workdri=/shared/run',
            '--workdri is not a flag here. Did you mean --workdir=/shared/run?',
        ),
        ('--config.mesh.fsdp=3', 'mesh.fsdp=3 needs 3 devices'),
    ],
)
def test_invalid_launch_runs_no_cloud_command(flag, message, with_training_check, fake, capsys):
    """Checked with --dry_run and without."""
    cloud = fake('gcloud', describe=['echo ACTIVE'])
    for dry_run in ([], ['--dry_run']):
        train = [*TRAIN, '--config.data.batch_size=64', flag]
        assert launch.main([*FLAGS, *dry_run, '--', *train]) == BAD_INPUT
        stdout, error = capsys.readouterr()
        assert (
            stdout == '' and error == f'error: {error.removeprefix("error: ")}' and message in error
        )
    assert cloud.calls == []


@pytest.mark.full
def test_valid_launch_continues(with_training_check, capsys):
    """Flags of train.py that do not belong to the config are accepted too."""
    flags = ['--config.data.batch_size=64', '--continue_changed', '--track=mlflow']
    assert launch.main([*FLAGS, '--dry_run', '--', *TRAIN, *flags]) == DONE
    captured = capsys.readouterr()
    assert 'queued-resources create' in captured.out and captured.err == ''


def test_checks_run_on_hosts_without_local_jax(with_training_check, monkeypatch, capsys):
    monkeypatch.setattr(launch.base.importlib.util, 'find_spec', lambda name: None)
    assert launch.main([*FLAGS, '--dry_run', '--', *TRAIN, '--config.model.nrm=x']) == DONE
    assert 'JAX is not installed here' in capsys.readouterr().err
