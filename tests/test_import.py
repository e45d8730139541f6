import subprocess
import sys

FORBIDDEN = ("ipywidgets", "IPython", "holoviews", "bokeh", "matplotlib", "transformers", "workbench.widgets")


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
