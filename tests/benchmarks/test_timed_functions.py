"""The private functions that benchmarks time exist, and are restored afterwards."""

from benchmarks import monitors, shaping
from workbench.callbacks.kss import Shaper
from workbench.io import run_output


def test_each_row_of_the_monitors_has_a_cost_in_processor_time(monkeypatch):
    for name, size in {"WIDTH": 32, "DEPTH": 2, "LENGTH": 16}.items():
        monkeypatch.setattr(monitors, name, size)
    before = run_output.stopwatch
    step, seconds = monitors.own_seconds(2, 2)
    assert run_output.stopwatch is before
    assert step > 0
    rows = monitors.table_rows(step, seconds, writer=1e-4)
    # A clock of the processor may be coarse, so that the settings take no time.
    assert {part for part, cost in seconds.items() if cost > 0} >= {"row", "batch", *monitors.BY_CADENCE}
    assert len(rows) == len(monitors.AT_EVERY_UPDATE) + len(monitors.BY_CADENCE) + 2


def test_functions_of_kss_are_timed_and_restored():
    before = Shaper._act, Shaper._begin_update
    with shaping.Stopwatch() as watch:
        assert Shaper._act is not before[0]
        assert Shaper._begin_update is not before[1]
    assert (Shaper._act, Shaper._begin_update) == before
    assert watch.seconds == 0
