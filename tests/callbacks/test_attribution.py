import numpy as np
import pytest

from tests.about import about
from tests.data_scripts import load_script
from workbench.callbacks.alarms import Attributor
from workbench.errors import StoreError

fitting = load_script("fitting")
RANK, RATIO, LOAD = "effective_rank D2", "update_ratio", "max_violation"


def examples(n=30, seed=0):
    """Return examples of three faults, each with a characteristic signal, with noise on all signals."""
    random = np.random.default_rng(seed)
    signature = {"low_precision_attention": RANK, "large_rate": RATIO, "no_auxiliary_loss": LOAD}
    for _ in range(n):
        for cause, telling in signature.items():
            scores = {name: float(random.normal(scale=0.3)) for name in (RANK, RATIO, LOAD)}
            scores[telling] += 1.5
            yield scores, cause


def test_known_signatures_are_distinguished_on_new_examples():
    attributor = fitting.fit_attributor(examples())
    right = [attributor.attribute(scores).cause == cause for scores, cause in examples(seed=1)]
    assert np.mean(right) > 0.95


def test_the_evidence_supports_the_cause():
    attributor = fitting.fit_attributor(examples())
    found = attributor.attribute({RANK: 2.0, RATIO: 0.1})
    assert found.cause == "low_precision_attention"
    assert found.evidence[0].startswith("effective_rank D2 has fallen (2 times")
    assert found.message.startswith("This looks like low precision attention (")
    assert sum(found.probability.values()) == pytest.approx(1)
    assert next(iter(found.probability)) == found.cause
    assert attributor.attribute({RATIO: 2.0}).evidence[0].startswith("update_ratio has risen")


def test_saving_and_opening_preserves_the_content(tmp_path):
    attributor = fitting.fit_attributor(examples())
    fitting.save_attributor(attributor, tmp_path / "a.json")
    back = Attributor.open(tmp_path / "a.json")
    for scores, _ in examples(3, seed=2):
        before, after = attributor.attribute(scores), back.attribute(scores)
        assert before.cause == after.cause
        assert after.probability[before.cause] == pytest.approx(before.probability[before.cause], abs=1e-3)


def test_a_damaged_file_is_rejected(tmp_path):
    path = tmp_path / "a.json"
    fitting.save_attributor(fitting.fit_attributor(examples(5)), path)
    path.write_text(path.read_text().replace('"large_rate",', ""))
    with pytest.raises(StoreError, check=about("path", path)):
        Attributor.open(path)
    with pytest.raises(StoreError, check=about("path", tmp_path / "absent.json")):
        Attributor.open(tmp_path / "absent.json")
