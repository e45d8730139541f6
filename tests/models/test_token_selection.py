import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, SnapshotError
from workbench.models.batches import Batches, TokenSelection

TOKENS = torch.arange(200 * 64).reshape(200, 64)


def choose(inputs, n_snapshots, **options):
    batches = Batches.of(inputs).split()
    selection = TokenSelection(n_snapshots, **options)
    selection.begin(batches)
    shape = lambda batch: (batch["input_ids"] if isinstance(batch, dict) else batch).shape  # noqa: E731
    chosen = [selection.choose(shape(batch), batch) for batch in batches.items if not selection.is_complete]
    return chosen, selection


def test_states_are_drawn_from_all_sequences():
    chosen, selection = choose(TOKENS, 1000, seed=1)
    assert sum(map(len, chosen)) == 1000 == selection.n_chosen
    assert len(chosen) == len(Batches.of(TOKENS).split().n_examples)
    assert all(torch.equal(part, part.unique()) for part in chosen)
    assert selection.describe() == "1000 of 12800 tokens"
    repeated, _ = choose(TOKENS, 1000, seed=1)
    other, _ = choose(TOKENS, 1000, seed=2)
    assert all(map(torch.equal, chosen, repeated))
    assert not all(map(torch.equal, chosen, other))


def test_the_first_states_of_an_iterator_are_chosen():
    chosen, selection = choose((TOKENS[i : i + 2] for i in range(0, 200, 2)), 300)
    assert [len(part) for part in chosen] == [128, 128, 44]
    assert chosen[2].tolist() == list(range(44))
    assert selection.is_complete


def test_padding_and_first_tokens_are_left_out():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": mask}
    assert choose(inputs, None)[0][0].tolist() == [0, 1, 2, 5, 6, 7]
    chosen, selection = choose(inputs, None, skip_first=1)
    assert chosen[0].tolist() == [1, 2, 6, 7]
    assert selection.describe() == "every token, first 1 of each sequence left out"


def test_all_states_are_chosen_if_there_are_fewer_than_requested():
    chosen, selection = choose(TOKENS[:2], 1000)
    assert len(chosen[0]) == 128
    assert selection.describe() == "every token"


def test_impossible_selections_are_rejected():
    with pytest.raises(SnapshotError, check=about("n_snapshots", 2)):
        TokenSelection(2)
    with pytest.raises(OptionError, check=about("skip_first", -1)):
        TokenSelection(10, skip_first=-1)


def test_a_mask_that_hides_nothing_need_not_fit():
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 9)}
    chosen, selection = choose(inputs, None)
    assert len(chosen[0]) == 8
    assert selection.describe() == "every token"


def test_a_mask_that_hides_tokens_and_does_not_fit_is_rejected():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": mask}
    with pytest.raises(SnapshotError, check=says("so padding cannot be distinguished from tokens; pass inputs")):
        choose(inputs, None)
    chosen, selection = choose(inputs | {"decoder_input_ids": torch.zeros(2, 4, dtype=torch.int64)}, None)
    assert len(chosen[0]) == 8  # the mask is that of the encoder
    assert selection.describe() == "every token; a mask did not fit the states and was not used"


IDS = torch.arange(12).reshape(2, 6)


class Prompted(nn.Module):
    """A model that puts its own tokens in front of its inputs, as in prompt tuning or with a class token."""

    def __init__(self, n_prompt):
        super().__init__()
        self.embedding, self.prompt = nn.Embedding(64, 16), nn.Parameter(torch.randn(1, n_prompt, 16))
        layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, pixel_values=None):
        x = inputs_embeds if inputs_embeds is not None else pixel_values
        x = self.embedding(input_ids) if x is None else x
        x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", ["tensor", "tuple", "input_ids", "inputs_embeds", "with mask"])
def test_first_tokens_behind_a_prompt_cannot_be_counted(kind):
    tokens = torch.randint(64, (3, 9))
    inputs = {
        "tensor": tokens,
        "tuple": (tokens,),
        "input_ids": {"input_ids": tokens},
        "inputs_embeds": {"inputs_embeds": torch.randn(3, 9, 16)},
        "with mask": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
    }[kind]
    options = {"progress": False, "n_snapshots": None, "batch_first": True}
    with pytest.raises(SnapshotError, check=says("tokens, as with a prompt or image tokens in front, so the")):
        wb.profile(Prompted(2), inputs, skip_first=1, **options)
    assert wb.profile(Prompted(2), inputs, **options).attrs["n_snapshots"] == 33
    assert wb.profile(Prompted(0), inputs, skip_first=1, **options).attrs["n_snapshots"] == 24


def test_the_first_states_of_images_including_the_class_token_are_left_out():
    patches = {"pixel_values": torch.randn(3, 9, 16)}
    found = wb.profile(Prompted(1), patches, skip_first=1, n_snapshots=None, batch_first=True, progress=False)
    assert found.attrs["n_snapshots"] == 27
    vit = wb.zoo.vit(d_model=16, n_layers=2, n_heads=2, image_size=8, patch_size=2, n_channels=2, n_classes=5)
    n_states = [
        wb.profile(vit, torch.randn(3, 2, 8, 8), skip_first=n, n_snapshots=None, progress=False).attrs["n_snapshots"]
        for n in (0, 1)
    ]
    assert n_states[0] - n_states[1] == 3


def test_first_tokens_of_a_decoder_are_counted_by_its_own_tokens():
    states = torch.Size([2, 5])
    own = {"input_ids": torch.ones(2, 9), "decoder_input_ids": torch.ones(2, 5)}
    for batch in (own, {"input_ids": torch.ones(2, 9), "labels": torch.ones(2, 5)}):
        batch = {name: value.long() for name, value in batch.items()}
        assert TokenSelection(None, skip_first=2).choose(states, batch).tolist() == [2, 3, 4, 7, 8, 9]
