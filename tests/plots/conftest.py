"""Small spectra with known features: made by the real pipeline from random linear maps."""

import numpy as np
import pytest
import torch

from workbench.spectral.moments import SnapshotMoments
from workbench.spectral.spectra import as_dataset, layer_spectrum


def spectra_of(radius, *, n_layers=4, width=12, noise=0.05, seed=0, subject="synthetic"):
    """Spectra of ``n_layers`` random maps of about the given spectral radius."""
    generator = np.random.default_rng(seed)
    layers = []
    for _ in range(n_layers):
        X = generator.normal(size=(300, width))
        A = radius * generator.normal(size=(width, width)) / np.sqrt(width)
        Y = X @ A.T + noise * generator.normal(size=X.shape) * np.arange(width)
        layers.append(layer_spectrum(SnapshotMoments(width).update(torch.tensor(X), torch.tensor(Y))))
    attrs = {"subject": subject, "n_snapshots": 300}
    return as_dataset(layers, [f"block {i}" for i in range(n_layers)], attrs=attrs)


@pytest.fixture(scope="session")
def calm():
    return spectra_of(0.9, subject="calm")


@pytest.fixture(scope="session")
def wild():
    return spectra_of(9.0, n_layers=6, seed=1, subject="wild")


@pytest.fixture
def ragged(calm):
    """A layer with fewer modes, one that says nothing, one with a defective operator."""
    spectra = calm.copy(deep=True)
    spectra["eigenvalue"][1, -3:] = np.nan
    spectra["residual"][1, -3:] = np.nan
    spectra["is_reliable"][1, -3:] = False
    spectra["is_informative"][2] = False
    spectra["eigenvector_condition"][3] = np.inf
    spectra["nonlinearity_ratio"][0] = np.nan
    return spectra
