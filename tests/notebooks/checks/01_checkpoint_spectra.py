"""The claims of notebook 01, checked in its namespace after its last cell."""

# ruff: noqa: F821

# ---- the checkpoint was opened correctly
assert answer == "Paris"

# ---- section 1: the published trends do not replicate
assert spectra.attrs["n_snapshots"] == 1536
assert not is_alike
assert by_third["M"].loc[here].min() > 0.15
assert by_third["M"].loc[here].max() < 0.4
assert by_third.loc[here, ("M", "early")] < by_third.loc[here, ("M", "middle")]
assert theirs.min(axis=None) > 0.55
assert (theirs["early"] > theirs["late"]).all()
assert float(spectra["eigenvector_condition"].mean()) > 500

# ---- section 2: M depends on the number of directions
assert int(spectra["rank"].min()) == 576
assert int(few["rank"].max()) < 100
assert set(leading["rank"].values) == {32}
assert float(few["nonlinearity_ratio"].max()) < 1e-6 < float(spectra["nonlinearity_ratio"].min())
assert caught
assert is_rising
assert M[few_name] > 1.5 * M["1,536 states"]
assert M[leading_name] > M[few_name] + 0.05
assert means.loc[leading_name, "eigenvector_condition"] < means.loc["1,536 states", "eigenvector_condition"] / 5
assert not explorer.error
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    repeated = wb.profile(model, prompts * 8, n_snapshots=None, layers=[3], skip_first=1, progress=False)
assert repeated["rank"].values == few["rank"].sel(layer=[3]).values  # repeated prompts add nothing

# ---- section 3: massive activations
assert jump.idxmax() == 11
assert jump.max() > 1.5
assert abs(jump[[15, 19]] - 1).max() < 0.3
assert digits.loc[[15, 19], "excluded"].min() > digits.loc[[15, 19], "included"].max() + 2
assert spectra.attrs["token_selection"] != kept.attrs["token_selection"]

# ---- section 4: spectra of the weights
assert spikes["untrained"] == 0
assert spikes.drop("untrained").min() >= 5
assert alpha["untrained"] < alpha["SmolLM2-135M"]
assert medians.loc["untrained", "D"] > medians["D"].drop("untrained").max()
assert alpha["no_norm"] < alpha["pre_ln"]
smol = weights["SmolLM2-135M"]
assert set(smol["role"].values[(smol["alpha"] < 2).values]) <= {"attention query", "attention key"}
