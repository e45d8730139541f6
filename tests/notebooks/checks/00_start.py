"""The claims of notebook 00, checked in its namespace after its last cell."""

# ruff: noqa: F821

# ---- figure: two untrained models with clearly different spectra, most modes reliable
assert list(spectra) == list(explorer.sources) == ["Pre-LN", "no norm"]
assert not explorer.error
assert (spectra["no norm"]["near_unit_mass"] > 0.99).all()
assert abs(spectra["no norm"]["eigenvalue"] - 1).max() < 0.1
assert (spectra["Pre-LN"]["near_unit_mass"] < 0.6).all()
assert (spectra["Pre-LN"]["expansive_mass"] > 0.1).all()  # modes on both sides of the circle
assert (spectra["Pre-LN"]["contractive_mass"] + spectra["Pre-LN"]["intermediate_mass"] > 0.1).all()
assert spectra["no norm"]["is_reliable"].all()
assert spectra["Pre-LN"]["is_reliable"].mean() > 0.5
assert M["no norm"] > 0.99
assert 0.2 < M["Pre-LN"] < 0.5

# ---- verdict from recorded runs, which do not depend on the machine
assert n_runs == 12
assert n_diverged[["Pre-LN", "No-Norm", "Post-LN"]].tolist() == [0, 12, 0]
assert n_diverged.drop("No-Norm").sum() == 0  # the presence of a norm is an equally good predictor
assert set(diverged["learning_rate"].values) == {0.003, 0.005, 0.01}
assert set(study["task"].values[(study["architecture"] == "No norm").values]) == {"text_bytes"}
assert set(normed["task"].values) == {"text_bytes"}
assert not fraction[fraction.index <= safe].any()
assert (fraction[fraction.index >= unsafe] == 1).all()
assert unsafe < 1.6 * safe
assert not normed["has_diverged"].any()
assert abs(float(largest["final_loss"] - largest["trivial_loss"])) < 0.05
recorded_masses = wb.samples.open("initialization/norms")["near_unit_mass"].sel(source="ours").mean("seed")
assert recorded_masses.sel(architecture="No-Norm") > 0.9
assert recorded_masses.sel(architecture="Pre-LN") < 0.2

# ---- three exercises
near = abs(spectra["Pre-LN"]["eigenvalue"])
assert ((near < 0.9) | (near > 1.05)).mean() > 0.5
of_layers = spectra["Pre-LN"]["is_reliable"].mean("mode")
assert of_layers[0] < 0.5 < of_layers[-1]  # most modes of the first block of Pre-LN are not reliable
explorer.zoom.value = "near 1"
explorer.reliable_only.value = True
assert not explorer.error
explorer.reliable_only.value, explorer.zoom.value = False, "all modes"
post = wb.profile(wb.zoo.transformer("post_ln", **size), text, n_snapshots=4096, progress=False)
assert 25 < post["spectral_radius"][0] < 60
assert (post["near_unit_mass"][1:] > 0.99).all()
assert post["near_unit_mass"].mean() > 0.8

# ---- a run that is saved and opened
assert abs(after["pre_ln"] - after["no_norm"]) < 0.1
again = wb.open_run(path)
assert again["spectra"].to_dataset().equals(trained["pre_ln"])
