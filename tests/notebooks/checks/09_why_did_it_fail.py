"""The claims of notebook 09, checked in its namespace after its last cell."""

# ruff: noqa: F821

# The table of evidence: run A starts with a loss far above that of a uniform guess, the others at it.
assert facts["A"]["first loss"] > 10
assert all(abs(facts[name]["first loss"] - np.log(10)) < 0.1 for name in "BCD")
# Only run B has a jump of the learning rate; only run D learns and does not fail.
assert [name for name in facts if facts[name]["learning rate jumps"] == "yes"] == ["B"]
assert facts["D"]["steps"] == 200
assert facts["D"]["last loss"] < 1.6
assert [facts[name]["steps"] < 200 for name in "ABC"] == [True] * 3
# The answers: each kind occurs once; the first causes of the diagnosis.
assert sorted(path.stem for path in paths.values()) == sorted(kinds)
firsts = {name: tree["causes"]["cause"].values[0] for name, tree in trees.items()}
assert firsts == {"A": "architecture", "B": "schedule", "C": "precision", "D": "nothing"}
assert {name: tree.attrs["state"] for name, tree in trees.items() if name in "BCD"} == {
    "B": "likely", "C": "found", "D": "nothing found",
}  # fmt: skip
assert "the attention kernel is wrong" in trees["C"].attrs["summary"]
# Without facts, the record of run C does not exclude several causes, among them precision, which is first afterwards.
causes = ranked["causes"].to_dataset().set_index(cause="cause")
assert int(ranked["causes"]["is_possible"].sum()) > 1
assert bool(causes["is_possible"].sel(cause="precision"))
assert after["causes"]["cause"].values[0] == "precision"
decided = after["causes"].to_dataset().set_index(cause="cause")["probability"]
assert float(decided.sel(cause="precision")) > 0.5
# A quarter of the learning rate also helps, but does not become the first cause.
assert helps.all()
# The study: symptoms are better than both baselines; two targets are missed.
assert right["mechanism"] > right["settings alone"] > right["majority class"]
assert 0.8 < right["mechanism"] < 0.87
assert table["size"]["mechanism"] < 2 < table["size"]["log"] < table["size"]["curves"]
assert table["covered"]["mechanism"] >= 0.9
replayed = accuracy.set_index("answer").loc["mechanism and one replay"]
assert replayed["first"] < 0.95
assert replayed["healthy"] < 0.95
# The answers are hidden until the reader opens them, and no choice is required.
assert folded.count("- **Run ") == 4
assert set(choice) == set(runs)
