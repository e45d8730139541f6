import pytest
import torch

import workbench as wb
from tests.about import says
from workbench.diagnosis import check_fits
from workbench.diagnosis.checkpoint_evidence import find_checkpoints, measure_weights
from workbench.diagnosis.diagnose import diagnose
from workbench.errors import CheckpointError
from workbench.io.training_logs import read_log

SMALL = {"d_model": 16, "n_layers": 4, "n_heads": 2, "vocab_size": 16, "max_length": 8}


def saved(folder, *, odd=None, **options):
    model = wb.zoo.transformer(**{**SMALL, **options}, seed=3)
    if odd is not None:
        with torch.no_grad():
            for weight in model.blocks[odd].parameters():
                weight.mul_(20)
    wb.save_checkpoint(model, folder)
    return model


def test_the_norm_of_each_block_is_that_of_its_matrices(tmp_path):
    model = saved(tmp_path / "step-00000010", odd=2)
    at = measure_weights(tmp_path / "step-00000010", step=10, model=model)
    for block, norm in zip(model.blocks, at.norm, strict=True):
        squares = sum(float(w.detach().double().square().sum()) for w in block.parameters() if w.ndim > 1)
        assert norm == pytest.approx(squares**0.5)


def test_a_log_with_checkpoints_names_the_odd_block(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n" + "\n".join(f"{i},{3 - 0.001 * i}" for i in range(60)) + "\n")
    saved(tmp_path / "run" / "step-00000010", odd=2)
    log = read_log(tmp_path / "log.csv")
    without = diagnose(log)["causes"].to_dataset().set_index(cause="cause")["probability"]
    tree = diagnose(log, checkpoints=tmp_path / "run")
    causes = tree["causes"].to_dataset()
    assert float(causes["probability"].sel(cause="architecture")) > float(without.sel(cause="architecture"))
    assert int(causes["layer"].sel(cause="architecture")) == 2
    evidence = tree["evidence"].to_dataset()
    of_the_cause = evidence.isel(evidence=evidence["cause"].values == "architecture")
    texts = dict(zip(of_the_cause["symptom"].values.tolist(), of_the_cause["sentence"].values.tolist(), strict=True))
    assert texts["a_block_stands_out"] == "Block 2 differs from the others, most clearly in the norm of its weights."


def test_a_checkpoint_that_does_not_fit_its_config_names_the_weight_and_both_shapes(tmp_path):
    saved(tmp_path / "wide", d_model=32)
    saved(tmp_path / "narrow")
    (tmp_path / "narrow" / "model.safetensors").write_bytes((tmp_path / "wide" / "model.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"\.weight in .*narrow has shape 16 x 32, but its config.json requires 16"
    ):
        check_fits(tmp_path / "narrow")
    with pytest.raises(CheckpointError, check=says("pass a checkpoint with its own config.json.")):
        diagnose(read_log(log_at(tmp_path)), checkpoints=tmp_path / "narrow")


def log_at(folder):
    (folder / "log.csv").write_text("step,loss\n" + "\n".join(f"{i},{3 - 0.001 * i}" for i in range(20)) + "\n")
    return folder / "log.csv"


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    saved(tmp_path / "a")
    with pytest.raises(CheckpointError, check=says("pass the checkpoint of this model.")):
        check_fits(tmp_path / "a", model=wb.zoo.transformer(**{**SMALL, "d_model": 24}))
    with pytest.raises(CheckpointError, check=says("but the model has no such weight; pass the checkpoint of")):
        check_fits(tmp_path / "a", model=wb.zoo.transformer(**{**SMALL, "n_layers": 3}))
    with_more = wb.zoo.transformer(**SMALL)
    with_more.blocks.append(torch.nn.Linear(7, 5))
    with pytest.raises(CheckpointError, check=says("which the model requires; pass the checkpoint of this model.")):
        check_fits(tmp_path / "a", model=with_more)
    check_fits(tmp_path / "a")


def test_tied_weights_fit(tmp_path):
    model = wb.zoo.gpt2_style(**SMALL)
    wb.save_checkpoint(model, tmp_path / "tied")
    check_fits(tmp_path / "tied")
    check_fits(tmp_path / "tied", model=model)


def test_a_hugging_face_checkpoint_is_checked_against_its_config(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)).save_pretrained(
        tmp_path / "checkpoint-5"
    )
    check_fits(tmp_path / "checkpoint-5")
    config = (tmp_path / "checkpoint-5" / "config.json").read_text()
    (tmp_path / "checkpoint-5" / "config.json").write_text(config.replace('"n_embd": 16', '"n_embd": 32'))
    with pytest.raises(CheckpointError, check=says("pass a checkpoint with its own config.json.")):
        check_fits(tmp_path / "checkpoint-5")


def test_checkpoints_of_both_conventions_are_found(tmp_path):
    for name in ("checkpoint-20", "checkpoint-5"):
        saved(tmp_path / "trainer" / name)
    assert list(find_checkpoints(tmp_path / "trainer")) == [5, 20]
    saved(tmp_path / "ours" / "step-00000007")
    assert list(find_checkpoints(tmp_path / "ours")) == [7]
    with pytest.raises(CheckpointError, check=says("holds no checkpoint; pass a folder with step-*,")):
        find_checkpoints(tmp_path / "nothing")
