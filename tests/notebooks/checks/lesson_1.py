"""The claims of lesson 1, checked in its namespace after its last cell."""

# ruff: noqa: F821

assert len(entering) == len(leaving) == 8
assert (spectra["no norm"]["near_unit_mass"] == 1).all()
assert abs(spectra["no norm"]["eigenvalue"] - 1).max() < 0.1
assert (spectra["Pre-LN"]["expansive_mass"] > 0).all()
assert (spectra["Pre-LN"]["contractive_mass"] > 0).all()
of_layers = spectra["Pre-LN"]["is_reliable"].mean("mode")
assert of_layers[0] < 0.5 < of_layers[-1]
# Too few states: an exact fit, fewer modes and another M, and a warning.
assert caught
assert means["20 tokens"]["nonlinearity_ratio"] < 1e-6 < means["4,096 tokens"]["nonlinearity_ratio"]
assert means["20 tokens"]["rank"] < means["4,096 tokens"]["rank"] == 32
assert means["20 tokens"]["near_unit_mass"] != means["4,096 tokens"]["near_unit_mass"]
assert not explorer.error
