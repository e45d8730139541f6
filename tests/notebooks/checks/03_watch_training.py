"""The claims of notebook 03, checked in its namespace after its last cell."""

# ruff: noqa: F821

# ---- sections 1 and 2: both runs are shown with the contents of their stores
assert list(watch.runs) == list(runs) == ["Pre-LN", "No-Norm"]
assert not watch.error
assert records["No-Norm"][-1].diverged
assert records["No-Norm"][-1].step > settings["warmup"]
assert len(records["Pre-LN"]) == settings["n_steps"]
assert not records["Pre-LN"][-1].diverged
assert runs["No-Norm"].attrs["state"] == "diverged"
assert runs["Pre-LN"].attrs["state"] == "finished"
assert runs["No-Norm"]["events"]["kind"].values.tolist() == ["divergence"]
assert abs(records["No-Norm"][0].loss - records["Pre-LN"][0].loss) < 0.1
modes_at_start = runs["No-Norm"]["spectra"]["eigenvalue"].isel(step=0)
assert abs(modes_at_start - 1).max() < 0.1  # all eigenvalues are close to 1

# ---- section 3: M separates the runs before training, but not during it; the gradient norm rises no later than M
assert mass["No-Norm"][0] > 0.9
assert mass["Pre-LN"][0] < 0.3
assert mass["Pre-LN"].max() > 0.7  # continues with an M as large as that of the other run
assert largest["Pre-LN"] > 5 * radii["Pre-LN"].isel(step=0)
assert largest["Pre-LN"] > largest["No-Norm"] / 10
assert bare["gradient norm"] is not None
assert bare["gradient norm"] <= min(step for step in bare.values() if step)
assert bare["spectral radius"] is not None
assert not any(of_other.values())

# ---- section 4
assert len(same) == 69
assert all(same)
