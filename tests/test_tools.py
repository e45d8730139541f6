import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parent.parent / "tools" / "lab.py"


@pytest.fixture
def lab():
    spec = importlib.util.spec_from_file_location("lab", LAB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_browser_is_opened_without_a_display(lab, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert "--no-browser" in lab.command([])


def test_a_browser_is_opened_on_the_workspace(lab, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab.webbrowser, "get", lambda: object())
    words = lab.command(["--port=1234"])
    assert "--no-browser" not in words
    assert words[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--LabApp.default_url=/lab/workspaces/{lab.WORKSPACE}" in words
    assert words[-1] == "--port=1234"


def test_no_browser_is_opened_if_there_is_none(lab, monkeypatch):
    def no_browser():
        raise lab.webbrowser.Error

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab.webbrowser, "get", no_browser)
    assert "--no-browser" in lab.command([])


def test_the_notebooks_are_side_by_side_in_the_workspace(lab, monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv("JUPYTERLAB_WORKSPACES_DIR", str(tmp_path))
    monkeypatch.setattr(lab.os, "execv", lambda program, words: started.append(words))
    notebooks = ["notebooks/00_start.ipynb", "notebooks/workbench.ipynb"]
    monkeypatch.setattr(sys, "argv", ["lab.py", *notebooks, "--port", "1234"])
    lab.main()
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    places = saved["data"]["layout-restorer:data"]["main"]["dock"]["children"]
    assert [place["widgets"] for place in places] == [[f"notebook:{path}"] for path in notebooks]
    assert all(saved["data"][f"notebook:{path}"]["data"]["path"] == path for path in notebooks)
    assert started[0][-2:] == ["--port", "1234"]


def test_make_lab_opens_the_workbench_beside_the_first_notebook():
    makefile = (LAB.parent.parent / "Makefile").read_text()
    assert "tools/lab.py notebooks/00_start.ipynb notebooks/workbench.ipynb\n" in makefile


@pytest.mark.subprocess
def test_an_unknown_notebook_is_named():
    found = subprocess.run([sys.executable, LAB, "notebooks/99.ipynb"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "There is no notebook notebooks/99.ipynb; choose one from the folder notebooks." in found.stderr


def test_notebooks_define_no_functions_or_classes():
    import nbformat

    notebooks = sorted((LAB.parent.parent / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert not any(line.startswith(("def ", "class ")) for cell in cells for line in cell.source.splitlines())


@pytest.mark.medium
def test_copies_hold_the_lessons_without_outputs_and_with_their_checks(tmp_path):
    import nbformat

    spec = importlib.util.spec_from_file_location("notebooks", LAB.parent / "notebooks.py")
    notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebooks)
    notebooks.copies(tmp_path / "copies")
    copied = {path.stem: path for path in notebooks.notebooks_in(tmp_path / "copies" / "notebooks")}
    assert {"00_start", "lesson_1", "lesson_5"} <= copied.keys()
    for name in ("00_start", "lesson_1"):
        *cells, last = nbformat.read(copied[name], 4).cells
        assert last.source == (notebooks.CHECKS / f"{name}.py").read_text(encoding="utf-8")
        assert not any(cell.get("outputs") for cell in cells)


#: Public names that no page, notebook, widget or script mentions, and why they stay.
KEPT = {
    "a control of the paper, which `wb.baselines.controls` returns": (
        "wb.baselines.ActivationVariance wb.baselines.Control wb.baselines.GradientPenalty "
        "wb.baselines.JacobianPenalty wb.baselines.Lion wb.baselines.RandomL2 wb.baselines.SpectralNorm "
        "wb.baselines.WeightNorm"
    ),
    "a kind of `wb.faults.catalog`, and its arithmetic": (
        "wb.faults.CorruptedData wb.faults.DroppedBucket wb.faults.LowPrecisionAttention wb.faults.NoAuxiliaryLoss "
        "wb.faults.SmallBatch wb.faults.StaleReduction wb.faults.cut_low_bits wb.faults.flash_attention"
    ),
    "a measure of the field": (
        "wb.koopman.eigenmodes wb.koopman.mass_fractions wb.monitors.log_z wb.monitors.outlier_ratio "
        "wb.monitors.router_conditioning wb.monitors.singular_values wb.monitors.spectral_entropy"
    ),
    "an exception that users catch": "wb.errors.AnatomyError wb.errors.CallError",
    "the type of an argument, or a call that a report makes": (
        "wb.Thresholds wb.hardware.assess_hardware wb.probes.first_bad_tensor wb.schema.EVENTS"
    ),
}
#: Options that nobody passes by name; the number may only fall.
N_OPTIONS = 478


@pytest.mark.medium
def test_what_nobody_uses_is_not_public():
    spec = importlib.util.spec_from_file_location("unused", LAB.with_name("unused.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names, options = module.unused()
    assert names == sorted(" ".join(KEPT.values()).split())
    assert len(options) <= N_OPTIONS
