"""The flow dataset with its attributes, options and errors; the model is not changed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.flow.nets import deep_net
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import MAKERS, TEXT, inputs_for
from workbench.errors import AnatomyError, OptionError, SnapshotError
from workbench.flow import FLOW
from workbench.flow.flow_measurement import first_examples, measure, one_sequence


@pytest.fixture(scope="module")
def model():
    return wb.zoo.transformer(**TEXT)


@pytest.mark.parametrize("name", ["transformer", "parallel", "switch", "mamba tied", "kan xavier", "vit sub_ln"])
def test_the_zoo(name):
    model = MAKERS[name](0)
    flow = measure(model, inputs_for(model, n_tokens=4), n_jacobian_tokens=4)
    for variable, rule in FLOW.items():
        assert flow[variable].dims == rule.dims
        assert flow[variable].attrs == rule.attrs
        assert flow[variable].dtype == np.float64
    of_routing = ["routing_entropy_share", "max_violation", "routing_margin"]
    of_attention = ["attention_entropy_share", "attention_logit_std", "attention_logit_max", "sink_share"]
    absent = [*(of_attention if "mamba" in name else []), *([] if name == "switch" else of_routing)]
    for variable in FLOW:
        assert np.isnan(flow[variable]).all() == (variable in absent), variable
    is_without_attention = "No attention was observed in any block" in flow.attrs["unseen"]
    assert is_without_attention == ("mamba" in name)
    assert list(flow["layer_name"].values) == ["blocks.0", "blocks.1"]
    assert flow.attrs["n_tokens"] == (48 if "vit" in name else 12)
    assert flow.attrs["cotangent"] == (
        "random direction at the output, seed 0" if "vit" in name else "loss on next tokens"
    )


def described(model):
    """Return everything that a measurement of a model might change."""
    return (
        {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()},
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), set(m.__dict__)) for m in model.modules()],
        [parameter.grad for parameter in model.parameters()],
        getattr(model.config, "use_cache", None),
        torch.get_rng_state(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "mamba", "moe"])
def test_the_model_is_left_as_it_was(name):
    model = MAKERS[name](0) if name == "moe" else build(BY_NAME[name])
    tokens = inputs_for(model, n_tokens=6) if name == "moe" else make_inputs(BY_NAME[name])
    model.train()
    next(model.parameters()).requires_grad_(False)
    before, given = described(model), tokens.clone()
    flow = measure(model, tokens, n_jacobian_tokens=2)
    after = described(model)
    assert torch.equal(tokens, given)
    assert before[0].keys() == after[0].keys()
    for key, (tensor, needs) in before[0].items():
        assert torch.equal(tensor, after[0][key][0])
        assert needs == after[0][key][1]
    assert torch.equal(before[4], after[4])
    for i in (1, 2, 3, 5, 6):
        assert before[i] == after[i]
    again = measure(model, tokens, n_jacobian_tokens=2)
    for variable in FLOW:
        np.testing.assert_array_equal(flow[variable], again[variable])


def test_padding_does_not_count():
    model = build(BY_NAME["llama"]).double()
    tokens = make_inputs(BY_NAME["llama"])
    expected = measure(model, tokens)
    padded = {
        "input_ids": torch.cat([tokens, torch.zeros_like(tokens)], 1),
        "attention_mask": torch.cat([torch.ones_like(tokens), torch.zeros_like(tokens)], 1),
    }
    flow = measure(model, padded)
    assert flow.attrs["n_tokens"] == expected.attrs["n_tokens"] == tokens.numel()
    for variable in FLOW:
        np.testing.assert_allclose(flow[variable], expected[variable], rtol=1e-6, atol=1e-12, err_msg=variable)


def test_no_more_tokens_than_requested(model):
    tokens = inputs_for(model, n_examples=8)
    flow = measure(model, tokens, n_tokens=60, jacobian=False)
    assert flow.attrs["n_tokens"] == 60
    first = measure(model, [tokens[:3], tokens[3:]], jacobian=False)
    np.testing.assert_array_equal(flow["gradient_norm"], first["gradient_norm"])
    short = measure(model, tokens, n_tokens=6, n_jacobian_tokens=3)
    assert (short.attrs["n_tokens"], short.attrs["n_jacobian_entries"]) == (6, 48)


def test_inputs_and_targets_are_truncated_together():
    tokens, targets = torch.arange(40).view(4, 10), torch.arange(40, 80).view(4, 10)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "scale": 2}
    cut, kept = first_examples(batch, targets, 25)
    assert cut["input_ids"].shape == cut["attention_mask"].shape == kept.shape == (2, 10)
    cut, kept = first_examples(batch, targets, 5)
    assert cut["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert kept.tolist() == [[40, 41, 42, 43, 44]]
    states = torch.randn(4, 10, 3)
    # States are not truncated within a sequence.
    assert first_examples(states, torch.arange(4), 5)[0].shape == (1, 10, 3)
    batch["attention_mask"][:, :4] = 0
    batch["attention_mask"][2, 2:4] = 1  # left padding, the third sequence with the least
    assert one_sequence(batch, 3)["input_ids"].tolist() == [[22, 23, 24]]


def test_equal_tokens_have_collapsed(model):
    tokens = torch.full((2, 6), 5)
    without_positions = copy.deepcopy(model)
    with torch.no_grad():
        without_positions.position_embedding.weight.zero_()
    flow = measure(without_positions, tokens, jacobian=False)
    np.testing.assert_allclose(flow["token_cosine"], 1.0, rtol=1e-5)
    np.testing.assert_allclose(flow["effective_rank"], 1 / 12, rtol=1e-3)
    spread = measure(deep_net(8, 2, 1.0), torch.eye(8), jacobian=False)
    assert float(spread["effective_rank"][0]) == pytest.approx(1.0)
    assert float(spread["token_cosine"][0]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("n_singular", 0, 0),
        ("n_tokens", True, True),
        ("n_jacobian_tokens", 2.5, 2.5),
    ],
)
def test_options_out_of_range_are_rejected(model, name, value, found):
    with pytest.raises(OptionError, check=about(name, found)):
        measure(model, inputs_for(model), **{name: value})


def test_targets_that_do_not_fit_are_rejected(model):
    tokens = inputs_for(model)
    with pytest.raises(SnapshotError, check=says("pass targets that fit these inputs, or the loss for them.")):
        measure(model, tokens, targets=tokens[:, :5])
    with pytest.raises(SnapshotError, check=says("expected a single number; return its mean.")):
        measure(model, tokens, targets=tokens, loss=lambda logits, targets: logits[..., 0])


def test_models_without_blocks_are_rejected():
    with pytest.raises(AnatomyError, check=says("Linear has no stack of residual blocks: no two modules of")):
        measure(nn.Linear(4, 4), torch.randn(3, 4))
