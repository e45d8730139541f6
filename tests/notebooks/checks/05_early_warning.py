"""The claims of notebook 05, checked in its namespace after its last cell."""

# ruff: noqa: F821

# ---- section 1: the runs are bitwise identical until the switch; the probe is first, at its next measurement
losses = {name: run["monitors"]["loss"].values for name, run in runs.items()}
assert (losses["healthy"][: switch_at + 1] == losses["faulted"][: switch_at + 1]).all()
assert (losses["healthy"][switch_at + 1 : switch_at + 20] != losses["faulted"][switch_at + 1 : switch_at + 20]).any()
assert after[0].signal == "arithmetic"
assert switch_at <= after[0].step <= switch_at + 20
assert not any(alarm.step < switch_at for alarm in alarms["faulted"])
lead = wb.alarms.lead_time(after, divergence=last.step if last.diverged else None, since=switch_at)
assert lead.is_first
assert last.diverged or "grad_norm" in steps or "loss" in steps  # the fault harms this run on any machine
assert len(alarms["healthy"]) <= 1
assert 0.8 < ratio["loss"] < 1.25  # the loss is still that of a healthy run, but not the gradient norm
assert ratio["grad_norm"] > 1.5
excess = {
    name: float(run["precision"]["query_error_excess"].sel(step=after[0].step).max()) for name, run in runs.items()
}
assert excess["healthy"] < 25 < 1e4 < excess["faulted"]
attributions = runs["faulted"]["events"].to_dataset().to_dataframe().query("kind == 'attribution'")["message"]
assert attributions.iloc[0].startswith("This looks like low precision attention")

# ---- section 2: the recorded study, which does not depend on the machine
assert reached["runs"].tolist() == [138, 138, 29, 138, 138]
assert reached["all alarms"].tolist() == ["98%", "95%", "86%", "84%", "89%"]
assert reached["loss alone"].tolist()[:3] == ["31%", "17%", "0%"]
assert reached["gradient norm alone"].tolist()[:3] == ["15%", "7%", "17%"]
assert n_reached == 1
assert int(false["n_alarms"]) == 3
assert kinds["n_harmful"].sum() == int(ew.harmful(locked).sum())
assert len(kinds) <= 10
by_probe = kinds["first_signal"].isin(["arithmetic", "gradients", "data"])  # probes that measure the cause
assert kinds["n_harmful"][by_probe].sum() == 133
assert not kinds["first_signal"].str.contains("D2").any()
assert (failed.sizes["run"], late.sizes["run"], warned) == (8, 12, [4, 0, 0])

# ---- section 3: a custom loop
own = wb.open_run(watch.path)
assert own["monitors"].sizes["step"] == 40
assert own["attention"].sizes["step"] == 4
assert [(alarm.signal, alarm.step) for alarm in watch.alarms.raised] == [("learning_rate", 30)]

# ---- docs/explanation/alarms.md: if more false alarms are allowed, an alarm needs less evidence
thresholds = [
    wb.Alarms(false_alarms=rate).calibration.threshold("effective_rank D2", rate, n_signals=20)
    for rate in (0.01, 1.0, 100.0)
]
assert thresholds == sorted(thresholds, reverse=True)
