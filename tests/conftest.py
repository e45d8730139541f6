"""Fixtures of all tests."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.waiting import on_one_thread

# nbformat loads jsonschema, which would compile a grammar of addresses for 5 seconds; no notebook has any.
sys.modules.setdefault("rfc3987_syntax", None)

# The duration of an example depends on the machine and on the loaded modules, so it has no deadline.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread_per_worker():
    """One thread for each of two workers on two cores, because more threads would wait for each other."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _observation_costs_nothing():
    """Every part is measured at its cadence, as on a machine where observation takes no time."""
    from workbench.io import run_output

    run_output.stopwatch = lambda: 0.0


class FakeNotebook:
    """Replacement of the IPython of a kernel; ``contents`` holds the successive contents of its displays."""

    def __init__(self):
        self.contents, self.n_displays = [], 0

    @property
    def lines(self):
        return [content["text/plain"] for content in self.contents]

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.n_displays += 1
        self.contents.append(content)
        return self

    def update(self, content, *, raw):
        assert raw
        self.contents.append(content)


@pytest.fixture
def notebook(monkeypatch):
    """A notebook in which progress is shown without delay."""
    shown = FakeNotebook()
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.display))
    monkeypatch.setattr("workbench.io.progress._DELAY", 0.05)
    monkeypatch.setattr("workbench.io.progress._Notebook.every", 0.05)
    return shown


@pytest.fixture
def one_thread():
    """One thread, with which the recorded data were generated."""
    with on_one_thread():
        yield
