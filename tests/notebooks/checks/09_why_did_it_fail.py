"""The claims of notebook 09, checked in its own namespace after its last cell."""

# ruff: noqa: F821

# The table of evidence holds what the reader needs: A starts far above a guess, the others at one.
assert facts["A"]["first loss"] > 10
assert all(abs(facts[name]["first loss"] - np.log(10)) < 0.1 for name in "BCD")
# The rate of run B alone rises after its warm-up; run D alone learns and does not fail.
assert [name for name in facts if facts[name]["rate rises after step 20"] == "yes"] == ["B"]
assert facts["D"]["steps"] == 200
assert facts["D"]["last loss"] < 1.6
assert [facts[name]["steps"] < 200 for name in "ABC"] == [True] * 3
# The answers: each kind once, and what the diagnosis says of each.
assert sorted(path.stem for path in paths.values()) == sorted(kinds)
firsts = {name: tree["causes"]["cause"].values[0] for name, tree in trees.items()}
assert (firsts["A"], firsts["B"], firsts["D"]) == ("architecture", "schedule", "nothing")
possible = {name: int(tree["causes"]["is_possible"].sum()) for name, tree in trees.items()}
assert possible["A"] == possible["B"] == 1
assert float(trees["A"]["causes"]["probability"][0]) > 0.9
assert float(trees["B"]["causes"]["probability"][0]) > 0.9
# The record of run C leaves several causes open, precision among them; after the replays that one leads.
causes = trees["C"]["causes"].to_dataset().set_index(cause="cause")
assert possible["C"] > 1
assert bool(causes["is_possible"].sel(cause="precision"))
assert after["causes"]["cause"].values[0] == "precision"
decided = after["causes"].to_dataset().set_index(cause="cause")["probability"]
assert float(decided.sel(cause="precision")) > 0.5
# A quarter of the rate helps too, yet does not become the first cause.
assert helps.all()
# The study: what the run did beats both baselines; the two targets that were missed.
assert right["mechanism"] > right["settings alone"] > right["majority class"]
assert 0.8 < right["mechanism"] < 0.87
assert table["size"]["mechanism"] < 2 < table["size"]["log"] < table["size"]["curves"]
assert table["covered"]["mechanism"] >= 0.9
replayed = accuracy.set_index("answer").loc["mechanism and one replay"]
assert replayed["first"] < 0.95
assert replayed["healthy"] < 0.95
# Nothing of the answer is on the screen before the reader opens it, and the choice may stay empty.
assert folded.count("Run ") == 4
assert set(choice) == set(runs)
