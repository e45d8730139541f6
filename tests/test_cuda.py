"""What only a CUDA device can show.

It needs torch, NumPy and pytest alone: ``pytest --noconftest -p no:cacheprovider tests/test_cuda.py``.
"""

import numpy as np
import pytest
import torch

import workbench as wb
from benchmarks.gpu import eig_on_device_from
from benchmarks.host_reads import CudaWaits
from workbench.koopman import SnapshotMoments, layer_spectrum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
N_STEPS = 10


def states(width=96, n=400):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    return x, x + 0.3 * torch.tanh(x @ torch.randn(width, width, generator=generator, dtype=torch.float64))


def test_moments_agree_with_the_host():
    x, y = states()
    here, there = (SnapshotMoments(96, device=d).update(x.to(d), y.to(d)) for d in ("cpu", "cuda"))
    for name in ("c_xx", "c_dx", "c_dd", "mean_x"):
        torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("smallest", [0, np.inf], ids=["eigenvalues on the device", "eigenvalues on the host"])
def test_spectra_agree_with_the_host(smallest):
    x, y = states()
    here, there = (SnapshotMoments(96, device=d).update(x.to(d), y.to(d)) for d in ("cpu", "cuda"))
    expected = layer_spectrum(here)
    with eig_on_device_from(smallest):
        found = layer_spectrum(there)
    # Conjugate pairs have to stand side by side, the one with positive imaginary part first, also on the device.
    np.testing.assert_allclose(np.abs(found.eigenvalue), np.abs(expected.eigenvalue), rtol=1e-8)
    np.testing.assert_allclose(found.residual, expected.residual, rtol=1e-6)
    assert found.values == pytest.approx(expected.values, rel=1e-6)


def run_on(device, n_steps, **settings):
    model = wb.zoo.transformer(d_model=32, n_layers=2, n_heads=2).to(device)
    return wb.train(model, wb.tasks.associative_recall(batch_size=4), n_steps=n_steps, learning_rate=1e-4, **settings)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_training_agrees_with_the_host(clip_norm):
    here, there = ([r.loss for r in run_on(device, 5, clip_norm=clip_norm)] for device in ("cpu", "cuda"))
    assert there == pytest.approx(here, rel=1e-4)


def test_float16_trains():
    assert all(np.isfinite(record.loss) for record in run_on("cuda", 5, precision="float16"))


@pytest.mark.parametrize("kind", ["plain", "clipping", "recorder"])
def test_the_host_waits_once_a_step(kind):
    settings = {"plain": {}, "clipping": {"clip_norm": 0.1}, "recorder": {"recorder": wb.Recorder(every=None)}}[kind]
    run = run_on("cuda", 3 * N_STEPS, **settings)
    for _ in range(N_STEPS):
        next(run)
    with CudaWaits() as waits:
        for _ in range(N_STEPS):
            next(run)
    run.close()
    assert waits.n <= N_STEPS, waits.places


def test_monitors_and_shaping_run():
    recorder = wb.Recorder(every={"attention": 10, "optimizer": 5, "activations": 5})
    found = []
    recorder.observe(found.append)
    records = list(run_on("cuda", 20, recorder=recorder, alarms=wb.Alarms(), kss=wb.KSS.recommended()))
    assert len(records) == 20
    assert {observation.part for observation in found} >= {"monitors", "attention", "optimizer", "activations"}


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_states_in_bfloat16_are_profiled(name):
    model = wb.zoo.transformer(d_model=32, n_layers=2, n_heads=2, mlp=name).to("cuda", torch.bfloat16)
    pytest.importorskip("xarray")
    spectra = wb.profile(model, torch.randint(0, 256, (8, 64)), progress=False)
    assert bool(np.isfinite(spectra["spectral_radius"].values).all())
