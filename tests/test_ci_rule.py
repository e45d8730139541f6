import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.subprocess


def status_and_words(folder, file, in_ci):
    """Run pytest on one file without plugins, which are slow to load, and return its exit status and output."""
    environment = os.environ | {
        "CI": in_ci,
        "WORKBENCH_CHROMIUM": "/nonexistent",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return found.returncode, found.stdout


@pytest.mark.parametrize(
    ("file", "marker", "in_ci", "status"),
    [
        ("tests/browser/test_a.py", "", "true", 1),
        ("tests/browser/test_a.py", "", "", 0),
        ("tests/models/test_a.py", "@pytest.mark.smollm2", "true", 1),
        ("tests/models/test_a.py", "@pytest.mark.slow", "true", 0),
    ],
)
def test_skipped_tests_fail_only_in_ci_and_only_where_they_must_run(file, marker, in_ci, status, tmp_path):
    """Uses conftest.py and the options of the project, and a test that skips."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"import pytest\n{marker}\ndef test_it():\n    pytest.skip('no such thing here')\n")
    found, words = status_and_words(tmp_path, file, in_ci)
    assert found == status, words
    assert ("which CI does not allow: " in words) == bool(status)


@pytest.mark.slow
def test_a_browser_test_is_skipped_without_a_browser_and_fails_in_ci():
    found, words = status_and_words(ROOT, "tests/browser/test_start_notebook.py", "true")
    assert found == 1, words
    assert "which CI does not allow" in words
