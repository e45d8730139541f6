from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from tests.hardware.known_gradients import Known, emulation, on_task
from workbench.hardware.emulation import NotMeasured
from workbench.hardware.hazards import compute_rounding, pipeline_boundaries, split_matrices, tensor_parallel
from workbench.models.anatomy import read_anatomy

TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_length": 16}


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(tokens)
    (output if isinstance(output, torch.Tensor) else output.logits).float().logsumexp(-1).mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16)).eval()


@pytest.mark.parametrize(("make", "n_matrices"), [(lambda: wb.zoo.transformer(**TINY), 6), (gpt2, 4)])
def test_split_matrices_yield_the_same_gradients(make, n_matrices: int) -> None:
    model, tokens = make(), torch.arange(32).view(2, 16)
    names = [site.name for site in read_anatomy(model, tokens).sites]
    unsplit, split = gradients(model, tokens), copy.deepcopy(model)
    assert len(split_matrices(split, names, 32, 4, "float32")) == 2 * n_matrices
    parts = gradients(split, tokens)
    for name, expected in unsplit.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-4, atol=1e-7)
    low = copy.deepcopy(model)
    split_matrices(low, names, 32, 4, "bfloat16")
    rounded = torch.cat([gradient.flatten() for gradient in gradients(low, tokens).values()])
    expected = torch.cat([gradient.flatten() for gradient in unsplit.values()])
    assert 1e-4 < float((rounded - expected).norm() / expected.norm()) < 0.05


def test_partial_sums_are_rounded_to_the_format() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x)

    model = nn.ModuleDict({"block": Block()})
    model["block"].down.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0], [256.0, 0.0, 1.0, 0.0]])
    assert split_matrices(model, ["block"], 2, 2, "bfloat16") == ["block.down"]
    # 256 + 1 is not a number of bfloat16: the part of the second device is lost.
    assert model["block"](torch.ones(1, 4)).tolist() == [[10.0, 256.0]]


@pytest.mark.medium
def test_the_error_increases_with_the_number_of_devices() -> None:
    model = wb.zoo.transformer(**TINY)
    plans = [{"training": {"precision": "bf16"}, "hardware": {"tensor_parallel": n}} for n in (2, 16)]
    few, many = (tensor_parallel(on_task(model, plan)) for plan in plans)
    assert 0 < few.relative_error < many.relative_error < 0.2
    exact = tensor_parallel(on_task(model, {"hardware": {"tensor_parallel": 2}}))
    assert exact.relative_error < 1e-5


def test_stages_in_float32_have_no_error() -> None:
    model = wb.zoo.transformer(**TINY)
    assert pipeline_boundaries(on_task(model, {"hardware": {"pipeline_parallel": 2}})).effect == 0
    plan = {"hardware": {"pipeline_parallel": 2}, "training": {"precision": "bf16"}}
    assert 1e-5 < pipeline_boundaries(on_task(model, plan)).relative_error < 0.02
    plan["hardware"]["pipeline_parallel"] = 8
    assert "only 2 blocks" in pipeline_boundaries(on_task(model, plan)).how


@pytest.mark.parametrize(
    "plan",
    [{"training": {"precision": "bf16"}}, {"training": {"precision": "fp16"}}, {"hardware": {"weight_dtype": "bf16"}}],
)
def test_computing_in_low_precision_has_the_error_of_its_format(plan: dict) -> None:
    finding = compute_rounding(on_task(wb.zoo.transformer(**TINY), plan))
    low, high = (1e-5, 0.005) if plan == {"training": {"precision": "fp16"}} else (1e-4, 0.1)
    assert low < finding.relative_error < high
    assert finding.cosine > 0.99


def test_an_error_common_to_all_micro_batches_does_not_average_out() -> None:
    class Constant(nn.Module):
        """A model whose gradient has the same error for every batch: 257 is not a number of bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * 257.0 + x.sum() * 0

    def mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return logits.sum()

    finding = compute_rounding(emulation(Constant(), {"hardware": {"weight_dtype": "bf16"}}, loss=mean))
    assert finding.relative_error == pytest.approx(1 / 257, rel=1e-3)
    assert finding.effect == float("inf")  # the batches have no sampling noise


def test_reasons_why_parallelism_cannot_be_measured() -> None:
    plan = {"hardware": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    with pytest.raises(NotMeasured, match="no matrix was found"):
        tensor_parallel(emulation(Known(), plan))
    with pytest.raises(NotMeasured, match="blocks of the model cannot be read"):
        pipeline_boundaries(emulation(Known(), plan))
    for measure in (tensor_parallel, pipeline_boundaries):
        with pytest.raises(NotMeasured):
            measure(emulation(Known(), {}))
