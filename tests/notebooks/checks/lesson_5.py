"""The claims of lesson 5, checked in its namespace after its last cell."""

# ruff: noqa: F821

# All runs were planned for 200 steps; run C has a single step.
assert len(logs["C"]) == 1
assert max(len(log) for log in logs.values()) == 200
# Both changes help, but only exact arithmetic leaves precision as the single known cause.
for change, cause in changes.items():
    done = trees[change]["experiments"].to_dataset().set_index(experiment="cause").sel(experiment=cause)
    assert bool(done["supports"]), change
causes = {name: tree["causes"].to_dataset() for name, tree in trees.items()}
possible = {name: set(data["cause"].values[data["is_possible"].values]) for name, data in causes.items()}
assert possible["exact arithmetic"] == {"precision", "unknown"}
assert len(possible["quarter of the rate"] - {"unknown"}) > 1
# More than one healthy run in ten is called failed; with nine healthy runs in ten, about half of such calls are wrong.
wrong = 1 - rows["monitors of the run"]["healthy: called healthy"]
nothing = list(test["ranked_cause"].values).index("nothing")
called = test["probability"].sel(view="mechanism").values.argmax(1)
found = (called[~is_healthy] != nothing).mean()
assert wrong > 0.1
assert 0.4 < 0.9 * wrong / (0.9 * wrong + 0.1 * found) < 0.6
