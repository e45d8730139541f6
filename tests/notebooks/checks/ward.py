"""The claims of the notebook ward, checked in its namespace after its last cell."""

# ruff: noqa: F821

assert ward.error == ""
assert ward.patient.score is None
assert ward.patient.spent == 0
assert scores.sizes["case"] == 10
assert not scores["problem"].values.any()
assert (scores["spent"] < 0.05).all()
assert wb.course.board().loc[(3, "wb.diagnose"), "n"] > 10
