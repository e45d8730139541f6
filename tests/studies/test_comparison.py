"""Comparison of architectures: means by hand, steps, published rows and outcomes."""

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import runs, spectra_of
from workbench.errors import OptionError, SchemaError
from workbench.io.store import at_step, last_step, named_runs
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.spectra import as_dataset, layer_spectrum
from workbench.schema.runs import SPECTRA
from workbench.studies.comparison import ENERGETIC, SPECTRAL, VARIABLES, compare_checked

__all__ = ["runs"]


def modulus_at(run, step):
    return abs(run["spectra"]["eigenvalue"].sel(step=step).values)


def test_the_means_over_layers_by_hand(runs):
    table = wb.compare({"a": runs["Pre-LN"]}, at=10)
    modulus = modulus_at(runs["Pre-LN"], 10)
    ours = table.sel(architecture="a", source="ours")
    assert float(ours.near_unit_mass) == pytest.approx(((modulus >= 0.9) & (modulus <= 1.05)).mean(1).mean())
    assert float(ours.expansive_mass) == pytest.approx((modulus > 1.05).mean(1).mean())
    assert float(ours.contractive_mass) == pytest.approx((modulus < 0.8).mean(1).mean())
    assert float(ours.spectral_radius) == pytest.approx(modulus.max(1).mean())
    residual = runs["Pre-LN"]["spectra"]["residual"].sel(step=10).values
    assert float(ours.reliable_fraction) == pytest.approx((residual <= 0.1).mean(1).mean())
    assert (int(ours.step), int(ours.n_layers), float(ours["rank"])) == (10, 3, 8.0)


def test_checked_runs_are_compared_like_unchecked_ones(runs):
    trees = named_runs(runs)
    spectra = {name: at_step(tree["spectra"].to_dataset(), "last", name=name) for name, tree in trees.items()}
    expected = wb.compare(runs, at="last", published={"bare": "Mamba"})
    found = compare_checked(trees, spectra, published={"bare": "Mamba"})
    xr.testing.assert_identical(found.assign_attrs(at="last"), expected)
    # Some of the layers, and fewer runs.
    some = compare_checked(trees, {"none": spectra["none"].isel(layer=[1])})
    assert float(some["rank"].sel(architecture="none")) == float(spectra["none"]["rank"][1])
    assert some.architecture.values.tolist() == ["none"]


def test_the_means_are_those_of_summarize_if_every_layer_is_informative(runs):
    table = wb.compare(runs)
    for name, run in named_runs(runs).items():
        spectra = at_step(run["spectra"].to_dataset(), "first", name=name)
        mean = wb.summarize(spectra).sel(statistic="mean")
        for measure in (*SPECTRAL, *ENERGETIC):
            assert float(table[measure].sel(architecture=name, source="ours")) == pytest.approx(float(mean[measure]))
    assert np.isinf(table.kreiss_constant.sel(architecture="none", source="ours"))


def test_layers_that_are_not_informative_are_excluded(runs):
    spectra = runs["bare"].copy(deep=True)
    spectra["is_informative"][0] = False
    ours = wb.compare({"a": spectra}).sel(architecture="a", source="ours")
    assert float(ours.near_unit_mass) == pytest.approx(float(spectra.near_unit_mass[1:].mean()))
    assert float(ours.update_norm) == pytest.approx(float(spectra.update_norm.mean()))
    assert (int(ours.n_layers), int(ours.n_informative), bool(ours.is_informative)) == (3, 2, True)


def test_an_identity_initialization_has_no_mass():
    states = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = layer_spectrum(SnapshotMoments(6).update(states, states))
    spectra = as_dataset([layer], ["block 0"], attrs={"subject": "identity", "n_snapshots": 50})
    assert float(spectra.near_unit_mass.min()) == 1.0
    ours = wb.compare({"pre_ln": spectra}).sel(architecture="pre_ln", source="ours")
    assert not bool(ours.is_informative)
    assert all(np.isnan(ours[name]) for name in (*SPECTRAL, "reliable_fraction"))
    assert float(ours.update_norm) < 1e-12


def test_ragged_spectra_count_only_the_modes_that_exist():
    spectra = spectra_of(0.7, n_layers=3, width=8, noise=0.02)
    for name, missing in (("eigenvalue", np.nan), ("residual", np.nan), ("is_reliable", False)):
        spectra[name][0, 3:] = missing
    spectra = wb.remeasure(spectra)
    expected = (spectra.is_reliable.values.sum(1) / np.array([3, 8, 8])).mean()
    assert 0 < expected < 1
    assert wb.compare({"a": spectra}).reliable_fraction.sel(source="ours").item() == pytest.approx(expected)


@pytest.mark.parametrize(("at", "expected"), [("first", [0, 0]), ("last", [20, 10]), (15, [10, 10]), (10**6, [20, 10])])
def test_each_run_is_compared_at_its_last_step_up_to_the_requested_one(runs, at, expected):
    table = wb.compare({name: runs[name] for name in ("Pre-LN", "none")}, at=at)
    assert table.step.values.tolist() == expected
    radius = [
        modulus_at(runs[name], step).max(1).mean() for name, step in zip(("Pre-LN", "none"), expected, strict=True)
    ]
    np.testing.assert_allclose(table.spectral_radius.sel(source="ours"), radius)


def test_steps_need_no_order(runs):
    spectra = runs["Pre-LN"]["spectra"].to_dataset()
    shuffled = spectra.isel(step=[2, 0, 1])
    for at in ("first", "last", 12):
        xr.testing.assert_identical(wb.compare({"a": shuffled}, at=at), wb.compare({"a": spectra}, at=at))


def test_data_without_steps_have_no_step(runs):
    assert np.isnan(wb.compare({"a": runs["bare"]}, at="last").step)
    assert wb.compare({"a": runs["bare"].assign_coords(step=7)}, at=8).step.item() == 7


def test_outcomes(runs):
    table = wb.compare(runs)
    assert table.has_diverged.values.tolist() == [False, True, False]
    np.testing.assert_array_equal(table.divergence_step, [np.nan, 12, np.nan])
    np.testing.assert_array_equal(table.divergence_rate.sel(source="ours"), [0, 1, np.nan])
    loss = runs["Pre-LN"]["monitors"].loss.values
    np.testing.assert_allclose(table.final_loss, [loss[-2:].mean(), 1e3, np.nan])
    np.testing.assert_allclose(table.best_accuracy, [1.0, 0.5, np.nan])
    np.testing.assert_allclose(table.final_accuracy, [1.0, 0.5, np.nan])
    assert last_step(runs["Pre-LN"]) == 20
    assert last_step(runs["none"]) == 12


def test_a_loss_that_is_not_finite(runs):
    run = runs["Pre-LN"].copy(deep=True)
    run["monitors"]["loss"][-1] = np.inf
    assert np.isinf(wb.compare({"a": run}).final_loss)
    run["monitors"]["loss"][-1] = np.nan
    loss = run["monitors"].loss.values
    assert float(wb.compare({"a": run}).final_loss[0]) == pytest.approx(loss[-3:-1].mean())


def test_every_variable_is_described(runs):
    table = wb.compare(runs)
    assert set(table.data_vars) == {*SPECTRAL, *ENERGETIC, *VARIABLES}
    for name, variable in table.variables.items():
        if name not in ("architecture", "source"):
            assert variable.attrs["long_name"], name
    assert table.near_unit_mass.attrs["meaning"] == SPECTRA["near_unit_mass"].meaning
    assert table.near_unit_upper == 1.05


def test_a_stored_run_compares_the_same(runs, tmp_path):
    path = wb.save(runs["none"], tmp_path / "run.zarr")
    xr.testing.assert_identical(wb.compare({"none": wb.open_run(path)}), wb.compare({"none": runs["none"]}))


ROWS = wb.published.architectures().architecture.values.tolist()


@pytest.mark.medium
@given(st.sampled_from(ROWS), st.lists(st.sampled_from("-_ .=()"), max_size=4), st.integers(0, 2**30), st.randoms())
def test_published_rows_are_found_with_any_case_and_punctuation(row, signs, cases, random):
    letters = [letter for letter in row if letter.isalnum()]
    letters = [letter.upper() if cases >> i & 1 else letter.lower() for i, letter in enumerate(letters)]
    for sign in signs:
        letters.insert(random.randrange(len(letters) + 1), sign)
    name = "".join(letters)
    from workbench.studies.comparison import _published_rows

    assert _published_rows([name], True) == {name: row}
    assert _published_rows([name], False) == {name: ""}
    assert _published_rows([name], {name: "Mamba"}) == {name: "Mamba"}


def test_published_figures_are_in_the_table(runs):
    table = wb.compare(runs)
    assert table.published_as.values.tolist() == ["Pre-LN", "No-Norm", ""]
    published = table.sel(source="published")
    np.testing.assert_array_equal(published.near_unit_mass, [0.16, 0.79, np.nan])
    np.testing.assert_allclose(published.divergence_rate, [0.0, 0.964, np.nan])
    assert np.isnan(published.kreiss_constant).all()
    by_hand = wb.compare(runs, published={"bare": "MoE top-2"})
    np.testing.assert_array_equal(by_hand.near_unit_mass.sel(source="published"), [0.16, 0.79, 0.58])
    assert np.isnan(wb.compare(runs, published=False).near_unit_mass.sel(source="published")).all()
    # The row of the paper is not the definition of DeepNet.
    assert wb.compare({"deep_norm_post": runs["bare"]}).published_as.item() == ""


def test_wrong_input_is_rejected(runs):
    with pytest.raises(SchemaError, check=about("runs", {})):
        wb.compare({})
    with pytest.raises(SchemaError, check=says("is of type int, expected a run or a dataset of wb.profile().")):
        wb.compare({"a": 1})
    without_spectra = xr.DataTree.from_dict({"monitors": runs["Pre-LN"]["monitors"].to_dataset()})
    with pytest.raises(SchemaError, check=says("has no spectra, only monitors; record spectra in")):
        wb.compare({"a": without_spectra})
    with pytest.raises(SchemaError, check=says("is not a run: The spectra lack")):
        wb.compare({"a": xr.Dataset({"x": 1})})
    with pytest.raises(OptionError, check=says("has no spectra at or before step")):
        wb.compare({"Pre-LN": runs["Pre-LN"]}, at=-1)
    with pytest.raises(OptionError, check=says("has no steps, so step")):
        wb.compare({"bare": runs["bare"]}, at=5)
    for wrong in ("middle", 2.5, True):
        with pytest.raises(OptionError, check=about("step" if wrong == "middle" else "at", wrong)):
            wb.compare(runs, at=wrong)
    with pytest.raises(SchemaError, check=says("choose from Pre-LN, Post-LN, RMSNorm, DeepNorm, SubLN,")):
        wb.compare(runs, published={"bare": "GPT"})
    with pytest.raises(SchemaError, check=says("but the runs are Pre-LN, none, bare; use one.")):
        wb.compare(runs, published={"other": "KAN"})
    with pytest.raises(OptionError, check=says("apply wb.remeasure() with the same thresholds first.")):
        wb.compare({"a": runs["bare"], "b": wb.remeasure(runs["bare"], near_unit_upper=1.2)})
    with pytest.raises(SchemaError, check=says("has the dimension run; select one entry, for example")):
        wb.compare({"a": runs["bare"].expand_dims(run=2)})


def test_models_without_inputs_are_rejected():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
    for ask in (lambda: wb.compare({"a": model}), lambda: wb.compare(model, model), lambda: wb.compare([model])):
        with pytest.raises(SchemaError, match="pass inputs=", check=about("inputs")):
            ask()


def test_models_are_compared_by_their_spectra():
    model, task = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2), wb.tasks.associative_recall()
    spectra = wb.profile(model, task, progress=False)
    found = wb.compare(model, model, inputs=task, progress=False)
    assert found["architecture"].values.tolist() == ["Transformer", "Transformer (2)"]
    both = wb.compare({"a": model, "b": spectra}, inputs=task, published=False, progress=False)["near_unit_mass"]
    np.testing.assert_array_equal(both.sel(architecture="a"), both.sel(architecture="b"))


def test_spectra_without_names_are_named_after_their_subjects(runs):
    spectra = runs["Pre-LN"]["spectra"].to_dataset()
    other = spectra.assign_attrs(subject="other")
    names = ["calm", "other", "calm (2)"]
    assert wb.compare(spectra, other, runs["Pre-LN"])["architecture"].values.tolist() == names
    assert wb.compare([spectra, other, spectra])["architecture"].values.tolist() == names


def test_a_single_run_is_named_after_its_subject(runs):
    assert list(named_runs(runs["Pre-LN"])) == list(named_runs(runs["Pre-LN"]["spectra"].to_dataset())) == ["calm"]
