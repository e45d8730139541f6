import warnings

import numpy as np
import pytest
import torch

from tests.about import says
from tests.koopman.snapshots import snapshots
from workbench.errors import SnapshotError
from workbench.koopman import SnapshotMoments, layer_spectra, whitened_dmd
from workbench.koopman.spectra import as_dataset
from workbench.schema.runs import SPECTRA, validate_spectra


def moments_of(n_layers, d=12):
    return [
        SnapshotMoments(d, name=f"layer {i}").update(*map(torch.from_numpy, snapshots(d, 120, 1, seed=i)))
        for i in range(n_layers)
    ]


def test_parallel_and_sequential_spectra_agree_and_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    moments = moments_of(6)
    parallel = layer_spectra(moments, n_workers=3)
    serial = [layer_spectra([m], n_workers=1)[0] for m in moments]
    for one, other in zip(parallel, serial, strict=True):
        np.testing.assert_allclose(np.abs(one.eigenvalue), np.abs(other.eigenvalue), rtol=1e-9)
        assert one.values == pytest.approx(other.values, rel=1e-9)
    assert torch.get_num_threads() == before


def test_a_layer_without_spectrum_is_named_and_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    moments = moments_of(3)
    moments[1] = SnapshotMoments(12, name="layer 1").update(torch.ones(50, 12), torch.ones(50, 12))
    with pytest.raises(SnapshotError, check=says("are all the same; pass inputs that")):
        layer_spectra(moments)
    assert torch.get_num_threads() == before


def test_layers_of_unequal_rank_are_filled_with_nan():
    full = SnapshotMoments(6).update(*map(torch.from_numpy, snapshots(6, 100)))
    few = SnapshotMoments(6).update(*map(torch.from_numpy, snapshots(6, 4)))
    spectra = as_dataset(layer_spectra([full, few]), ["a", "b"])
    assert list(spectra["rank"].values) == [6, 3]
    assert np.isnan(spectra.eigenvalue.values[1, 3:]).all()
    assert not spectra.is_reliable.values[1, 3:].any()
    assert validate_spectra(spectra) is spectra


def test_all_variables_have_units_and_provenance():
    spectra = whitened_dmd(*snapshots(6, 100))
    assert set(spectra.data_vars) == set(SPECTRA)
    assert all(v.attrs["units"] == "1" and v.attrs["long_name"] for v in spectra.data_vars.values())
    assert spectra.attrs["n_snapshots"] == 100
    assert "torch" in spectra.attrs["versions"]
    assert np.all(np.diff(np.abs(spectra.eigenvalue.values)) <= 1e-15)


def test_states_on_a_hyperplane_cause_no_warning():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 8))
    X -= X.mean(axis=1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = whitened_dmd(X, X + 0.1 * np.tanh(X))
    assert int(found["rank"][0]) == 7
