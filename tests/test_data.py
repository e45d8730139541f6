import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.errors import CheckpointError

ROOT = Path(__file__).parent.parent
NAMES = ("pre_ln", "no_norm")


def record_of(name):
    return json.loads((wb.samples.embedded(name) / "record.json").read_text())


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_checkpoints", ROOT / "data" / "make_checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_recorded_ones_and_small(name):
    weights = wb.samples.embedded(name) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == record_of(name)["sha256"]
    assert weights.stat().st_size < 2_000_000
    assert record_of(name)["sha256"] in (ROOT / "data" / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_validation_loss_is_the_recorded_one(name, script):
    model = wb.open_checkpoint(wb.samples.embedded(name)).model
    assert script.validation_loss(model) == pytest.approx(record_of(name)["validation_loss"], abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_the_beginning_of_a_re_run_gives_the_recorded_losses(name, script):
    norm, peak_rate = script.RECIPES[name]
    record = record_of(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, losses = script.train(norm, peak_rate, record["n_steps"], stop_at=21)
    torch.set_num_threads(threads)
    recorded = {step: record["training_loss"][step] for step in losses}
    assert len(recorded) == 5
    assert losses == pytest.approx(recorded, abs=2e-3)


def test_unknown_samples_are_named():
    with pytest.raises(CheckpointError, match="No embedded checkpoint is called 'gpt'; there are no_norm, pre_ln"):
        wb.samples.embedded("gpt")
