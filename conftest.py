"""Hooks for all tests, including notebooks."""

import os

import pytest

#: Tests that may be skipped on a developer's machine, but not in CI.
MUST_RUN_IN_CI = ("tests/browser", "notebooks/", "smollm2")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a skipped browser, notebook or SmolLM2 test as failed if CI=true."""
    outcome = yield
    report = outcome.get_result()
    names = (item.nodeid, *(marker.name for marker in item.iter_markers()))
    must_run = any(must in name for must in MUST_RUN_IN_CI for name in names)
    if report.skipped and must_run and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
