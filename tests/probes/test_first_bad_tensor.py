"""The first value of a pass that is not finite is found where it was injected, and nowhere else."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import workbench as wb
from tests.about import about, says
from tests.probes.bad_passes import (
    HALF,
    MODELS,
    SINGLE,
    SIZE,
    TOKENS,
    Do,
    Plant,
    change,
    half,
    line,
    loss_of,
    of_line,
    place,
    planted,
    zoo,
)
from workbench.errors import OptionError
from workbench.models.losses import token_loss
from workbench.probes.failed_pass import BadTensor, first_bad_tensor

# --- healthy passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_finite_pass_is_none(name):
    model = MODELS[name]()
    assert first_bad_tensor(model, loss_of) is None
    if name in ("pre_ln", "llama"):
        assert first_bad_tensor(model, loss_of, around=half) is None


# --- injected in the forward pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_bad_parameter_is_found(name, is_trained):
    model = MODELS[name]()
    names = [key for key, weight in model.named_parameters() if ".2." in key and weight.ndim > 1]
    key = names[len(names) // 2]
    with torch.no_grad():
        weight = model.get_parameter(key)
        weight[:, 0] = torch.nan
        weight[:, 1] = torch.inf
    weight.requires_grad_(is_trained)
    bad = first_bad_tensor(model, loss_of)
    owner, _, leaf = key.rpartition(".")
    assert place(bad) == ("forward", owner, f"parameter {leaf}")
    assert (bad.n_bad, bad.n_values) == (2 * len(weight), weight.numel())
    assert bad.largest_before == float(weight[:, 2:].detach().abs().max())
    assert f"(1 of {len(list(model.parameters()))} parameters in total)" in bad.sentence


def test_a_tied_weight_is_found_where_it_causes_harm():
    model = wb.zoo.llama_style(n_heads=2, ties_embeddings=True, **SIZE)
    with torch.no_grad():
        model.head.weight[15] = torch.nan  # of a token that does not occur in the inputs
    inputs = TOKENS.clamp(max=14)
    bad = first_bad_tensor(model, lambda m: token_loss(m(inputs[:, :-1]), inputs[:, 1:]))
    assert place(bad) == ("forward", "token_embedding", "parameter weight")
    assert bad.n_bad == 16


def test_a_buffer_is_bad_only_where_it_is_used():
    model = line(nn.BatchNorm1d(4))
    model[1].running_mean.fill_(torch.nan)
    assert first_bad_tensor(model, of_line) is None  # it is not used in train mode
    model[1].eval()
    bad = first_bad_tensor(model, of_line)
    assert place(bad) == ("forward", "1", "buffer running_mean")
    assert model[0].training
    assert not model[1].training


OPERATIONS = {
    "exp": (lambda x: (x + 100).exp(), SINGLE),
    "log": (lambda x: (x * 0).log(), "the logarithm of zero"),
    "log ": (lambda x: (x * 0 - 1).log(), "the logarithm of a negative number"),
    "sqrt": (lambda x: (x * 0 - 1).sqrt(), "the root of a negative number"),
    "div": (lambda x: x / (x * 0), None),
    "mm": (lambda x: ((1e30 * x[0]) @ (1e30 * x[0]).T @ x[0]).expand_as(x), SINGLE),
    "mul": (lambda x: x.mul_(1e38).mul_(1e38), SINGLE),
    "to_copy": (lambda x: (x + 1e6).half().float(), HALF),
    "mean": (lambda x: x * x[x.detach() > 1e9].mean(), "there are no values to average"),
    "softmax": (lambda x: x.masked_fill(x.detach() < 1e9, -torch.inf).softmax(-1), None),
    "sum": (lambda x: x + (x * 0 + 3e38).sum(), SINGLE),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_the_operation_is_named(case):
    function, suggestion = OPERATIONS[case]
    model = zoo()
    model.blocks[2].mlp = nn.Sequential(model.blocks[2].mlp, Do(function))
    bad = first_bad_tensor(model, loss_of)
    assert place(bad) == ("forward", "blocks.2.mlp.1", "output")
    assert bad.operation == case.strip()
    assert suggestion is None or bad.suggestion == suggestion
    assert bad.suggestion
    assert bad.sentence.endswith(f": {bad.suggestion}.")


def test_inputs_are_measured():
    bad = first_bad_tensor(line(Do(lambda x: (x * 0 + 91).exp())), of_line)
    assert (bad.n_bad, bad.n_values, bad.largest_before) == (12, 12, 91.0)
    assert bad.sentence == (
        f"Forward pass: 1 returns 12 of 12 values that are not finite, by exp of finite values of at most 91: {SINGLE}."
    )


def test_a_product_overflows_only_in_float16():
    model = zoo()
    with torch.no_grad():
        model.blocks[1].mlp.up.weight.fill_(3e4)
        model.blocks[1].mlp_norm.bias.fill_(1.0)
    assert first_bad_tensor(model, loss_of) is None
    bad = first_bad_tensor(model, loss_of, around=half)
    assert place(bad) == ("forward", "blocks.1.mlp.up", "output")
    assert bad.suggestion == HALF
    assert bad.largest_before == pytest.approx(3e4, rel=1e-3)


def test_operations_between_submodules_belong_to_the_module():
    model = zoo()  # the query-key product is not a module, so the next module receives the bad values first
    with torch.no_grad():
        model.blocks[1].attention.query.weight.mul_(1e20)
        model.blocks[1].attention.key.weight.mul_(1e20)
    bad = first_bad_tensor(model, loss_of)
    assert place(bad) == ("forward", "blocks.1.attention", "output")
    assert "attention" in bad.operation
    assert bad.suggestion.startswith(SINGLE)


def test_a_loss_that_is_bad_although_the_output_is_finite():
    bad = first_bad_tensor(zoo(), lambda m: (m(TOKENS[:, :-1]) * 0).sum().log())
    assert place(bad) == ("forward", "", "loss")
    assert bad.operation == "log"
    assert bad.sentence.startswith("Forward pass: the loss is not finite, by log of finite values of at most 0:")
    hidden = torch.full((32,), -100)
    bad = first_bad_tensor(zoo(), lambda m: functional.cross_entropy(m(TOKENS[:, :-1]).flatten(0, 1), hidden))
    assert (place(bad), bad.suggestion) == (("forward", "", "loss"), "there is no target to average over")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_a_bad_batch_is_found(value):
    model = wb.zoo.vit(d_model=16, n_layers=2, n_heads=2, image_size=8, patch_size=4, n_channels=1, n_classes=5)
    images = torch.randn(2, 1, 8, 8)
    images[1, 0, 3, 3:5] = value
    bad = first_bad_tensor(model, lambda m: m(images).logsumexp(-1).mean())
    assert place(bad) == ("forward", "", "input")
    assert (bad.n_bad, bad.n_values) == (2, 128)
    assert bad.sentence == (
        "Forward pass: an input of the model has 2 of 128 values that are not finite: the batch or the"
        " code that prepares it is faulty."
    )


def test_padding_that_the_model_replaces_is_ignored():
    x = torch.full((3, 4), torch.nan)
    assert first_bad_tensor(nn.Sequential(Do(torch.nan_to_num), nn.Linear(4, 4)), lambda m: m(x).sum()) is None
    model = nn.Sequential(Do(torch.nan_to_num), nn.Linear(4, 4), Do(lambda y: 1 / (y * 0)), nn.Linear(4, 4))
    assert place(first_bad_tensor(model, lambda m: m(x).sum())) == ("forward", "2", "output")


def test_values_that_a_later_module_makes_finite_are_ignored():
    overflows, cuts = Do(lambda x: (x + 100).exp()), Do(lambda x: x.detach().clamp(max=1) + change(x.clamp(max=1)))
    model = line(overflows, cuts, nn.Linear(4, 4), Do(lambda x: (x * 0).log()))
    bad = first_bad_tensor(model, of_line)
    assert (place(bad), bad.operation) == (("forward", "4", "output"), "log")
    assert place(first_bad_tensor(line(overflows, nn.Linear(4, 4)), of_line)) == ("forward", "1", "output")


# --- masks -----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention without parameters whose mask of -inf is an input, a buffer, or computed by a submodule."""

    def __init__(self, mask, kind, hides=False):
        super().__init__()
        self.kind, self.mix = kind, nn.Linear(4, 4)
        if hides:
            mask = mask.clone()
            mask[1] = -torch.inf
        self.register_buffer("mask", mask)
        self.fill = Do(lambda scores: scores.masked_fill(mask < 0, -torch.inf))
        self.soft = nn.Softmax(-1)

    def forward(self, x, mask):
        scores = x @ x.transpose(-1, -2)
        if self.kind == "fill":
            return x + self.soft(self.fill(scores)) @ self.mix(x)
        held = self.mask if self.kind == "buffer" else mask
        return x + (scores + held).softmax(-1) @ self.mix(x)


class MaskedNet(nn.Module):
    def __init__(self, kind, *, hides=None):
        super().__init__()
        torch.manual_seed(0)
        self.mask = torch.full((5, 5), -torch.inf).triu(1)
        self.hides, self.kind = hides, kind
        self.blocks = nn.ModuleList(Masked(self.mask, kind, hides=i == hides) for i in range(3))
        self.end = nn.Linear(4, 1)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            mask = block.mask if i == self.hides else self.mask
            x = block(x, mask)
        return self.end(x)


STATES = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
KINDS = ["input", "buffer", "fill"]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_ignored(kind):
    model = MaskedNet(kind)
    assert first_bad_tensor(model, lambda m: m(STATES).sum()) is None
    model.blocks[1].mix = nn.Sequential(model.blocks[1].mix, Do(lambda x: (x + 100).exp()))
    bad = first_bad_tensor(model, lambda m: m(STATES).sum())
    assert (place(bad), bad.operation) == (("forward", "blocks.1.mix.1", "output"), "exp")


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_addition_to_a_mask_is_found(kind):
    model = MaskedNet(kind)
    with torch.no_grad():
        model.blocks[0].mix.weight.fill_(1e20)
        model.blocks[0].mix.bias.fill_(1e20)
    bad = first_bad_tensor(model, lambda m: m(STATES).sum())
    assert (place(bad), bad.operation) == (("forward", "blocks.1", "output"), "bmm")
    assert bad.suggestion == SINGLE
    assert bad.largest_before > 1e20


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_hides_everything_is_found(kind):
    bad = first_bad_tensor(MaskedNet(kind, hides=1), lambda m: m(STATES).sum())
    assert place(bad) == ("forward", "blocks.1.soft" if kind == "fill" else "blocks.1", "output")
    assert bad.operation == "softmax"
    assert "as if a mask hides every position" in bad.sentence


def test_a_mask_among_the_inputs_of_the_model_is_ignored():
    model = MODELS["llama eager"]()
    mask = torch.full((4, 1, 8, 8), -torch.inf).triu(1)

    def with_mask(m):
        return token_loss(m(TOKENS[:, :-1], attention_mask=mask).logits, TOKENS[:, 1:])

    assert first_bad_tensor(model, with_mask) is None
    model.model.layers[2].mlp.act_fn = Do(lambda x: (x * 0).log())
    assert place(first_bad_tensor(model, with_mask)) == ("forward", "model.layers.2.mlp.act_fn", "output")


# --- every place -----------------------------------------------------------------------------------------------------


def parts_of(name):
    """Return the paths of the modules in the blocks that a forward pass calls."""
    model, called = MODELS[name](), []
    for path, module in model.named_modules():
        if any(part.isdigit() for part in path.split(".")):
            module.register_forward_hook(lambda *_, path=path: called.append(path))
    loss_of(model)
    return sorted(set(called))


PARTS = {name: parts_of(name) for name in ("pre_ln", "post_ln", "moe", "mamba", "llama", "gpt2")}


@pytest.mark.medium
@settings(max_examples=20)
@given(data=st.data())
def test_a_value_injected_anywhere_is_found_there(data):
    name = data.draw(st.sampled_from(sorted(PARTS)))
    part = data.draw(st.sampled_from(PARTS[name]))
    value = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    is_backward = data.draw(st.booleans())
    model = MODELS[name]()

    def plant(module, args, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        first = Plant.apply(first, value) if is_backward else planted(first, value)
        return (first, *rest) if isinstance(output, tuple) else first

    model.get_submodule(part).register_forward_hook(plant)
    loss = loss_of(model)
    weights = list(model.parameters())
    gradients = [g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None]
    is_finite = [bool(tensor.isfinite().all()) for tensor in (loss, *gradients)]
    bad = first_bad_tensor(model, loss_of)
    assert (bad is None) == all(is_finite)
    if bad is not None and (is_backward or not is_finite[0]):
        expected = ("backward", "gradient of the input") if is_backward else ("forward", "output")
        assert place(bad) == (expected[0], part, expected[1])
        assert bad.n_bad == 1
        assert bad.sentence


# --- kinds of models -------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    state: torch.Tensor
    nothing: None


@dataclass
class Result:
    state: torch.Tensor
    name: str = "it"


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: (None, x), lambda y: y[1]),
        (lambda x: {"state": [x], "n": 3}, lambda y: y["state"][0]),
        (lambda x: Result(x), lambda y: y.state),
        (lambda x: Pair(x, None), lambda y: y.state),
        (lambda x: OrderedDict(first={"state": (x,)}), lambda y: y["first"]["state"][0]),
        (lambda x: [x[:, :2], x[:, 2:]], lambda y: torch.cat(y, -1)),
    ],
    ids=["tuple", "dict", "dataclass", "named tuple", "nested", "list"],
)
def test_outputs_and_inputs_of_any_form(wrap, unwrap):
    model = line(Do(lambda x: wrap(x.abs().neg().sqrt())), Do(lambda y: wrap(unwrap(y))), Do(unwrap))
    assert place(first_bad_tensor(model, of_line)) == ("forward", "1", "output")
    model = line(Do(wrap), Do(lambda y: wrap(Plant.apply(unwrap(y), torch.inf))), Do(unwrap))
    assert place(first_bad_tensor(model, of_line)) == ("backward", "2", "gradient of the input")


def test_modules_that_return_nothing_are_skipped():
    model = line(Do(lambda x: (Do(lambda y: None)(x), x)[1]))
    model[1].silent = Do(lambda y: None)
    model[1].function = lambda x: (model[1].silent(x), (x + 100).exp())[1]
    assert place(first_bad_tensor(model, of_line)) == ("forward", "1", "output")


@pytest.mark.parametrize("at", range(3))
def test_the_call_of_a_shared_module_is_the_right_one(at):
    calls = []

    def function(x):
        calls.append(0)
        return (x + 100).exp() if len(calls) % 3 == (at + 1) % 3 else x

    shared = Do(function)
    model = line(shared, nn.Identity(), shared, nn.Identity(), shared)
    bad = first_bad_tensor(model, of_line)
    assert (place(bad), bad.operation) == (("forward", "1", "output"), "exp")


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["forward", "backward", None])
def test_checkpointed_blocks(reentrant, kind):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            functions = {"forward": lambda x: (x + 100).exp(), "backward": lambda x: Plant.apply(x, torch.nan)}
            middle = Do(functions[kind]) if kind else nn.Identity()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
            self.blocks[1].insert(2, middle)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    x = torch.ones(3, 4, requires_grad=True)
    bad = first_bad_tensor(Checkpointed(), lambda m: m(x).sum())
    assert "apply" not in vars(CheckpointFunction)
    if kind is None:
        assert bad is None
    else:
        tensor = "output" if kind == "forward" else "gradient of the input"
        assert place(bad) == (kind, "blocks.1.2", tensor)


def test_operations_in_place_after_a_module():
    model = line(nn.Identity(), nn.ReLU(inplace=True), Do(lambda x: x.add(100).exp_()), nn.Hardtanh())
    assert place(first_bad_tensor(model, of_line)) == ("backward", "3", "gradient of the input")  # 0 times infinity
    model = line(nn.Identity(), Do(lambda x: x.add_(1e38).mul_(10)), nn.Hardshrink())
    bad = first_bad_tensor(model, of_line)
    assert (place(bad), bad.operation) == (("forward", "2", "output"), "mul")
    assert bad.largest_before == pytest.approx(1e38)
    model = line(nn.Identity(), Do(lambda x: Plant.apply(x, torch.nan)), nn.ReLU(inplace=True))
    assert place(first_bad_tensor(model, of_line)) == ("backward", "2", "gradient of the input")


def test_a_split_tensor_is_followed_by_its_parts():
    model = line(Do(lambda x: x.chunk(2, -1)), Do(lambda parts: (parts[0], planted(parts[1], torch.inf))),
                 Do(lambda parts: torch.cat(parts, -1)))  # fmt: skip
    assert place(first_bad_tensor(model, of_line)) == ("forward", "2", "output")
    for turn in (lambda x: x, lambda x: x.flip(-1)):  # first the first part is not finite, then the second
        model = line(Do(lambda x, turn=turn: turn(planted(x, torch.inf)).chunk(2, -1)), Do(lambda y: torch.cat(y, -1)))
        assert place(first_bad_tensor(model, of_line)) == ("forward", "1", "output")


def test_a_call_that_raises_an_exception_in_the_model_is_ignored():
    def failing(x):
        raise ValueError

    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.end = Do(failing), nn.Linear(4, 4)

        def forward(self, x):
            with suppress(ValueError):
                self.fails(x)
            return self.end(x).exp() * torch.inf

    assert place(first_bad_tensor(Careful(), of_line)) == ("forward", "", "output")


def test_invalid_losses_and_models_are_rejected():
    with pytest.raises(OptionError, check=about("loss_of(model)")):
        first_bad_tensor(zoo(), lambda model: model(TOKENS[:, :-1]).detach().mean())
    with pytest.raises(OptionError, check=about("loss_of(model)")):
        first_bad_tensor(zoo(), lambda model: model(TOKENS[:, :-1]))
    with pytest.raises(OptionError, check=says("The model has no trainable parameters; make some of them")):
        first_bad_tensor(zoo().requires_grad_(False), loss_of)
    model = zoo()
    next(model.parameters()).ds_id = 0  # DeepSpeed marks sharded parameters in this way
    with pytest.raises(OptionError, check=says("The model is sharded over ranks, which see only")):
        first_bad_tensor(model, loss_of)


def test_a_wrapped_model_is_named_as_the_model():
    model = line(Do(lambda x: (x + 100).exp()))
    assert first_bad_tensor(wb.Subject(model, "it", "here"), of_line).module == "1"
    assert first_bad_tensor(torch.compile(model, backend="eager"), of_line).module == "1"


def test_sentences():
    def say(*args):
        return BadTensor(*args).sentence

    assert say("a", "gradient of parameter weight", "backward", 1, 4, 2.0, (("b", 3.0), ("", 1.0))) == (
        "Backward pass: a passes back a gradient of parameter weight with 1 of 4 values that are not finite, computed"
        " from finite gradients of at most 2; the last finite gradients before it are those of b (at most 3); the first"
        " after it those of the model (at most 1)."
    )
    assert say("", "buffer mask", "forward", 1, 4, math.nan) == (
        "Forward pass: buffer mask of the model has 1 of 4 values that are not finite."
    )
    assert say("a", "gradient of the output", "backward", 4, 4, math.nan) == (
        "Backward pass: the gradient of the output of a has 4 of 4 values that are not finite, computed from"
        " finite gradients."
    )
