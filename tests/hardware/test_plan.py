from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError
from workbench.hardware import read_plan
from workbench.hardware.plan import DTYPES, ORDERS
from workbench.models.model_sizes import model_sizes
from workbench.tasks.images import Digits
from workbench.tasks.sequences import RandomTokens, SyntheticLM
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
    """Return the keys as TOML text."""
    lines = []
    for title, keys in sections.items():
        lines += [f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in keys.items())]
    return "\n".join(lines)


def part(keys: dict) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=keys)


@settings(deadline=None, max_examples=40)
@given(training=part(TRAINING), hardware=part(HARDWARE), target=part(TARGET))
def test_a_plan_survives_conversion(
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
def test_the_default_batch_can_always_be_split(ranks: int, micro: int) -> None:
    plan = read_plan({"hardware": {"data_parallel": ranks, "accumulation": micro}})
    plan.check_against()
    assert plan.batch_size >= 32
    assert plan.batch_size - ranks * micro < 32
    assert plan.rows_per_share * plan.n_shares == plan.batch_size


def test_the_training_plan_has_the_settings() -> None:
    section = {"n_steps": 7, "learning_rate": 1, "optimizer_options": {"betas": [0.9, 0.95]}, "precision": "bf16"}
    training = read_plan({"training": section}).training_plan()
    assert (training.n_steps, training.learning_rate, training.precision) == (7, 1.0, "bfloat16")
    assert training.optimizer_options == {"betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("sections", "name", "value"),
    [
        ({"hardware": {"tensor_paralel": 2}}, "tensor_paralel", None),
        ({"hardwre": {}}, "hardwre", None),
        ({"data_parallel": 8}, "data_parallel", None),
        ({"hardware": {"n_steps": 4}}, "n_steps", None),
        ({"hardware": 3}, "hardware", 3),
        ({"hardware": {"data_parallel": 2.4}}, "data_parallel", 2.4),
        ({"hardware": {"gradient_dtype": "bloat16"}}, "gradient_dtype", "bloat16"),
        ({"hardware": {"staleness": 2}}, "staleness", 2),
        ({"hardware": {"reduction": "stale", "staleness": 0}}, "staleness", 0),
        ({"training": {"optimizer": "AdamV"}}, "optimizer", "AdamV"),
        ({"assessment": {"widths": [64, 64]}}, "assessment", None),
        ({"target": {"widht": 64}}, "widht", None),
        ({"task": {"name": "associative_recal"}}, "name", "associative_recal"),
        ({"task": {"name": "random_tokens", "lenght": 2}}, "lenght", 2),
        ({"task": {"length": 2}}, "name", None),
    ],
)
def test_invalid_plans_are_rejected(sections: dict, name: str, value: object) -> None:
    with pytest.raises(OptionError, check=about(name, value)):
        read_plan(sections)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"hardware": {"tensor_paralel": 2}}, "[hardware] has no key 'tensor_paralel'; the nearest is 'tensor_para"),
        ({"hardwre": {}}, "The plan has no section 'hardwre'; the nearest is 'hardware'"),
        ({"data_parallel": 8}, "The key 'data_parallel' is outside of a section; it belongs to [hardware]."),
        ({"hardware": {"n_steps": 4}}, "[hardware] has no key 'n_steps'; it belongs to [training]."),
        ({"hardware": {"data_parallel": 2.4}}, "[hardware]: data_parallel must be an integer of at least 1, got 2.4."),
        ({"hardware": {"gradient_dtype": "bloat16"}}, "one of 'float32', 'bfloat16', 'float16', got 'bloat16'."),
        ({"training": {"optimizer": "SGD", "optimizer_options": {"beta": 1}}}, "[training]: "),
    ],
)
def test_errors_state_the_section_and_the_nearest_key_or_value(sections: dict, sentence: str) -> None:
    with pytest.raises(OptionError) as error:
        read_plan(sections)
    assert sentence in str(error.value)


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, check=about("plan", tmp_path / "none.toml")):
        read_plan(tmp_path / "none.toml")
    path = tmp_path / "plan.toml"
    path.write_text("[hardware]\n\ndata_parallel = \n")
    with pytest.raises(OptionError, match="line 3", check=about("plan", path)):
        read_plan(path)
    path.write_text("[hardware]\ndata_paralell = 2\n")
    with pytest.raises(
        OptionError, match=r"^plan.toml: ", check=says("of data_parallel, tensor_parallel, pipeline_parallel,")
    ):
        read_plan(path)
    with pytest.raises(OptionError, check=about("source", 3)):
        read_plan(3)


CONFIG = wb.zoo.ArchitectureConfig(d_model=48, n_heads=6, n_kv_heads=3, n_layers=4, max_length=32, vocab_size=64)


@pytest.mark.parametrize(
    ("sections", "name", "value", "sentence"),
    [
        ({"hardware": {"tensor_parallel": 4}}, "tensor_parallel", 4, "a divisor of the 6 attention heads, got 4; the "),
        ({"hardware": {"tensor_parallel": 2}}, "tensor_parallel", 2, "the 3 key-value heads, got 2; the nearest is 3."),
        ({"hardware": {"pipeline_parallel": 5}}, "pipeline_parallel", 5, "at most 4, the number of blocks"),
        ({"training": {"batch_size": 30}, "hardware": {"data_parallel": 4, "accumulation": 2}}, "batch_size", 30,
         "the nearest is 32."),
        ({"training": {"batch_size": 3}, "hardware": {"data_parallel": 8}}, "batch_size", 3, "the nearest is 8."),
        ({"training": {"sequence_length": 64}}, "sequence_length", 64, "at most 32"),
        ({"task": {"name": "text_bytes"}}, "vocabulary", 256, "[task]: text_bytes has 256 tokens"),
        ({"task": {"name": "random_tokens", "length": 40}}, "length", 40, "set length = 32."),
    ],
)  # fmt: skip
def test_sizes_that_a_model_cannot_have(sections: dict, name: str, value: int, sentence: str) -> None:
    plan = read_plan(sections)
    for source in (CONFIG, wb.zoo.build(CONFIG)):
        with pytest.raises(OptionError, check=about(name, value)) as error:
            plan.check_against(source)
        assert sentence in str(error.value)


def test_sizes_that_a_model_can_have() -> None:
    sections = {"hardware": {"tensor_parallel": 3, "pipeline_parallel": 4}, "training": {"sequence_length": 32}}
    read_plan(sections).check_against(wb.zoo.build(CONFIG))
    # With more devices than key-value heads, the heads are copied.
    read_plan({"hardware": {"tensor_parallel": 6}}).check_against(CONFIG)
    # Unknown sizes are not checked.
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


def test_the_target_size_replaces_that_of_the_design() -> None:
    from workbench.scaling.designs import design

    source = design("gpt2")
    read_plan({"hardware": {"tensor_parallel": 16}, "target": {"width": 1024}}).check_against(source)
    with pytest.raises(OptionError, check=about("tensor_parallel", 16, "a divisor of the 12 attention heads")):
        read_plan({"hardware": {"tensor_parallel": 16}}).check_against(source)
    with pytest.raises(OptionError, check=about("pipeline_parallel", 8, "at most 6, the number of blocks")):
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
