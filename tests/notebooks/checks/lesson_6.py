"""The claims of lesson 6, checked in its namespace after its last cell."""

# ruff: noqa: F821

# One of the four keeps all contracts, and B alone is below the entropy of the texts.
verdicts = {name: [each.id for each in one.check().failed] for name, one in trainings.items()}
assert verdicts == {"A": [], "B": ["causal"], "C": ["accumulation"], "D": ["train_mode"]}
last = curves.tail(20).mean()
assert set(last.index[last < ENTROPY]) == {"B"}
# A, C and D have nearly the same curve.
assert last[["A", "C", "D"]].max() < 1.1 * last[["A", "C", "D"]].min()
assert [str(report["accumulation"].status) for report in results.values()] == ["failed", "passed"]
