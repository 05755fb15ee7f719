"""Reference: published peaks by the kind of device, and measured ones in the type of the step."""

from types import SimpleNamespace

import jax
import pytest

from lm.training import peaks
from lm.training.peaks import measure_gemm_flops, peak_flops, published_peak

# Names as drivers give them, with TFLOP/s of data sheets: bf16, dense.
KINDS = {
    'NVIDIA H100 80GB HBM3': 989,
    'NVIDIA H100 PCIe': 756.5,
    'NVIDIA H100 NVL': 835.5,
    'NVIDIA H200': 989,
    'NVIDIA H200 NVL': 835.5,
    'NVIDIA H20': 148,
    'NVIDIA GH200 480GB': 989,
    'NVIDIA B200': 2250,
    'NVIDIA B300 SXM6 AC': 2250,
    'NVIDIA GB200': 2500,
    'NVIDIA A100-SXM4-80GB': 312,
    'NVIDIA A100-PCIE-40GB': 312,
    'NVIDIA A10': 125,
    'NVIDIA A40': 149.7,
    'NVIDIA L4': 121,
    'NVIDIA L40': 181,
    'NVIDIA L40S': 362,
    'NVIDIA RTX A6000': 154.8,
    'NVIDIA RTX 6000 Ada Generation': 364.2,
    'NVIDIA GeForce RTX 3090': 71,
    'NVIDIA GeForce RTX 3090 Ti': 80,
    'NVIDIA GeForce RTX 4080 SUPER': 104.4,
    'NVIDIA GeForce RTX 4090': 165.2,
    'NVIDIA GeForce RTX 5090': 209.5,
    'AMD Instinct MI250X': 191.5,
    'AMD Instinct MI300X': 1307.4,
    'AMD Instinct MI325X OAM': 1307.4,
    'AMD Instinct MI355X': 2500,
    'TPU v4': 275,
    'TPU v5 lite': 197,
    'TPU v5': 459,
    'TPU v6 lite': 918,
    'TPU7x': 1153.5,
}
MEASURED = (
    *('cpu', 'NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA H100 80GB HBM3 MIG 1g.10gb'),
    *(
        'Tesla T4',
        'NVIDIA GeForce RTX 4060',
        'NVIDIA A10G',
        'Apple M3',
        'NVIDIA GeForce RTX 4090 D',
    ),
)


def set_device(monkeypatch, kind, platform):
    monkeypatch.setattr(
        jax, 'devices', lambda: [SimpleNamespace(device_kind=kind, platform=platform)]
    )


@pytest.mark.parametrize('kind', KINDS)
def test_published_peaks(kind):
    """Catches a name within another, such as A10 within A100, and numbers of sparse matrices."""
    assert published_peak(kind) == pytest.approx(KINDS[kind] * 1e12)


@pytest.mark.parametrize('kind', MEASURED)
def test_unlisted_peaks_are_measured(kind):
    assert published_peak(kind) is None


@pytest.mark.parametrize(
    ('kind', 'platform', 'dtype', 'peak', 'source'),
    [
        ('NVIDIA H100 PCIe', 'gpu', 'bfloat16', 4 * 756.5e12, '4 x published bf16 peak'),
        ('NVIDIA H100 PCIe', 'gpu', 'float32', 28.0, '4 x measured float32 8192^3 matmul'),
        ('NVIDIA GeForce RTX 4060', 'gpu', 'bfloat16', 20.0, '4 x measured bfloat16 8192^3 matmul'),
        ('TPU v5 lite', 'tpu', 'float32', 4 * 197e12, '4 x published bf16 peak'),
        ('cpu', 'cpu', 'bfloat16', 5.0, 'measured bfloat16 2048^3 matmul'),
        ('cpu', 'cpu', 'float32', 7.0, 'measured float32 2048^3 matmul'),
    ],
)
def test_peak_follows_the_type_in_use(monkeypatch, kind, platform, dtype, peak, source):
    """A device of each kind, replaced by name. The devices of a CPU are one machine."""
    set_device(monkeypatch, kind, platform)
    rates = {'bfloat16': 5.0, 'float32': 7.0}
    monkeypatch.setattr(peaks, 'cached_gemm_flops', lambda size, dtype: rates[dtype])
    assert peak_flops(4, dtype) == (pytest.approx(peak), source)


def test_measured_flops_take_best_repeat(monkeypatch):
    """Catches the median, which a run exceeds if other processes kept the machine busy."""
    clock = iter([0, 4, 10, 11, 20, 23])
    monkeypatch.setattr(peaks, 'time', SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure_gemm_flops(64, 'float32', repeats=3) == 2 * 64**3


def test_measurement_ends_early_after_two_products(monkeypatch):
    """Catches a start that waits for all repeats on a slow machine, or a single product."""
    clock = iter([0, 4, 10, 12, 20, 21])
    monkeypatch.setattr(peaks, 'time', SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure_gemm_flops(64, 'float32', repeats=3, max_sec=1) == 2 * 64**3 / 2
    assert next(clock) == 20


def test_products_are_measured_in_their_type(monkeypatch):
    lowered = []
    monkeypatch.setattr(peaks.jnp, 'matmul', lambda a, b: lowered.append(a.dtype) or a @ b)
    for dtype in ('float32', 'bfloat16'):
        assert 0 < measure_gemm_flops(64, dtype, repeats=3) < 1e15
    assert list(map(str, lowered)) == ['float32', 'bfloat16']


def test_peak_is_measured_once_per_process(monkeypatch):
    """Again only if `remeasure`, and once for each type."""
    rates = iter([2.0, 3.0, 4.0])
    monkeypatch.setattr(peaks, 'measure_gemm_flops', lambda size, dtype, max_sec: next(rates))
    peaks.cached_gemm_flops.cache_clear()
    measured = [peak_flops(8, 'float32', again)[0] for again in (False, False, True, False)]
    assert measured == [2.0, 2.0, 3.0, 3.0] and peak_flops(8, 'bfloat16')[0] == 4.0
    peaks.cached_gemm_flops.cache_clear()
