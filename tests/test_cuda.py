"""Tests that need a CUDA device.

They need only torch, NumPy and pytest: ``pytest --noconftest -p no:cacheprovider tests/test_cuda.py``. Tests of probes
of arithmetic also need xarray, and tests of stores need zarr.
"""

import contextlib
import os
import warnings
from functools import partial

# Set before the first call of cuBLAS, so that its results are bitwise reproducible.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch

import workbench as wb
from benchmarks.gpu import eig_on_device_from
from benchmarks.host_reads import CudaWaits
from benchmarks.precision import around
from workbench.io.run_output import RecordingWarning
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
    # Also checks that conjugate pairs are adjacent on the device, the positive imaginary part first.
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
def test_the_host_waits_once_a_step_and_once_more_for_the_metrics_of_a_recorder(kind):
    settings = {"plain": {}, "clipping": {"clip_norm": 0.1}, "recorder": {"recorder": wb.Recorder(every=None)}}[kind]
    run = run_on("cuda", 3 * N_STEPS, **settings)
    for _ in range(N_STEPS):
        next(run)
    with CudaWaits() as waits:
        for _ in range(N_STEPS):
            next(run)
    run.close()
    assert waits.n <= N_STEPS * (2 if kind == "recorder" else 1), waits.places


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


FORMATS = {"float32": (None, False), "float32 by tf32": (None, True), "bfloat16": (torch.bfloat16, False)}
FAMILIES = {
    "pre_ln": partial(wb.zoo.transformer, n_heads=4),
    "llama_style": partial(wb.zoo.llama_style, n_heads=4, n_kv_heads=2),
    "moe": partial(wb.zoo.moe, n_heads=4, n_experts=4, top_k=2),
    "mamba": wb.zoo.mamba,
}


@pytest.fixture
def matmul_by_tf32():
    """A switch of the format of products, which is restored afterwards."""
    before = torch.get_float32_matmul_precision()
    yield lambda is_on: torch.set_float32_matmul_precision("high" if is_on else "highest")
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def bitwise_reproducible():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_arithmetic_is_sound_and_lost_bits_are_detected(family, format_, matmul_by_tf32):
    pytest.importorskip("xarray")
    dtype, is_tf32 = FORMATS[format_]
    matmul_by_tf32(is_tf32)
    task = wb.tasks.associative_recall(length=32, batch_size=16)
    model = FAMILIES[family](d_model=64, n_layers=3, max_length=32, seed=1).to("cuda")
    for _ in wb.train(model, task, n_steps=20, learning_rate=1e-3, warmup=5):
        pass
    inputs, targets = (part[:4].to("cuda") for part in task.batch(10_000))

    def loss_of(module):
        return torch.nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())

    def errors_with(cut):
        return wb.probes.precision_errors(model, loss_of, around=partial(around, dtype, cut, "cuda"))

    healthy = [None] if family == "mamba" else [None, wb.faults.Cut()]
    for cut in healthy:
        errors = errors_with(cut)
        assert bool(np.isfinite(errors["error_excess"].values).all())
        assert wb.probes.broken_arithmetic(errors) is None, (cut, errors["error_excess"].values)
    if family != "mamba":
        errors = errors_with(wb.faults.Cut(n_bits=4, output=True, gradient=True))
        assert wb.probes.broken_arithmetic(errors) is not None, errors["error_excess"].values


def trained_in_a_loop(n_steps, *, around=lambda model, optimizer: contextlib.nullcontext(), is_compiled=False):
    """Train in a standard loop on the device; return the model and the object that observes it."""
    task = wb.tasks.associative_recall(batch_size=8)
    model = wb.zoo.transformer(d_model=32, n_layers=2, n_heads=2).to("cuda")
    called = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with around(called, optimizer) as watched:
        for step in range(n_steps):
            inputs, targets = (part.to("cuda") for part in task.batch(step))
            loss = torch.nn.functional.cross_entropy(called(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            if watched is not None:
                watched.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return model, watched


def not_recorded(path):
    events = wb.open_run(path)["events"].to_dataset()
    return events["message"].values[events["kind"].values == "not recorded"].tolist()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_watching_does_not_affect_training_and_raises_no_alarm(tmp_path, bitwise_reproducible, is_compiled):
    pytest.importorskip("zarr")

    def watching(model, optimizer):
        return wb.watch(model, optimizer, store=tmp_path / "run.zarr", shows=False)

    unwatched, _ = trained_in_a_loop(60, is_compiled=is_compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        model, watched = trained_in_a_loop(60, around=watching, is_compiled=is_compiled)
    assert watched.alarms.raised == []
    for name, weight in unwatched.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    run = wb.open_run(tmp_path / "run.zarr")
    assert run["precision"].sizes["step"] == 3
    assert run["monitors"].sizes["step"] == 60
    assert not not_recorded(tmp_path / "run.zarr")


def test_an_attached_fault_is_detected(tmp_path):
    pytest.importorskip("zarr")
    fault = wb.faults.low_precision_attention(n_bits=6, start=30)

    @contextlib.contextmanager
    def watching(model, optimizer):
        with (
            wb.watch(model, optimizer, store=tmp_path / "run.zarr", shows=False) as watched,
            fault.attach(model, optimizer),
        ):
            yield watched

    _, watched = trained_in_a_loop(60, around=watching)
    raised = [(alarm.signal, alarm.step) for alarm in watched.alarms.raised]
    assert raised
    assert raised[0][0] == "arithmetic"
    assert raised[0][1] >= 30


def test_all_parts_of_a_recorder_are_measured():
    recorder, found = wb.Recorder(), {}
    recorder.observe(lambda observation: found.setdefault(observation.part, []).append(observation))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        list(run_on("cuda", 50, recorder=recorder))
    parts = {"monitors", "attention", "optimizer", "activations", "precision", "reduction", "update"}
    assert set(found) >= parts
    for part in ("precision", "reduction", "update"):
        first = {"precision": "error_excess", "reduction": "gradient_verdict", "update": "predicted_loss_change"}[part]
        assert all(np.isfinite(each.values[first]).all() for each in found[part])
    assert all(each.values["gradient_verdict"] == 0 for each in found["reduction"])


def test_the_first_bad_tensor_is_named():
    model = wb.zoo.transformer(d_model=32, n_layers=2, n_heads=2).to("cuda")
    tokens = torch.arange(32, device="cuda").reshape(2, 16)

    def loss_of(module):
        return module(tokens).logsumexp(-1).mean()

    assert wb.probes.first_bad_tensor(model, loss_of) is None
    name, weight = next((n, p) for n, p in model.named_parameters() if "mlp" in n or "up" in n)
    with torch.no_grad():
        weight.view(-1)[3] = torch.nan
    found = wb.probes.first_bad_tensor(model, loss_of)
    assert found is not None
    assert (found.n_bad, f"{found.module}.{found.tensor.removeprefix('parameter ')}") == (1, name)
