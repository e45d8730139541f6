"""The choice of features of the risk model: an informative feature is kept, noise is not."""

import numpy as np
import pytest

from tests.data_scripts import FOLDER, load_script

pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def script():
    return load_script("fit_risk")


def distribution(mean, below, above):
    return {"useful_edge": np.array([[mean, below, above]])}


def test_two_distributions_are_combined_by_their_precision(script):
    found = script.joined(distribution(0.0, 1.0, 2.0), distribution(3.0, 1.5, 1.5))["useful_edge"][0]
    assert found == pytest.approx([1.5, np.sqrt(0.5), 2 * np.sqrt(0.5)])
    sharp = script.joined(distribution(0.0, 1e-3, 1e-3), distribution(3.0, 1.0, 1.0))["useful_edge"][0]
    assert sharp == pytest.approx([0.0, 1e-3, 1e-3], abs=1e-5)


def test_if_one_has_no_answer_the_other_one_is_used(script):
    nowhere, somewhere = distribution(np.nan, np.nan, np.nan), distribution(1.0, 2.0, 3.0)
    for found in (script.joined(nowhere, somewhere), script.joined(somewhere, nowhere)):
        assert found["useful_edge"][0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_an_informative_feature_is_kept_and_noise_is_not(script, monkeypatch):
    rates, pilots = script.read(FOLDER / "rates.nc", has_locked=False), script.recorded(FOLDER / "rate_pilots.jsonl")
    study = script.Study.of(rates, pilots)
    known, random = study.edges["useful_edge"], np.random.default_rng(0)
    middle = np.where(np.isfinite(known.high), known.low, known.low + 1)
    study.columns["informative"] = middle + 0.3 * random.normal(size=len(middle))
    study.columns["noise"] = random.normal(size=len(middle))
    groups = {"noise": ("noise",), "informative": ("informative",), script.OF_PILOTS[0]: ("curvature",)}
    monkeypatch.setattr(script, "GROUPS", groups)
    kept, gains = script.chosen(study, script.table(rates, pilots))
    assert kept == ["informative"]
    gains = gains.set_index("features")["gain"]
    assert gains["table, informative"] > 0.3 > 0 > gains["rate alone"]
