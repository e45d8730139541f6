"""The wheel has all files that the package needs, and works without the source tree."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

#: Run from the unpacked wheel, in a separate folder, without the source tree.
_IN_A_FRESH_PYTHON = """
import sys
sys.path[:] = [{wheel!r}] + [path for path in sys.path if path and path != {root!r}]
for name in ("holoviews", "bokeh", "matplotlib", "ipywidgets", "anywidget", "IPython"):
    sys.modules[name] = None
import workbench as wb
assert wb.__file__.startswith({wheel!r}), wb.__file__
for name in dir(wb):
    getattr(wb, name)
assert len(wb.samples.recorded_runs()) == 18
assert wb.risk.shipped().deviations
assert wb.Alarms(calibration=wb.alarms.Calibration.shipped()) is not None
subject = wb.open_checkpoint(wb.samples.embedded("pre_ln"))
spectra = wb.profile(subject, wb.tasks.text_bytes().probe(512), n_snapshots=200, progress=False)
assert spectra.sizes["layer"] == 6
for ask in (lambda: wb.plots.eigenvalue_map(spectra), lambda: __import__("workbench.widgets")):
    try:
        ask()
    except wb.errors.MissingPackageError as error:
        assert 'pip install "stability-workbench[lab]"' in str(error), error
    else:
        raise AssertionError("no error")
for ask in (lambda: wb.samples.open("rate_study"), lambda: wb.samples.failed_run("precision")):
    try:
        ask()
    except wb.errors.StoreError as error:
        assert not {has_studies}, error
        assert 'pip install "stability-workbench[data]"' in str(error), error
    else:
        assert {has_studies}
print("fine")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of the package and that of the recorded studies, from a copy: setuptools leaves folders in the tree."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("workbench", "widgets", "data"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--wheel-dir", folder, source, source / "data"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    package, studies = sorted(folder.glob("*.whl"))
    return package, studies


def test_both_wheels_have_all_files_of_the_packages_once(wheels):
    package, studies = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    endings = {".py", ".pyi", ".js", ".css", ".json", ".jinja", ".typed", ".nc", ".csv", ".safetensors", ".pt"}
    expected = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in (
            ("workbench", ROOT / "workbench"),
            ("workbench/widgets", ROOT / "widgets"),
            ("workbench/data", ROOT / "data"),
        )
        for file in folder.rglob("*")
        if file.is_file()
        and not (file.suffix == ".py" and folder.name == "data")
        and (file.suffix in endings or file.name == "py.typed")
        and "parts" not in file.parts
        and not {"widgets", "data"} & set(file.relative_to(folder).parts[:1])
    }
    assert len(expected) > 300
    assert not expected - package - studies
    assert not package & studies
    assert not [name for name in package | studies if name.startswith("workbench/data/") and name.endswith(".py")]


def test_the_wheel_is_at_most_6_mb(wheels):
    assert wheels[0].stat().st_size < 6e6


@pytest.mark.parametrize("has_studies", [False, True])
def test_the_wheel_works_without_a_display_from_another_folder(wheels, tmp_path, has_studies):
    for wheel in wheels[: 1 + has_studies]:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "unpacked")
    code = _IN_A_FRESH_PYTHON.format(wheel=str(tmp_path / "unpacked"), root=str(ROOT), has_studies=has_studies)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout.endswith("fine\n"), done.stderr
