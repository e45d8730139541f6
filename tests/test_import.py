import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FORBIDDEN = ("ipywidgets", "IPython", "holoviews", "bokeh", "matplotlib", "transformers", "workbench.widgets")


def class_names(file):
    return [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


#: All checks that need a new interpreter, in one process. The order matters: each import draws random numbers or loads
#: modules only once, and the last check removes packages.
_IN_A_FRESH_PYTHON = """
import inspect, json, random, sys, types
import numpy, torch

found = {}

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

def loaded(*names):
    return [name for name in names if name in sys.modules]

before, n_threads = states(), torch.get_num_threads()
import workbench as wb
import workbench.plots
found["drawing after importing plots"] = loaded(
    "holoviews", "bokeh", "matplotlib", "pandas", "ipywidgets", "IPython"
)
found["unknown name"] = []
for name in ("nothing", "Trian", "kss", "_private"):
    try:
        getattr(wb, name)
    except AttributeError as error:
        found["unknown name"].append(str(error))
wb.KSS()
import workbench.callbacks.adapters
found["frameworks before they are used"] = loaded("transformers", "lightning", "pytorch_lightning")
for name in dir(wb):
    getattr(wb, name)
found["import leaves the states"] = before == states() and n_threads == torch.get_num_threads()
modules = [wb, *(getattr(wb, name) for name in dir(wb) if isinstance(getattr(wb, name), types.ModuleType))]
found["modules"] = len(modules)
for module in modules:
    assert dir(module) == sorted(set(module.__all__)), module.__name__
    for name in dir(module):
        assert not name.startswith("_"), f"{module.__name__}.{name}"
        getattr(module, name)
functions = [getattr(m, name) for m in modules for name in dir(m) if inspect.isfunction(getattr(m, name))]
found["open signatures"] = [
    f"{f.__module__}.{f.__name__}"
    for f in functions
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(f).parameters.values())
]
found["drawing after every name"] = loaded(*FORBIDDEN)

model, task = wb.zoo.transformer(n_layers=2, d_model=16), wb.tasks.text_bytes()
spectra = wb.profile(model, task.batch(0)[0], n_snapshots=64, progress=False)
wb.summarize(spectra)
for record in wb.train(model, task, n_steps=1, spectra_every=1):
    wb.compare({"one": record.spectra})
found["drawing after computing"] = loaded(*FORBIDDEN)

found["optimizers before they are created"] = (wb.baselines.controls(), loaded("pytorch_optimizer"))[1]
before = states()
wb.baselines.Lion()(list(model.parameters()))
found["optimizers leave the states"] = before == states() and bool(loaded("pytorch_optimizer"))
found["digits before they are used"] = loaded("sklearn.datasets")
before = states()
wb.tasks.digits().batch(0)
found["digits leave the states"] = before == states() and bool(loaded("sklearn.datasets"))

for name in ("holoviews", "matplotlib", "anywidget"):
    sys.modules[name] = None
found["without the lab"] = []
tree = wb.samples.open("assessments")
for ask in (
    lambda: wb.plots.eigenvalue_map(spectra),
    lambda: wb.report(tree, "x.md"),
    lambda: __import__("workbench.widgets"),
    lambda: wb.Timeline,
):
    try:
        ask()
    except wb.errors.MissingPackageError as error:
        found["without the lab"].append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """The results of the checks in a new interpreter."""
    code = f"FORBIDDEN = {FORBIDDEN!r}\n{_IN_A_FRESH_PYTHON}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.subprocess
def test_computing_loads_no_drawing_library(found):
    assert found["drawing after every name"] == found["drawing after computing"] == []


@pytest.mark.subprocess
def test_import_has_no_side_effects(found):
    assert found["import leaves the states"]


@pytest.mark.subprocess
def test_importing_plots_loads_no_drawing_library(found):
    assert found["drawing after importing plots"] == []


@pytest.mark.subprocess
def test_no_framework_is_imported_before_it_is_used(found):
    assert found["frameworks before they are used"] == []


@pytest.mark.subprocess
def test_the_optimizer_package_is_loaded_when_one_of_its_optimizers_is_created(found):
    assert found["optimizers before they are created"] == []
    assert found["optimizers leave the states"]


@pytest.mark.subprocess
def test_importing_scikit_learn_does_not_change_the_random_states(found):
    """Only the first import draws random numbers."""
    assert found["digits before they are used"] == []
    assert found["digits leave the states"]


@pytest.mark.subprocess
def test_unknown_names_are_reported(found):
    assert found["unknown name"] == [
        "No workbench attribute nothing",
        "No workbench attribute Trian; did you mean wb.train?",
        "No workbench attribute kss; did you mean wb.KSS?",
        "No workbench attribute _private",
    ]


@pytest.mark.subprocess
def test_missing_packages_of_the_lab_are_named_with_their_installation(found):
    head, tail = (
        "need packages that are not installed (",
        '); install them with: pip install "stability-workbench[lab]"',
    )
    assert found["without the lab"] == [
        f"Figures {head}holoviews{tail}",
        f"The pictures of a report {head}holoviews, matplotlib{tail}",
        *[f"The widgets {head}anywidget, holoviews, matplotlib{tail}"] * 2,
    ]


@pytest.mark.subprocess
def test_listings_show_only_public_names(found):
    assert found["modules"] > 20


@pytest.mark.subprocess
def test_signatures_show_all_parameters(found):
    """The exception are the axes of a grid, which are keywords of custom architectures."""
    assert found["open signatures"] == ["workbench.sweeps.run_settings.grid"]


def test_class_names_are_unique_in_user_facing_packages():
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
