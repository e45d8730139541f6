"""The flow dataset with its attributes, options and errors; the model is not changed."""

import copy

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import says
from tests.flow.nets import deep_net
from tests.models.model_families import BY_NAME, build, make_inputs
from tests.zoo.zoo_models import MAKERS, TEXT, inputs_for
from workbench.errors import SnapshotError
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


def test_targets_that_do_not_fit_are_rejected(model):
    tokens = inputs_for(model)
    with pytest.raises(SnapshotError, check=says("pass targets that fit these inputs, or the loss for them.")):
        measure(model, tokens, targets=tokens[:, :5])
    with pytest.raises(SnapshotError, check=says("expected a single number; return its mean.")):
        measure(model, tokens, targets=tokens, loss=lambda logits, targets: logits[..., 0])
