"""The claims of notebook 10, checked in its namespace after its last cell."""

# ruff: noqa: F821

# The sound training breaks nothing, each other one the contract of its fault; the one that may be meant is a question.
expected = {
    "sound": "none",
    "labels shifted twice": "labels_aligned",
    "no causal mask": "causal",
    "padding in the loss": "padding_ignored",
    "head replaced after the optimizer": "optimizer_covers",
    "blocks alone optimized": "none",
    "left in eval mode": "train_mode",
}
assert table["broken contracts"].to_dict() == expected
assert reports["blocks alone optimized"]["optimizer_covers"].status.value == "could not be tested"
assert "is that on purpose?" in reports["blocks alone optimized"]["optimizer_covers"].evidence
# Every curve falls, and the lowest is that of a model that sees its answers.
first = {name: run["monitors"]["loss"].values[:5].mean() for name, run in runs.items()}
assert all(table["last loss"][name] < 0.8 * first[name] for name in runs)
assert table["last loss"].idxmin() == "no causal mask"
# The picture shows outputs before the token that was changed.
picture = reports["no causal mask"]["causal"].picture
assert sum(picture[i][j] > 0 for i in range(len(picture)) for j in range(i)) > len(picture)
assert accepted["labels_aligned"].status.value == "accepted"
assert accepted.verdict != "failed"
assert done.returncode == 1
assert "gradients_cleared" in done.stdout
assert "broadcast" in done.stdout
