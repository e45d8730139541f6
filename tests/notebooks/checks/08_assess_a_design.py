"""The claims of notebook 08, checked in its namespace after its last cell."""

# ruff: noqa: F821

# Section 1: a healthy structure at a rate that is too large according to the pilot; the advice proposes a rate.
assert assessment.attrs["structure_state"] == "healthy"
assert assessment.attrs["pilot_state"] in ("at risk", "failing")
assert assessment.attrs["verdict"] in ("at risk", "refuse")
(lower,) = [text for text in advice["text"] if "peak learning rate" in text]
assert f"{proposed:.2g}" in lower
assert "0.05" in lower
assert proposed < 0.02
# Section 2: a faulty structure has the verdict "refuse".
assert (refused.attrs["verdict"], refused.attrs["exit_status"]) == ("refuse", 2)
assert refused.attrs["structure_state"] == "failing"
# Section 3: the proposed rate learns more than the planned one, and the faulty design diverges.
assert not ends["as planned"]["cause"]
assert not ends["at the proposed rate"]["cause"]
assert ends["at the proposed rate"]["loss"] < ends["as planned"]["loss"] - 0.2
assert ends["as planned"]["loss"] < np.log(64)
assert ends["faulty design"]["cause"]
assert ends["faulty design"]["last step"] < 20
# Section 4: the four published designs.
assert len(designs) == 4
assert (designs["verdict"] == "proceed").all()
assert (designs["structure_state"] == "healthy").all()
assert (designs["pilot_state"] == "healthy").all()
assert (designs["useful_edge_high"] / designs["useful_edge_low"] > 10).all()
# Section 5: the fraction of flagged designs in the test families, and the designs that are missed.
assert flagged.loc["verdict", "trains"] <= 0.05
assert 0.7 < flagged.loc["verdict", "fails"] < 0.9
assert flagged.loc["settings alone", "trains"] > 5 * flagged.loc["verdict", "trains"]
assert flagged.loc["verdict", "fails"] > flagged.loc["settings alone", "fails"]
assert (flagged.loc["always proceed", ["trains", "fails"]] == 0).all()
assert int((outcome == "fails").sum()) == 11
assert (study["kind"] == "published").sum() == 79
assert (study["kind"] == "sound").sum() == 82
failing = study[(study["kind"] == "planted") & study["fails"]]
missed = failing[~failing["verdict"].isin(["at risk", "refuse"])]
of_rates = missed["fault"].isin(["no warm-up, five times the rate", "ten times the rate"]).sum()
without_norm = (missed["fault"] == "no normalization").sum()
assert of_rates + without_norm > len(missed) / 2
