"""Pages that stay interactive without a kernel: the file contains all steps, layers and values of the widget."""

import base64
import json
import re

import numpy as np
import pytest

from tests.widgets.recorded_runs import run_of
from workbench.widgets import ArchitectureComparison, SpectrumExplorer
from workbench.widgets.saved_page import MOST_STEPS, chosen_steps

pytestmark = pytest.mark.render


def content_of(page):
    (found,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, re.S)
    return json.loads(found)


def column(packed):
    ((kind, text),) = packed.items()
    return np.frombuffer(base64.b64decode(text), kind)


def test_models_planes_and_layers_of_an_explorer(spectra, tmp_path):
    explorer = SpectrumExplorer(spectra)
    page = explorer.save(tmp_path / "a.html").read_text()
    explorer.close()
    content = content_of(page)
    (view,) = content["views"]
    assert list(view["models"]) == ["calm", "wild"]
    assert len(view["planes"]) == 2
    assert content["n_layers"] == 6


@pytest.mark.parametrize("name", ["<!--<script>", "</script>"])
def test_a_name_in_the_page_does_not_end_it(name, spectra, tmp_path):
    explorer = SpectrumExplorer({name: next(iter(spectra.values()))})
    page = explorer.save(tmp_path / "a.html").read_text()
    explorer.close()
    assert list(content_of(page)["views"][0]["models"]) == [name]
    assert "<" not in page.partition('id="content">')[2].partition("</script>")[0]


@pytest.mark.slow
def test_every_step_of_every_view_is_there(tmp_path):
    runs = {"Pre-LN": run_of([0, 10, 20]), "wild": run_of([0, 10], n_steps=14, diverges=True, seed=20)}
    comparison = ArchitectureComparison(runs, view="layers")
    comparison.measures = ["spectral_radius"]
    comparison.step = 10
    before = comparison.view, comparison.step
    content = content_of(comparison.page())
    assert (comparison.view, comparison.step) == before
    assert [view["name"] for view in content["views"]] == ["layers", "eigenvalues", "training", "table", "radar"]
    assert (content["steps"], content["step"]) == ([0, 10, 20], 10)
    views = {view["name"]: view for view in content["views"]}
    assert all(len(view["frames"]) == 3 for view in views.values())
    assert "spectral radius" in views["layers"]["signals"]
    assert {"loss", "gradient norm"} <= set(views["training"]["signals"])
    # The modes of a step are those of the run.
    expected = np.sort(np.abs(runs["Pre-LN"].spectra["eigenvalue"].sel(step=20).values.ravel())).astype(np.float32)
    columns = [
        values["data"] for values in views["eigenvalues"]["frames"][2].values() if "modulus" in values.get("data", {})
    ]
    found = [np.sort(column(data["modulus"])) for data in columns]
    assert any(len(moduli) == len(expected) and np.allclose(moduli, expected, rtol=1e-6) for moduli in found)
    assert len(set(views["table"]["texts"])) == 3
    comparison.close()


def test_of_many_steps_some_are_chosen_and_the_present_one_is_among_them():
    steps = list(range(0, 1000, 3))
    chosen = chosen_steps(steps, 33)
    assert 33 in chosen
    assert (chosen[0], chosen[-1]) == (0, steps[-1])
    assert len(chosen) <= MOST_STEPS + 1
    assert chosen_steps([0, 5], 5) == [0, 5]
