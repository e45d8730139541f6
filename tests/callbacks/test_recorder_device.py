"""Cost of a recorder on a device other than the CPU, measured on the simulated one of device_recording.py."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.callbacks import device_recording

pytestmark = pytest.mark.subprocess

#: File that reads the numbers of a part from the device -> number of waits of the host.
OF_UPDATE = {"callbacks/recorder/options.py": 1}
OF_PARTS = {
    "attention": {"callbacks/recorder/collectors.py": 1, "monitors/probe_pass.py": 1},
    "optimizer": {"callbacks/recorder/updates.py": 1},
    "precision": {"callbacks/recorder/collectors.py": 1},
    "activations": {},  # read together with attention
}
#: File that reads the tensors one by one, every 50 updates -> number of waits.
OF_TENSORS = {"callbacks/recorder/settings.py": 1}


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-W", "ignore", "-m", "tests.callbacks.device_recording"]
    return json.loads(subprocess.run(command, check=True, timeout=240, capture_output=True).stdout)


def waits(entry):
    """Return the number of waits by file."""
    of_file = Counter()
    for place, n in entry["waits"].items():
        of_file[place.partition(":")[0]] += n
    return of_file


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        ("5", []),
        ("9", ["attention", "optimizer"]),
        ("19", ["attention", "optimizer", "precision"]),
        ("49", ["attention", "optimizer", "activations"]),
    ],
)
def test_the_host_waits_once_for_each_part(found, step, parts):
    assert found[step]["parts"] == ["monitors", *parts]
    expected = Counter(OF_UPDATE) + Counter(OF_TENSORS if step == "49" else {})
    assert waits(found[step]) == sum((Counter(OF_PARTS[part]) for part in parts), expected)


def test_the_largest_losses_are_found_without_waiting(found):
    assert waits(found["largest losses"]) == {}


def test_an_update_is_measured_by_few_operations(found):
    """On a GPU a small tensor costs as much as a large one, so the tensors of a block are concatenated."""
    operations = found["9"]["operations"]
    n_modules = device_recording.N_LAYERS + 1
    assert operations["begin_update"] + operations["optimizer"] < 80 * n_modules
