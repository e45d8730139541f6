"""The corpus of training scripts is complete and consistent."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.wiring.draw import draw

FOLDER = Path(__file__).parents[2] / "benchmarks" / "wiring"
CASES = json.loads((FOLDER / "cases.json").read_text())
SPLIT = json.loads((FOLDER / "split.json").read_text())
SOUND = [c for c in CASES if not c["faulty"]]
FAULTY = [c for c in CASES if c["faulty"]]
IDS = {
    "causal",
    "labels_aligned",
    "labels_present",
    "padding_ignored",
    "mask_respected",
    "examples_independent",
    "order_matters",
    "initial_loss",
    "train_mode",
    "eval_deterministic",
    "modules_used",
    "gradients_reach_all",
    "weights_tied",
    "precision_by_position",
    "finite",
    "accumulation",
    "recompute",
    "compiled_equals_eager",
    "loss_scale",
    "clipping_order",
    "gradients_cleared",
    "optimizer_covers",
    "update_as_predicted",
    "lost_to_rounding",
    "schedule",
    "balance_loss",
    "ranks_see_different_data",
    "replicas_equal",
    "gradients_reduced",
    "shards_equal",
    "random_states",
    "batches_differ",
    "resume",
    "overfits_one_batch",
    "descends",
    "rate_in_range",
}
COMMON = [
    "labels_aligned",
    "causal",
    "padding_ignored",
    "accumulation",
    "gradients_cleared",
    "optimizer_covers",
    "gradients_reach_all",
    "schedule",
    "clipping_order",
    "examples_independent",
    "initial_loss",
    "train_mode",
]
SOUND_KEYS = {"name", "script", "launch", "style", "family", "needs", "faulty", "author"}
FAULTY_KEYS = {"name", "script", "replace", "faulty", "ids", "also", "where", "report", "sentence"}


def test_names_are_unique_and_each_script_is_a_case():
    assert max(Counter(c["name"] for c in CASES).values()) == 1
    assert sorted(c["script"] for c in SOUND) == sorted(f"scripts/{p.name}" for p in (FOLDER / "scripts").glob("*.py"))
    assert {c["script"] for c in FAULTY} <= {c["script"] for c in SOUND}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_the_text_of_a_case(case):
    text = (FOLDER / case["script"]).read_text()
    assert "workbench" not in text
    for old, new in case.get("replace", []):
        assert text.count(old) == 1, old
        assert old != new
        text = text.replace(old, new)
    compile(text, case["name"], "exec")


def test_the_entries_of_cases():
    for case in SOUND:
        assert set(case) == SOUND_KEYS, case["name"]
        assert case["launch"] in (["python"], ["torchrun", "--nproc-per-node", "2"]), case["name"]
    for case in FAULTY:
        assert set(case) == FAULTY_KEYS, case["name"]
        assert case["ids"], case["name"]
        assert case["replace"], case["name"]
        assert set(case["ids"]) | set(case["also"]) <= IDS, case["name"]
        assert not set(case["ids"]) & set(case["also"]), case["name"]
        assert case["sentence"].endswith("."), case["name"]


def test_there_are_enough():
    assert len(SOUND) >= 60
    assert len(FAULTY) >= 60
    count = Counter(i for c in FAULTY for i in c["ids"])
    assert set(count) == IDS
    assert [i for i in COMMON if count[i] < 3] == []


def test_the_split_parts_scripts():
    names = [*SPLIT["open"], *SPLIT["locked"]]
    assert sorted(names) == sorted(c["name"] for c in CASES)
    script_of = {c["name"]: c["script"] for c in CASES}
    is_open, is_locked = ({script_of[n] for n in SPLIT[part]} for part in ("open", "locked"))
    assert not is_open & is_locked
    for style in {c["style"] for c in SOUND}:
        scripts = {c["script"] for c in SOUND if c["style"] == style}
        assert abs(len(scripts & is_locked) - len(scripts) / 3) <= 1, style


def test_nothing_is_left_to_draw():
    assert draw(CASES, SPLIT) == SPLIT


def test_a_new_script_moves_no_other():
    new = {"name": "new", "script": "scripts/new.py", "style": "loop", "faulty": False}
    grown = draw([*CASES, new], SPLIT)
    assert set(SPLIT["open"]) <= set(grown["open"])
    assert set(SPLIT["locked"]) <= set(grown["locked"])
