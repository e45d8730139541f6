"""The claims of notebook 06, checked in its namespace after its last cell."""

# ruff: noqa: F821
import numpy as np

# ---- section 2: the loads of the experts sum to 1; all runs are measured at the same steps
assert set(runs) == {"balanced", "no auxiliary loss", "rate x 10", "rate x 40", "batch of 2"}
np.testing.assert_allclose(load.sum("expert").values, 1)
assert load.sizes == {"run": 5, "step": n_steps // 10, "layer": 2, "expert": 4}
assert all(run["monitors"].sizes["step"] == n_steps for run in runs.values())
first = {name: run["monitors"]["loss"].values[:begin] for name, run in runs.items()}
for name in ("rate x 10", "rate x 40", "batch of 2"):  # identical until the fault begins
    np.testing.assert_array_equal(first[name], first["balanced"])

# ---- sections 3 and 4: the effect of a large learning rate; other outcomes may vary
assert np.isfinite(change[signals].values).all()
assert symptoms.loc["rate x 40", "routing_entropy_share"] < -20
assert symptoms.loc["rate x 10", "routing_entropy_share"] < -2
assert (symptoms.loc[["rate x 10", "rate x 40"], "max_violation"] > 2).all()
assert change.loc["rate x 40", "routing_entropy_share"] < change.loc["rate x 10", "routing_entropy_share"]  # faster
assert symptoms.loc["rate x 40", "router_similarity"] > 2
assert (symptoms.loc[["rate x 10", "rate x 40", "batch of 2"], "loss"] > 2).all()  # visible in the loss too
assert abs(symptoms.loc["no auxiliary loss", "loss"]) < 2
assert len(verdicts) == len(claims) == 8
assert set(verdicts["holds"]) <= {"yes", "no, the opposite", "undecided"}
assert (verdicts.set_index(["run", "signal"])["holds"].loc["rate x 40"] == "yes").all()

# ---- section 5: routers of a Mixtral
assert router["expert_load"].sizes == {"step": 2, "layer": 2, "expert": 4}
