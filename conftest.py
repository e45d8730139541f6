"""Rules for every test, notebooks included."""

import os

import pytest

#: Tests that may be skipped on a laptop, but never silently in CI.
MUST_RUN_IN_CI = ("tests/browser", "notebooks/", "smollm2")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With CI=true, a skipped browser, notebook or real-weights test is a failure."""
    outcome = yield
    report = outcome.get_result()
    names = (item.nodeid, *(marker.name for marker in item.iter_markers()))
    must_run = any(must in name for must in MUST_RUN_IN_CI for name in names)
    if report.skipped and must_run and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
