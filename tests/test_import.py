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
