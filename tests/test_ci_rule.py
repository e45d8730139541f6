import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("in_ci", "status"), [("true", 1), ("", 0)])
def test_a_skipped_browser_test_fails_in_ci_alone(in_ci, status):
    # One file is enough for the rule, which stands in conftest.py; plugins take longer to load than it takes to skip.
    environment = os.environ | {
        "CI": in_ci,
        "WORKBENCH_CHROMIUM": "/nonexistent",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/browser/test_start_notebook.py"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stdout
    assert ("which CI does not allow" in found.stdout) == bool(status)
