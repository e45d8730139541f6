"""The claims of the notebook workbench, checked in its namespace after its last cell."""

# ruff: noqa: F821

assert {"pre_ln", "no_norm", "Pre-LN", "plan.toml"} <= set(bench.sources)
bench.ticked, bench.shown = ["pre_ln", "no_norm"], ["spectra"]
bench.wait()
assert bench.error == ""
lines = {}
exec(bench.code, lines)
for name, spectra in bench.views["spectra"].spectra.items():
    assert lines["spectra"][name].equals(spectra)
