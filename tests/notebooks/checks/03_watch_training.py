"""What notebook 03 says, checked in its own namespace after its last cell."""

# ruff: noqa: F821

# ---- sections 1 and 2: both runs are on the page as they are in their stores
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
assert abs(modes_at_start - 1).max() < 0.1  # every mode sits at 1

# ---- section 3: M separates before training, not during it; a level is no alarm; the norm jumps no later
assert mass["No-Norm"][0] > 0.9
assert mass["Pre-LN"][0] < 0.3
assert mass["Pre-LN"].max() > 0.7  # goes on, and yet as near-unit as the other
assert largest["Pre-LN"] > 5 * runs["Pre-LN"]["spectra"]["spectral_radius"].isel(step=0).max()
assert largest["Pre-LN"] > largest["No-Norm"] / 10
assert bare["gradient norm"] is not None
assert bare["gradient norm"] <= min(step for step in bare.values() if step)
assert bare["spectral radius"] is not None
assert not any(of_other.values())

# ---- section 4
assert len(same) == 69
assert all(same)
