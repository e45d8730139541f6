import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess

ROOT = Path(__file__).parents[1]

FORBIDDEN = ("ipywidgets", "IPython", "holoviews", "bokeh", "matplotlib", "transformers", "workbench.widgets")


def class_names(file):
    return [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_workbench_stays_headless_also_after_computing():
    code = f"""
import sys, workbench as wb, numpy as np
wb.koopman, wb.plots, wb.zoo, wb.tasks, wb.schema, wb.open_checkpoint, wb.profile, wb.save, wb.read_anatomy
rng = np.random.default_rng(0)
model, task = wb.zoo.transformer(n_layers=2, d_model=16), wb.tasks.text_bytes()
wb.summarize(wb.profile(model, task.batch(0)[0], progress=False))
for record in wb.train(model, task, n_steps=1, spectra_every=1): wb.compare({{"one": record.spectra}})
print([name for name in {FORBIDDEN!r} if name in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_import_has_no_side_effects():
    code = """
import random, numpy, torch, warnings
states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
threads, filters = torch.get_num_threads(), list(warnings.filters)
import workbench as wb
for name in dir(wb): getattr(wb, name)
assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
assert threads == torch.get_num_threads()
print("same")
"""
    assert run(code).strip() == "same"


def test_unknown_names_say_so():
    assert "No workbench attribute nothing" in run(
        "import workbench\ntry: workbench.nothing\nexcept AttributeError as e: print(e)"
    )


def test_what_needs_the_lab_says_how_to_install_it():
    code = """
import sys
for name in ("holoviews", "matplotlib", "anywidget"): sys.modules[name] = None
import workbench as wb
spectra = wb.profile(wb.zoo.transformer(n_layers=2, d_model=16), wb.tasks.text_bytes(), n_snapshots=64, progress=False)
tree = wb.samples.assessments()
for ask in (lambda: wb.plots.eigenvalue_map(spectra), lambda: wb.plots.save(None, "x.html"),
            lambda: wb.report(tree, "x.md"), lambda: __import__("workbench.widgets")):
    try:
        ask()
    except wb.errors.MissingPackageError as error:
        print(error)
"""
    head, tail = (
        "need packages that are not installed (",
        '); install them with: pip install "stability-workbench[lab]"',
    )
    assert run(code).splitlines() == [
        f"Figures {head}holoviews{tail}",
        f"Figures {head}holoviews{tail}",
        f"The pictures of a report {head}holoviews, matplotlib{tail}",
        f"The widgets {head}anywidget, holoviews, matplotlib{tail}",
    ]


def test_every_listing_shows_public_names_alone():
    code = """
import types
import workbench as wb
modules = [wb, *(getattr(wb, name) for name in dir(wb) if isinstance(getattr(wb, name), types.ModuleType))]
assert len(modules) > 20
for module in modules:
    assert dir(module) == sorted(set(module.__all__)), module.__name__
    for name in dir(module):
        assert not name.startswith("_"), f"{module.__name__}.{name}"
        getattr(module, name)
print("public")
"""
    assert run(code).strip() == "public"


def test_class_names_are_unique_in_what_people_see():
    folders = [
        *(ROOT / "workbench" / name for name in ("plots", "reports", "studies", "io", "schema")),
        ROOT / "widgets",
    ]
    everywhere = Counter(
        name
        for file in {file.resolve() for folder in ("workbench", "widgets") for file in (ROOT / folder).rglob("*.py")}
        for name in class_names(file)
    )
    mine = {name for folder in folders for file in folder.rglob("*.py") for name in class_names(file)}
    assert [name for name in mine if everywhere[name] > 1] == []
