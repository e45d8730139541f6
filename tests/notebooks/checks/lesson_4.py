"""The claims of lesson 4, checked in its namespace after its last cell."""

# ruff: noqa: F821

# The fault is marked, and the probe of arithmetic is first, hundreds of steps before loss and gradient norm.
raised = {name: wb.alarms.replay(run, wb.Alarms(false_alarms=1)) for name, run in runs.items()}
assert raised["healthy"] == []
assert raised["faulted"][0].signal == "arithmetic"
late = next(alarm.step for alarm in raised["faulted"] if alarm.signal in ("loss", "grad_norm"))
assert onset < raised["faulted"][0].step < late - 200
# A larger rate of false alarms raises one in the healthy run.
assert wb.alarms.replay(runs["healthy"], wb.Alarms(false_alarms=1000))
# The simple rule also raises alarms in the healthy run, and one before the onset.
assert first["healthy"]
assert first["faulted"][0] < onset
# The loss alone missed some kinds of faults entirely; the alarms find nearly all.
assert kinds["delay_of_loss"].isna().any()
assert sensitivity > 0.9
# Without a changed signal no fault is named, though the probabilities of the known faults add up to 1.
assert nothing.cause == "unknown" and "unknown" in nothing.message
assert abs(sum(nothing.probability.values()) - 1) < 1e-9
