"""The claims of notebook 02, checked in its namespace after its last cell."""

# ruff: noqa: F821

# ---- section 1: the published order of M, and the difference in divergence
assert both["published"].is_monotonic_decreasing
assert top == "No-Norm"
assert 0.1 < off["No-Norm"] < 0.2
assert off.drop("No-Norm").max() < 0.15
by_rate = diverged.mean("seed").to_pandas()
assert (by_rate.loc["No-Norm"] > 0.9).all()
assert (by_rate.drop("No-Norm") == 0).all().all()
assert fraction["No-Norm"] == 1
assert norms.loc["Post-LN", ("M", "ours")] > 0.5

# ---- section 2: learning rates at which each design diverges, and M of the untrained model
assert all((rate[name] <= 0.01) == (name in ("No-Norm", "Fixup", "ReZero")) for name in rate)
assert len(limits) == 18
assert (first[is_bare] == 0.01).all()
assert (first[~is_bare] >= 1).all()
assert start["No-Norm"] > 0.95
assert start["Mamba"] > 0.95
assert start[["Fixup", "ReZero"]].isna().all()
assert rate["Mamba"] >= 100 * rate["No-Norm"]
assert {"No-Norm", "Mamba", "Post-LN"} <= set(near.index)

# ---- section 3
assert list(explore.runs) == ["Pre-LN", "No-Norm", "Post-LN", "DeepNorm", "MoE top-2", "Mamba"]
assert not explore.error
assert not any(bool(run["events"]["kind"].isin(["divergence"]).any()) for run in healthy.values())
assert gap["first"] > 0.7
assert gap["last"] < gap["first"] / 2

# ---- section 4: published directions
assert [int(seeds.sum()) for seeds in claims.values()] == [3, 3, 0, 0, 0, 3]
means = wb.samples.open("initialization/architectures").mean("seed").sel(source="ours")
m, nonlinear = means["near_unit_mass"], means["nonlinearity_ratio"]
assert m.sel(architecture="MoE top-1") > m.sel(architecture="MoE top-2") + 0.1
assert 0.001 < m.sel(architecture="MoE top-2") - m.sel(architecture="MoE top-4") < 0.006
order = ["MoE top-1, normalized", "MoE top-2", "MoE top-4"]
assert (nonlinear.sel(architecture=order).diff("architecture") < 0).all()
assert nonlinear.idxmax("architecture") == "Mamba"
assert nonlinear.sel(architecture="Mamba") > nonlinear.sel(architecture="KAN B=4")
assert nonlinear.sel(architecture="KAN B=4") > nonlinear.sel(architecture="Pre-LN")
assert abs(m.sel(architecture="KAN B=4, small") - 0.52) < 0.05
assert alone["contractive_mass"] > 0.9
assert alone["near_unit_mass"] < 0.05
assert alone["spectral_radius"] < 1
assert closest == "branch alone"

# ---- section 5
assert spectra.sizes["layer"] == 4
