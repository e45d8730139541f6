"""Small spectra with known properties, computed by the real pipeline from random linear maps."""

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.spectra import as_dataset, layer_spectrum
from workbench.plots.primitives import Primitives


def spectra_of(radius, *, n_layers=4, width=12, noise=0.05, seed=0, subject="synthetic"):
    """Return spectra of ``n_layers`` random maps with about the given spectral radius."""
    generator = np.random.default_rng(seed)
    layers = []
    for _ in range(n_layers):
        X = generator.normal(size=(300, width))
        A = radius * generator.normal(size=(width, width)) / np.sqrt(width)
        Y = X @ A.T + noise * generator.normal(size=X.shape) * np.arange(width)
        layers.append(layer_spectrum(SnapshotMoments(width).update(torch.tensor(X), torch.tensor(Y))))
    attrs = {"subject": subject, "n_snapshots": 300}
    return as_dataset(layers, [f"block {i}" for i in range(n_layers)], attrs=attrs)


def run_of(radii, *, subject="synthetic", n_steps=21, diverged=None, seed=0, **kwargs):
    """Return a training run with spectra (step -> radius), and monitors at every step up to the divergence."""
    spectra = [spectra_of(radius, seed=seed + step, subject=subject, **kwargs) for step, radius in radii.items()]
    step = xr.IndexVariable("step", list(radii))
    parts = {"spectra": xr.concat(spectra, dim=step, combine_attrs="override", data_vars="all")}
    steps = np.arange(n_steps if diverged is None else diverged + 1)
    loss = 4 * np.exp(-steps / 30)
    if diverged is not None:
        loss[-1] = 1e3
    monitors = {
        "loss": loss,
        "grad_norm": 100.0 ** np.sin(steps),
        "learning_rate": steps / 20,
        "accuracy": np.where(steps % 5 == 0, steps / 20, np.nan),
    }
    parts["monitors"] = xr.Dataset({name: ("step", values) for name, values in monitors.items()}, {"step": steps})
    if diverged is not None:
        event = {"step": [5, diverged], "kind": ["checkpoint", "divergence"], "source": ["", "loss"]}
        event |= {"score": [0.0, 1e3], "message": ["saved", "loss above 50"]}
        parts["events"] = xr.Dataset({name: ("event", values) for name, values in event.items()})
    return xr.DataTree.from_dict(parts)


@pytest.fixture(scope="session")
def runs():
    """A healthy run with spectra at three steps, a run that diverges at step 12, and spectra without a step."""
    return {
        "Pre-LN": run_of({0: 0.9, 10: 1.2, 20: 0.8}, subject="calm", n_layers=3, width=8),
        "none": run_of({0: 3.0, 10: 9.0}, subject="wild", n_layers=3, width=8, diverged=12, seed=100),
        "bare": spectra_of(0.7, n_layers=3, width=8, seed=200, subject="bare"),
    }


@pytest.fixture(scope="session")
def comparison(runs):
    return wb.compare(runs)


@pytest.fixture(scope="session")
def calm():
    return spectra_of(0.9, subject="calm")


@pytest.fixture(scope="session")
def wild():
    return spectra_of(9.0, n_layers=6, seed=1, subject="wild")


@pytest.fixture
def ragged(calm):
    """Spectra with a layer of fewer modes, an uninformative layer, and a layer with a defective operator."""
    spectra = calm.copy(deep=True)
    spectra["eigenvalue"][1, -3:] = np.nan
    spectra["residual"][1, -3:] = np.nan
    spectra["is_reliable"][1, -3:] = False
    spectra["is_informative"][2] = False
    spectra["eigenvector_condition"][3] = np.inf
    spectra["nonlinearity_ratio"][0] = np.nan
    return spectra


@pytest.fixture
def drawn(monkeypatch):
    """Arguments of all calls of the primitives, by kind of mark."""
    found = {}
    for kind in ("line", "band", "boxes", "bars", "dots", "panel"):
        own = getattr(Primitives, kind)

        def spy(self, *args, kind=kind, own=own, **options):
            found.setdefault(kind, []).append((args, options))
            return own(self, *args, **options)

        monkeypatch.setattr(Primitives, kind, spy)
    return found


@pytest.fixture(scope="session")
def crowded(wild):
    """More modes than are drawn one by one: those of `wild`, repeated with a little noise."""
    n_modes = wild.sizes["mode"]
    spectra = (
        wild.isel(mode=np.tile(np.arange(n_modes), 80)).assign_coords(mode=np.arange(80 * n_modes)).copy(deep=True)
    )
    noise = np.random.default_rng(0).normal(size=(2, *spectra["eigenvalue"].shape))
    spectra["eigenvalue"] = spectra["eigenvalue"] * np.exp(0.1 * (noise[0] + 1j * noise[1]))
    return spectra
