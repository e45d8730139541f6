"""The claims of lesson 2, checked in its namespace after its last cell."""

# ruff: noqa: F821

# The table: only No-Norm diverges, and it has the largest M.
assert len(table) == 7
assert table["M"].idxmax() == "No-Norm"
assert table["diverged"].drop("No-Norm").sum() == 0
assert table["diverged"]["No-Norm"] == 12
# Depth: the first block of Post-LN enlarges every direction, and all later ones are close to the identity.
post = spectra["Post-LN"]
assert float(post["expansive_mass"][0]) > 0.9
assert (post["near_unit_mass"][1:] == 1).all()
assert float(flow["Post-LN"]["signal_gain"][1:].prod()) < 1.1
# The stream of Pre-LN grows, its updates are about equally large.
assert sizes["stream"].is_monotonic_increasing
assert sizes["update"].max() < 1.25 * sizes["update"].min()
assert sizes["update"][0] < sizes["update"][11] < sizes["stream"][11]
# The published claim holds on few designs only.
assert rows["six normalizations"]["AUROC of M"] == 1
assert abs(rows["23 other designs"]["AUROC of M"] - 0.5) < 0.05
assert not explorer.error
