from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.hardware.known_gradients import Known, batches, summed
from workbench.errors import OptionError, SnapshotError
from workbench.hardware import assess_hardware, read_plan
from workbench.hardware.hazards import HAZARDS
from workbench.schema.statuses import CriterionState

TINY = {"d_model": 16, "n_layers": 2, "vocab_size": 64, "max_length": 16}
EVERYTHING = {
    "training": {"n_steps": 100, "learning_rate": 1e-3, "precision": "fp16", "batch_size": 16, "clip_norm": 1.0},
    "hardware": {
        "data_parallel": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "accumulation": 4, "gradient_dtype": "bf16",
        "accumulation_dtype": "bf16", "weight_dtype": "float16", "master_weights": False, "loss_scale": 128,
        "reduction": "stale",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> xr.Dataset:
    return assess_hardware(wb.zoo.transformer(n_heads=2, **TINY), None, EVERYTHING, n_batches=1)


def test_every_hazard_is_measured_and_compared_with_its_limits(found: xr.Dataset) -> None:
    assert found["hazard"].values.tolist() == [hazard.id for hazard in HAZARDS]
    assert found["applies"].values.all()
    assert np.isfinite(found["effect"]).all()
    assert set(found["state"].values.tolist()) <= {*CriterionState} - {CriterionState.NOT_MEASURED}
    for hazard in HAZARDS:
        row = found.sel(hazard=hazard.id)
        assert str(row["state"].values) == hazard.state_of(float(row["effect"]))
        assert row["healthy_limit"] < row["failing_limit"]
        for text in ("title", "setting", "meaning", "how", "limits_reason", "remedy_setting", "remedy_value", "unit"):
            assert str(row[text].values)
        assert row["n_trials"] >= 1
    assert found.sizes["layer"] == 2
    assert found["layer_name"].values.tolist() == ["blocks.0", "blocks.1"]
    errors = found["layer_error"].sel(hazard="allreduce_error").values
    assert found["worst_layer"].sel(hazard="allreduce_error") == int(errors.argmax())
    assert found["growth"].sel(hazard="accumulation_error", n_terms=4) > 0


def test_the_next_hazard_is_reported_and_an_exception_ends_the_assessment() -> None:
    titles: list[str] = []

    def stop_at_second(title: str) -> None:
        titles.append(title)
        if len(titles) == 2:
            raise InterruptedError

    plan = {"hardware": {"data_parallel": 2}}
    applying = [hazard.title for hazard in HAZARDS if hazard.applies(read_plan(plan))]
    model, before = Known(), torch.random.get_rng_state()
    with pytest.raises(InterruptedError):
        assess_hardware(model, batches(), plan, loss=summed, on_hazard=stop_at_second)
    assert titles == applying[:2]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hazards_that_do_not_apply_are_healthy_and_not_measured() -> None:
    found = assess_hardware(Known(), batches(), None, loss=summed)
    assert not found["applies"].values.any()
    assert set(found["state"].values.tolist()) == {"healthy"}
    assert np.isnan(found["effect"]).all()


def test_a_hazard_that_cannot_be_measured_has_a_reason() -> None:
    found = assess_hardware(Known(), batches(), {"hardware": {"pipeline_parallel": 2}}, loss=summed)
    row = found.sel(hazard="pipeline_boundaries")
    assert str(row["state"].values) == "not measured"
    assert str(row["meaning"].values) == "The residual blocks of the model cannot be read."


def test_a_known_fault_fails_and_has_a_remedy() -> None:
    plan = {"hardware": {"accumulation": 1024, "accumulation_dtype": "bf16"}}
    row = assess_hardware(Known(), batches(), plan, loss=summed).sel(hazard="accumulation_shrinkage")
    assert str(row["state"].values) == "failing"
    assert float(row["effect"]) == pytest.approx(0.75)
    assert (str(row["remedy_setting"].values), str(row["remedy_value"].values)) == ("accumulation_dtype", "float32")
    remedied = {"hardware": {"accumulation": 1024, "accumulation_dtype": "float32"}}
    row = assess_hardware(Known(), batches(), remedied, loss=summed).sel(hazard="accumulation_shrinkage")
    assert str(row["state"].values) == "healthy"


@pytest.mark.parametrize("family", ["moe", "mamba", "kan", "vit"])
def test_other_families_are_measured(family: str) -> None:
    options = {"d_model": 32, "n_layers": 2, "n_channels": 1, "image_size": 8} if family == "vit" else dict(TINY)
    options |= {"n_experts": 2} if family == "moe" else {}
    model = getattr(wb.zoo, family)(**options)
    plan = {"training": {"precision": "bf16", "batch_size": 8}, "hardware": EVERYTHING["hardware"] | {
        "weight_dtype": "bf16", "loss_scale": "dynamic", "reduction": "synchronous"}}  # fmt: skip
    plan["hardware"] |= {"accumulation": 2}
    chosen = ["allreduce_error", "activation_overflow", "tensor_parallel", "pipeline_boundaries"]
    found = assess_hardware(model, None, plan, n_batches=1, hazards=chosen)
    assert found["hazard"].values.tolist() == chosen
    assert "not measured" not in found["state"].values.tolist()


def test_invalid_input_is_rejected() -> None:
    with pytest.raises(OptionError, check=about("hazards", "allreduce", tuple(hazard.id for hazard in HAZARDS))):
        assess_hardware(Known(), batches(), hazards=["allreduce"], loss=summed)
    with pytest.raises(OptionError, check=says("of data_parallel, tensor_parallel, pipeline_parallel,")):
        assess_hardware(Known(), batches(), {"hardware": {"acumulation": 2}})
    with pytest.raises(OptionError, check=says("example; pass two or more, for their noise.")):
        assess_hardware(Known(), batches(1, 1), loss=summed)
    with pytest.raises(OptionError, check=about("n_batches", 0)):
        assess_hardware(Known(), batches(), n_batches=0)
    with pytest.raises(OptionError, check=says("The model has no trainable parameters; set requires_grad on")):
        assess_hardware(Known().requires_grad_(False), batches())
    with pytest.raises(SnapshotError, check=says("The gradients of the model are not finite on these batches,")):
        assess_hardware(Known(scale=float("nan")), batches(), {"hardware": {"data_parallel": 2}}, loss=summed)
