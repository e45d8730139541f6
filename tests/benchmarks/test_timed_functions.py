"""The private functions that benchmarks time exist, and are restored afterwards."""

from benchmarks import monitors, shaping
from workbench.callbacks.kss import Shaper


def test_functions_of_the_recorder_are_timed_and_restored():
    before = [vars(owner)[function] for owner, function, _ in monitors.TIMED]
    with monitors.all_timed() as seconds:
        assert all(vars(owner)[function] not in before for owner, function, _ in monitors.TIMED)
    assert [vars(owner)[function] for owner, function, _ in monitors.TIMED] == before
    assert not seconds


def test_functions_of_kss_are_timed_and_restored():
    before = Shaper._act, Shaper._begin_update
    with shaping.Stopwatch() as watch:
        assert Shaper._act is not before[0]
        assert Shaper._begin_update is not before[1]
    assert (Shaper._act, Shaper._begin_update) == before
    assert watch.seconds == 0
