"""The claims of notebook 04, checked in its namespace after its last cell."""

# ruff: noqa: F821

CONTROLS = ["clipped at 1", "KSS, published", "KSS, recommended"]

# ---- section 2: one run without KSS, one with KSS
assert rate > wb.outcomes.largest_rate_without_explosion(sweep).sel(control="none")
assert ends["without"].diverged
assert ends["with KSS"].step > 80
kss_switches = runs["with KSS"]["events"].to_dataset().to_dataframe().query("kind == 'kss'")
assert kss_switches["step"].iloc[0] == 81  # switched off after step 80, so that the next step is without KSS
monitors = runs["with KSS"]["monitors"].to_dataset()
assert monitors["kss_enabled"].sel(step=slice(0, 80)).all()
assert not monitors["kss_enabled"].sel(step=81)
assert "kss_enabled" not in runs["without"]["monitors"]
assert monitors["kss_update_size"].sel(step=slice(0, 30)).min() == 1  # healthy steps are unchanged
assert monitors["kss_update_size"].sel(step=slice(0, 80)).min() < 0.5
same = slice(0, 30)
assert (runs["without"]["monitors"]["loss"].sel(step=same) == monitors["loss"].sel(step=same)).all()

# ---- neither M nor the spectral radius predicts which of the two runs converges
mass_column, radius_column, later_column = before.columns
assert abs(before.loc["with KSS", mass_column] - before.loc["without", mass_column]) < 0.2
assert before.loc["with KSS", radius_column] > before.loc["without", radius_column] / 4
assert before.loc["with KSS", later_column] > 3

# ---- section 3: the recorded sweep, which does not depend on the machine
assert edges["diverged, of 54"].tolist() == [30, 26, 38, 0]
assert edges["largest rate without explosion"].tolist() == ["0.0043", "0.0056", "0.0026", "0.0155"]
assert edges["the same, published"].tolist() == ["1.00", "", "2.50", ""]
assert float(sweep["learning_rate"].max()) == 0.0155  # no explosion of the recommended form
accuracies = [float(accuracy.strip("%")) for accuracy in edges["accuracy at the best rate"]]
assert max(accuracies) == accuracies[0] > accuracies[3] > 45 > accuracies[2]
assert set(verdicts["holds"]) <= {"yes", "undecided", "no, the opposite"}
assert verdicts["holds"].value_counts().to_dict() == {"undecided": 5, "yes": 2, "no, the opposite": 1}
assert verdicts.loc["published KSS saves runs", "holds"] == "no, the opposite"
assert verdicts.loc["published KSS saves runs", "accuracy gained"] == "-33.2%"
assert verdicts.loc["recommended KSS saves runs", "accuracy gained"] == "-0.5%"
against_itself = wb.outcomes.divergence_where_both_ran(tables, "none", "none")
assert int(against_itself["n_saved"]) == int(against_itself["n_lost"]) == 0
of_tables = wb.outcomes.divergence_rates(tables).sel(control=["spectral norm", "weight norm", "LAMB", "muP"])
assert (of_tables["n_diverged"] == 0).all()
assert (of_tables["n_runs"] == 9).all()

# ---- section 4: useful learning rates and best loss
assert useful["larger useful edge in both seeds"][CONTROLS].tolist() == [5, 0, 1]
assert useful["no useful rate in either seed"][CONTROLS].tolist() == [0, 5, 0]
assert useful["lower best loss in both seeds"]["clipped at 1"] == 5
is_unchanged = (loss_change[1] == 0) & (loss_change[2] == 0)
assert is_unchanged.sum()["KSS, recommended"] == 5  # KSS never acts at the best rate of these runs
assert (((loss_change[1] + loss_change[2]) / 2)["KSS, published"] > 0).all()

# ---- section 5: a custom loop
assert shaper.step == 20
assert shaper.last.control.strength == 0.5
