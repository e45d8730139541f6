from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.errors import OptionError
from workbench.hardware import AssessmentPlan, model_sizes, read_plan
from workbench.hardware.plan_sections import DTYPES, ORDERS, SECTIONS
from workbench.tasks import Digits, RandomTokens, SyntheticLM
from workbench.training.training_plan import SCHEDULES

SIZES = st.integers(1, 4096)
POSITIVE = st.floats(1e-12, 1e12)
TRAINING = {
    "n_steps": SIZES, "learning_rate": POSITIVE, "warmup": st.integers(0, 100), "schedule": st.sampled_from(SCHEDULES),
    "optimizer": st.sampled_from(["SGD", "adamw", "Adam"]), "clip_norm": POSITIVE, "batch_size": SIZES,
    "precision": st.sampled_from(["float32", "bf16", "fp16"]), "seed": st.integers(0, 9), "sequence_length": SIZES,
}  # fmt: skip
HARDWARE = {
    "data_parallel": SIZES, "tensor_parallel": SIZES, "pipeline_parallel": SIZES, "accumulation": SIZES,
    "gradient_dtype": st.sampled_from([*DTYPES]), "weight_dtype": st.sampled_from([*DTYPES]),
    "master_weights": st.booleans(), "bucket_mb": POSITIVE, "loss_scale": POSITIVE | st.just("dynamic"),
    "reduction_order": st.sampled_from(ORDERS),
}  # fmt: skip
TARGET = {"width": SIZES, "depth": SIZES}


def toml(sections: dict) -> str:
    """The same keys as a TOML text."""
    lines = []
    for title, keys in sections.items():
        lines += [f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in keys.items())]
    return "\n".join(lines)


def part(keys: dict) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=keys)


@settings(deadline=None, max_examples=40)
@given(training=part(TRAINING), hardware=part(HARDWARE), target=part(TARGET))
def test_what_a_plan_says_of_itself_is_the_same_plan(
    tmp_path_factory: pytest.TempPathFactory, training: dict, hardware: dict, target: dict
) -> None:
    plan = read_plan({"training": training, "hardware": hardware, "target": target})
    assert read_plan(plan.as_dict()) == plan
    assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    path.write_text(toml(plan.as_dict() | {"training": {**training}}))
    assert read_plan(path) == plan
    for name, value in hardware.items():
        assert getattr(plan.hardware, name) == value


@settings(deadline=None)
@given(ranks=st.integers(1, 300), micro=st.integers(1, 40))
def test_a_batch_that_is_not_given_can_always_be_shared(ranks: int, micro: int) -> None:
    plan = read_plan({"hardware": {"data_parallel": ranks, "accumulation": micro}})
    plan.check_against()
    assert plan.batch_size >= 32
    assert plan.batch_size - ranks * micro < 32
    assert plan.rows_per_share * plan.n_shares == plan.batch_size


def test_the_plan_of_nothing_and_a_ready_one() -> None:
    plan = read_plan()
    assert plan == AssessmentPlan()
    assert read_plan(plan) is plan
    assert plan.training_plan().optimizer == "AdamW"
    assert read_plan({"training": {"optimizer": "sgd"}}).training.optimizer == "SGD"


def test_the_training_plan_has_the_settings() -> None:
    section = {"n_steps": 7, "learning_rate": 1, "optimizer_options": {"betas": [0.9, 0.95]}, "precision": "bf16"}
    training = read_plan({"training": section}).training_plan()
    assert (training.n_steps, training.learning_rate, training.precision) == (7, 1.0, "bfloat16")
    assert training.optimizer_options == {"betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"hardware": {"tensor_paralel": 2}}, "[hardware] knows no key 'tensor_paralel'; the nearest is 'tensor_para"),
        ({"hardwre": {}}, "The plan knows no section 'hardwre'; the nearest is 'hardware'"),
        ({"data_parallel": 8}, "The key 'data_parallel' stands outside of a section; it belongs to [hardware]."),
        ({"hardware": {"n_steps": 4}}, "[hardware] knows no key 'n_steps'; it belongs to [training]."),
        ({"hardware": 3}, "[hardware] is 3, expected a section with keys."),
        ({"hardware": {"data_parallel": 0}}, "[hardware] data_parallel is 0, expected at least 1."),
        ({"hardware": {"data_parallel": 2.4}}, "expected a whole number; the nearest is 2."),
        ({"hardware": {"data_parallel": True}}, "[hardware] data_parallel is True, expected a whole number"),
        ({"hardware": {"gradient_dtype": "bloat16"}}, "the nearest is 'bfloat16'."),
        ({"hardware": {"master_weights": 1}}, "[hardware] master_weights is 1, expected true or false."),
        ({"hardware": {"loss_scale": "auto"}}, "expected 'dynamic' or a number above 0."),
        ({"hardware": {"staleness": 2}}, "the nearest is staleness = 0, or reduction = 'stale'."),
        ({"hardware": {"reduction": "stale", "staleness": 0}}, "the nearest is staleness = 1"),
        ({"training": {"learning_rate": float("nan")}}, "[training] learning_rate is nan, expected a number above 0."),
        ({"training": {"optimizer": "AdamV"}}, "[training] optimizer is 'AdamV', expected one of "),
        ({"training": {"optimizer": "SGD", "optimizer_options": {"beta": 1}}}, "[training] SGD does not take"),
        ({"training": {"optimizer_options": 3}}, "expected a table of options."),
        ({"assessment": {"widths": [64, 64]}}, "The plan knows no section 'assessment'; the nearest is"),
        ({"widths": [64, 64]}, "The plan knows no section 'widths'; the nearest is"),
        ({"target": {"width": 0}}, "[target] width is 0, expected at least 1."),
        ({"target": {"widht": 64}}, "[target] knows no key 'widht'; the nearest is 'width', of width, depth."),
        ({"target": {"depth": [2, 4]}}, "[target] depth is [2, 4], expected a whole number."),
        ({"budget": {"tokens": -1}}, "[budget] tokens is -1, expected a number above 0."),
        ({"task": {"name": "associative_recal"}}, "the nearest is 'associative_recall'."),
        ({"task": {"name": "random_tokens", "lenght": 2}}, "[task] random_tokens knows no key 'lenght'; the"),
        ({"task": {"length": 2}}, "[task] has 'length' but no name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_is_nearest(sections: dict, sentence: str) -> None:
    with pytest.raises(OptionError) as error:
        read_plan(sections)
    assert sentence in str(error.value)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="There is no plan at"):
        read_plan(tmp_path / "none.toml")
    path = tmp_path / "plan.toml"
    path.write_text("[hardware]\n\ndata_parallel = \n")
    with pytest.raises(OptionError, match=r"plan.toml is no valid TOML: .*line 3"):
        read_plan(path)
    path.write_text("[hardware]\ndata_paralell = 2\n")
    with pytest.raises(OptionError, match=r"^plan.toml: \[hardware\] knows no key 'data_paralell'"):
        read_plan(path)
    with pytest.raises(OptionError, match="The plan is a int"):
        read_plan(3)


CONFIG = wb.zoo.ArchitectureConfig(d_model=48, n_heads=6, n_kv_heads=3, n_layers=4, max_length=32, vocab_size=64)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"hardware": {"tensor_parallel": 4}}, "which does not divide the 6 attention heads; the nearest is 3."),
        ({"hardware": {"tensor_parallel": 2}}, "does not divide the 3 key-value heads; the nearest is 3."),
        ({"hardware": {"pipeline_parallel": 5}}, "pipeline_parallel is 5, but the model has 4 blocks; the nearest"),
        ({"training": {"batch_size": 30}, "hardware": {"data_parallel": 4, "accumulation": 2}}, "the nearest is 32."),
        ({"training": {"batch_size": 3}, "hardware": {"data_parallel": 8}}, "the nearest is 8."),
        ({"training": {"sequence_length": 64}}, "but the model reads at most 32 tokens; the nearest is 32."),
        ({"task": {"name": "text_bytes"}}, "has 256 tokens, but the model knows only 64"),
        ({"task": {"name": "random_tokens", "length": 40}}, "the nearest is length = 32."),
    ],
)  # fmt: skip
def test_sizes_that_a_model_cannot_have(sections: dict, sentence: str) -> None:
    plan = read_plan(sections)
    for source in (CONFIG, wb.zoo.build(CONFIG)):
        with pytest.raises(OptionError) as error:
            plan.check_against(source)
        assert sentence in str(error.value)


def test_sizes_that_a_model_can_have() -> None:
    sections = {"hardware": {"tensor_parallel": 3, "pipeline_parallel": 4}, "training": {"sequence_length": 32}}
    read_plan(sections).check_against(wb.zoo.build(CONFIG))
    # More devices than key-value heads: these are copied.
    read_plan({"hardware": {"tensor_parallel": 6}}).check_against(CONFIG)
    # What nothing says is not checked.
    read_plan({"hardware": {"tensor_parallel": 7}}).check_against(torch.nn.Linear(3, 3))


def test_sizes_are_read_from_any_description() -> None:
    from transformers import GPT2Config, MixtralConfig, ViTConfig

    sizes = model_sizes(GPT2Config())
    assert (sizes.n_heads, sizes.depth, sizes.inner_width, sizes.max_length) == (12, 12, 3072, 1024)
    sizes = model_sizes(MixtralConfig())
    assert (sizes.n_kv_heads, sizes.n_experts) == (8, 8)
    assert model_sizes(CONFIG) == model_sizes(CONFIG.as_dict()) == model_sizes(wb.zoo.build(CONFIG))
    mamba = model_sizes(wb.zoo.mamba(d_model=24, expand=2))
    assert (mamba.n_heads, mamba.inner_width) == (None, 48)
    assert model_sizes(wb.zoo.vit(image_size=16)).image_size == 16
    images = model_sizes(ViTConfig(image_size=[32, 32], patch_size=8, num_channels=4))
    assert (images.image_size, images.patch_size, images.n_channels) == (32, 8, 4)
    assert model_sizes(ViTConfig(image_size=(32, 64))).image_size is None
    t5 = model_sizes(wb.design("t5-base"))
    assert (t5.n_heads, t5.width, t5.inner_width, t5.vocabulary) == (12, 768, 3072, 32128)


def test_the_target_decides_over_the_design() -> None:
    from workbench.scaling.designs import design

    source = design("gpt2")
    read_plan({"hardware": {"tensor_parallel": 16}, "target": {"width": 1024}}).check_against(source)
    with pytest.raises(OptionError, match="the 12 attention heads; the nearest is 12"):
        read_plan({"hardware": {"tensor_parallel": 16}}).check_against(source)
    with pytest.raises(OptionError, match="has 6 blocks; the nearest is 6"):
        read_plan({"hardware": {"pipeline_parallel": 8}, "target": {"depth": 6}}).check_against(source)


def test_the_task_fits_the_model_and_is_small() -> None:
    plan = read_plan({"training": {"batch_size": 4096, "sequence_length": 2048, "seed": 5}})
    task = plan.make_task(64, max_length=128)
    assert isinstance(task, SyntheticLM)
    assert (task.length, task.vocab_size, task.batch_size, task.seed) == (128, 64, 32, 5)
    assert plan.make_task(64, seed=2).batch_size == 2
    assert isinstance(read_plan().make_task(20), RandomTokens)
    assert isinstance(read_plan().make_task(image_size=16), Digits)
    assert read_plan().make_task(image_size=16, n_channels=3, n_rows=2).probe(1).shape == (1, 3, 16, 16)
    named = read_plan({"task": {"name": "associative_recall", "n_pairs": 2}}).make_task(32, max_length=12)
    assert (named.n_pairs, named.length, named.vocab_size) == (2, 12, 32)


def test_every_section_has_a_place_in_the_plan() -> None:
    assert set(SECTIONS) == set(AssessmentPlan.__dataclass_fields__)
