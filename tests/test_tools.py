import importlib.util
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
    assert "--no-browser" in lab.command("notebooks/00_start.ipynb", [])


def test_a_browser_is_opened_on_the_notebook(lab, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab.webbrowser, "get", lambda: object())
    words = lab.command("notebooks/00_start.ipynb", ["--port=1234"])
    assert "--no-browser" not in words
    assert words[:3] == [sys.executable, "-m", "jupyterlab"]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start.ipynb" in words
    assert words[-1] == "--port=1234"


def test_no_browser_is_opened_if_there_is_none(lab, monkeypatch):
    def no_browser():
        raise lab.webbrowser.Error

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(lab.webbrowser, "get", no_browser)
    assert "--no-browser" in lab.command("notebooks/00_start.ipynb", [])


@pytest.mark.subprocess
def test_an_unknown_notebook_is_named():
    found = subprocess.run([sys.executable, LAB, "notebooks/99.ipynb"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "There is no notebook notebooks/99.ipynb; README.md lists the notebooks." in found.stderr


def test_notebooks_are_listed_and_define_no_functions_or_classes():
    import nbformat

    readme = (LAB.parent.parent / "README.md").read_text()
    notebooks = sorted((LAB.parent.parent / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        assert f"(notebooks/{path.name})" in readme
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert not any(line.startswith(("def ", "class ")) for cell in cells for line in cell.source.splitlines())
