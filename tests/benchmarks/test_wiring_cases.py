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


THREADS = json.loads((FOLDER / "threads.json").read_text())
#: Public reports worth rebuilding, by list: each is a case or is left out for a reason.
REPORTS = {
    "threads": (
        "karpathy/nanoGPT 167, huggingface/transformers 34191, huggingface/transformers 35203, "
        "huggingface/transformers 37766, huggingface/transformers 46731, huggingface/transformers 39648, "
        "pytorch/torchtitan 2323, pytorch/torchtitan 1842, NVIDIA/Megatron-LM 6660, NVIDIA/Megatron-LM 5974, "
        "NVIDIA/Megatron-LM 4426, NVIDIA/Megatron-LM 1545, NVIDIA/Megatron-LM 1617, huggingface/accelerate 2665, "
        "huggingface/accelerate 3256, pytorch/pytorch 149205, huggingface/accelerate 2624, pytorch/torchtune 2254, "
        "NVIDIA/TransformerEngine 441, SmolLM3 training report, EleutherAI/gpt-neox 1003, "
        "huggingface/transformers 29285, NVIDIA/apex 480, NVIDIA/apex 318, pytorch/pytorch 168126, "
        "pytorch/pytorch 177163, Cerebras/modelzoo 85, Lightning-AI/pytorch-lightning 1767, "
        "Lightning-AI/pytorch-lightning 12670"
    ),
    "traincheck": (
        "discuss.pytorch.org 84911, stackoverflow 60335387, huggingface/transformers 33844, "
        "huggingface/transformers 34204, pytorch/pytorch 115607, pytorch/pytorch 104336, x.com/jxmnop, "
        "stackoverflow 67180955, open-mmlab/mmpretrain 702, pytorch/pytorch 51800, microsoft/DeepSpeed 1801, "
        "pytorch/pytorch 84803, pytorch/pytorch 96600, baichuan-inc/Baichuan2 86, huggingface/transformers 17877, "
        "Lightning-AI/lightning-thunder 725, huggingface/transformers 23723, microsoft/DeepSpeed 5794"
    ),
}
THREAD_KEYS = {"name", "report", "script", "replace", "launch", "ids", "also", "where", "sentence", "yardstick"}


@pytest.mark.parametrize("yardstick", REPORTS)
def test_every_public_report_is_rebuilt_or_left_out_for_a_reason(yardstick):
    reports = [each["report"] for each in THREADS if yardstick in each["yardstick"]]
    assert sorted(reports) == sorted(REPORTS[yardstick].split(", "))


def test_the_entries_of_public_reports():
    locked = {c["script"] for c in CASES if c["name"] in SPLIT["locked"]}
    known = {c["script"]: c["launch"] for c in SOUND}
    assert max(Counter(each["name"] for each in THREADS).values()) == 1
    for each in THREADS:
        assert set(each["yardstick"]) <= {"threads", "traincheck", "table"}, each["name"]
        if "left_out" in each:
            assert set(each) == {"name", "report", "left_out", "yardstick"}
            continue
        assert set(each) == THREAD_KEYS, each["name"]
        assert each["ids"], each["name"]
        assert set(each["ids"]) | set(each["also"]) <= IDS, each["name"]
        assert not set(each["ids"]) & set(each["also"]), each["name"]
        assert each["script"] not in locked, each["name"]
        assert known.get(each["script"], each["launch"]) == each["launch"], each["name"]
        assert each["sentence"].endswith("."), each["name"]
    used = {each["script"] for each in THREADS if "script" in each}
    assert {f"threads/{p.name}" for p in (FOLDER / "threads").glob("*.py")} == {s for s in used if "threads/" in s}


@pytest.mark.parametrize("case", [each for each in THREADS if "script" in each], ids=lambda c: c["name"])
def test_the_text_of_a_public_report(case):
    text = (FOLDER / case["script"]).read_text()
    for old, new in case["replace"]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    compile(text, case["name"], "exec")
