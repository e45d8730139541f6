"""Assessments of tiny models of all transformers families of text and images end with a verdict or one sentence."""

import pytest

import workbench as wb
from benchmarks.third_party.every_family import build, every_kind, tiny_config
from workbench.assessment import assess as assessing
from workbench.assessment.plan_trials import rate_pilot, try_plan
from workbench.errors import WorkbenchError
from workbench.schema.statuses import Verdict

PLAN = {
    "training": {"n_steps": 60, "learning_rate": 1e-3, "batch_size": 4},
    "hardware": {"data_parallel": 2, "gradient_dtype": "bfloat16"},
}
KINDS = every_kind()
#: One of forty-eight families in `make test`, and all of them before a release.
KINDS_BY_TIER = [
    pytest.param(kind, marks=pytest.mark.medium if place % 48 == 0 else pytest.mark.slow)
    for place, kind in enumerate(KINDS)
]


@pytest.fixture
def as_little_as_possible(monkeypatch):
    monkeypatch.setitem(try_plan.__kwdefaults__, "n_updates", 2)
    monkeypatch.setitem(try_plan.__kwdefaults__, "n_trials", 1)
    monkeypatch.setitem(rate_pilot.__kwdefaults__, "budget", 200)
    monkeypatch.setitem(rate_pilot.__kwdefaults__, "seconds", 0.1)
    monkeypatch.setattr(assessing, "N_SNAPSHOTS", 64)
    monkeypatch.setattr(assessing, "N_SEEDS", 1)


def ended(subject):
    """Return the verdict, or the sentence of the error."""
    try:
        return wb.assess(subject, plan=PLAN).attrs["verdict"]
    except WorkbenchError as error:
        return str(error)


def is_an_end(text):
    return text in list(Verdict) or (len(text.split()) > 3 and text.endswith("."))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_little_as_possible")
@pytest.mark.parametrize("kind", KINDS_BY_TIER, ids=str)
def test_every_family_ends_with_a_verdict_or_a_sentence(kind):
    try:
        config = tiny_config(kind)
        model = build(kind, config)
    except Exception as error:  # noqa: BLE001  (transformers raises errors of any kind, for example for missing packages)
        pytest.skip(f"transformers does not build it: {error}")
    assert is_an_end(ended(model))
    assert is_an_end(ended(config))


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_little_as_possible")
@pytest.mark.parametrize("n_channels", [1, 4])
def test_models_of_images_with_any_number_of_channels_are_assessed(n_channels):
    kind = next(kind for kind in KINDS if str(kind) == "vit:AutoModelForImageClassification")
    config = tiny_config(kind, num_channels=n_channels)
    assert ended(config) in list(Verdict)
