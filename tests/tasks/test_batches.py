"""Forms of batches, and the inputs and targets that they are converted to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests.about import about, says
from workbench.errors import WorkbenchError
from workbench.tasks.batch_forms import as_batch, looks_like_batch, stack_rows
from workbench.tasks.user_data import n_states

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]])
NEXT = [[6, 7, 8, -100], [1, 2, 3, -100]]


@pytest.mark.parametrize(
    "batch",
    [
        TOKENS,
        TOKENS.int(),
        TOKENS.numpy(),
        [TOKENS],
        (TOKENS,),
        {"input_ids": TOKENS},
        {"input_ids": TOKENS.tolist(), "text": ["a", "b"]},
        {"input_ids": TOKENS, "labels": TOKENS},
        {"input_ids": TOKENS, "labels": None, "attention_mask": None},
    ],
)
def test_targets_of_token_ids_are_the_next_tokens_and_all_positions_are_kept(batch):
    inputs, targets = as_batch(batch)
    assert torch.equal(inputs, TOKENS)
    assert inputs.dtype == targets.dtype == torch.int64
    assert targets.tolist() == NEXT
    assert TOKENS.tolist() == [[5, 6, 7, 8], [9, 1, 2, 3]]


def test_masks_are_inputs_and_mask_targets():
    """A target is ignored if it or its position is padding, on the left or on the right."""
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    inputs, targets = as_batch({"input_ids": TOKENS, "attention_mask": mask, "position_ids": TOKENS * 0, "idx": [1, 2]})
    assert list(inputs) == ["input_ids", "attention_mask", "position_ids"]
    assert torch.equal(inputs["attention_mask"], mask)
    assert targets.tolist() == [[6, 7, -100, -100], [-100, 2, 3, -100]]


def test_the_loss_is_that_of_hugging_face():
    """Oracle: the loss that a model of transformers computes from the same labels and mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    tokens = torch.randint(50, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [2]])).long()
    labels = torch.where(mask == 1, tokens, -100)
    labels[0, :4] = -100  # a prompt
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    inputs, targets = as_batch(batch)
    output = model(**batch)
    ours = cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(ours, output.loss, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    n_rows=st.integers(1, 5),
    length=st.integers(1, 7),
    form=st.sampled_from(["tensor", "array", "list", "tuple", "columns", "pair"]),
)
def test_stacked_rows_are_the_batch(n_rows, length, form):
    tokens = torch.randint(99, (n_rows, length), generator=torch.Generator().manual_seed(n_rows))
    make = {
        "tensor": lambda row: row,
        "array": lambda row: row.numpy(),
        "list": lambda row: row.tolist(),
        "tuple": lambda row: (row,),
        "columns": lambda row: {"input_ids": row.tolist(), "text": "x"},
        "pair": lambda row: (row, int(row[0])),
    }[form]
    rows = [make(row) for row in tokens]
    inputs, targets = as_batch(stack_rows(rows))
    assert torch.equal(inputs, tokens)
    if form == "pair":
        assert torch.equal(targets, tokens[:, 0])
    assert not any(looks_like_batch(row) for row in rows)
    assert looks_like_batch(stack_rows(rows))


def test_states_are_counted():
    assert n_states(TOKENS) == 8
    assert n_states({"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])}) == 5
    assert n_states({"input_ids": TOKENS}) == 8
    assert n_states(torch.zeros(3, 1, 8, 8)) == 48
    assert n_states(torch.zeros(3, 5, 16)) == 15
    assert n_states(torch.zeros(3, 16)) == 3


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (TOKENS[0], says("expected (batch, token); combine single rows to batches")),
        (TOKENS.float(), says("expected token ids; pass other inputs together with their")),
        (TOKENS > 3, says("A batch without targets has the type bool, expected token")),
        ((TOKENS, TOKENS, TOKENS), says("parts; expected token ids (batch, token), (inputs,")),
        (TOKENS.tolist(), says("parts; expected token ids (batch, token), (inputs,")),
        ("text", says("A batch is a str; expected token ids (batch, token),")),
        (("text", TOKENS), says("parts; expected token ids (batch, token), (inputs,")),
        ((TOKENS, torch.zeros(3)), says("both must have the same number of examples.")),
        (({"x": TOKENS}, torch.zeros(3)), says("both must have the same number of examples.")),
        ({"text": ["a"]}, says("A batch must have a column input_ids, pixel_values or")),
        ({"pixel_values": torch.zeros(2, 1, 4, 4)}, says("A batch has pixel_values but no labels; add the classes of")),
        ({"images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "labels": [1, 2]}, about("images", "uint8")),
        ({"images": torch.zeros(2, 1, 4, 4), "labels": [1, 2, 3]}, says("images and labels of shape")),
        (
            {"input_ids": TOKENS, "labels": TOKENS[:, 1:]},
            says("expected the same shape, or one class for each example."),
        ),
        ({"input_ids": [[1, 2], [3]]}, says("input_ids is no tensor (expected")),
        ({"input_ids": list(TOKENS)}, says("input_ids is a list of tensors; pass the dataset")),
    ],
)
def test_other_batches_are_rejected(batch, error):
    with pytest.raises(WorkbenchError, check=error):
        as_batch(batch)
