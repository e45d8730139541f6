"""The claims of lesson 3, checked in its namespace after its last cell."""

# ruff: noqa: F821

# Only the design without normalization has an explosion edge, well above its useful edge.
assert edges["explosion_edge"].notna().tolist() == [False, False, False, True]
assert edges.loc["No norm, Xavier", "explosion_edge"] > 2 * edges.loc["No norm, Xavier", "useful_edge"]
# The two short runs: one explodes, the other does not.
assert float(trained["no norm"]["monitors"]["loss"].max()) > 50
assert trained["no norm"]["monitors"].sizes["step"] < trained["Pre-LN"]["monitors"].sizes["step"] == 60
# The prediction is of a design with normalization within the measured range.
assert 0 < predicted.slow_edge.value < predicted.useful_edge.value
# The table: one row reaches the target, and at 480 updates the median edge is best.
rows = hits.reset_index("designs", drop=True)
assert (rows["pilot of 1,000 updates"] >= 0.8).sum() == 1
assert rows.loc[240].idxmax() == "pilot of 1,000 updates"
assert rows.loc[480].idxmax() == "median edge"
assert rows.loc[480].max() < 0.8
