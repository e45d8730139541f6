"""All functions that take inputs also accept a task, of which they use the held-out inputs."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, SnapshotError
from workbench.models.batches import Batches, TokenSelection, shortened, take_examples

TOKENS = torch.arange(200 * 64).reshape(200, 64)
IDS = torch.arange(12).reshape(2, 6)


def test_large_inputs_are_split_completely():
    batches = Batches.of(TOKENS).split()
    assert sum(batches.n_examples) == 200
    assert max(batches.n_examples) * 64 <= 4096
    assert torch.equal(torch.cat(list(batches.items)), TOKENS)
    mask = torch.ones_like(TOKENS)
    parts = Batches.of({"input_ids": TOKENS, "attention_mask": mask, "flag": True}).split()
    assert all(part["flag"] is True for part in parts.items)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts.items]), TOKENS)


def test_iterators_are_read_once_and_completely():
    batches = Batches.of(TOKENS[i : i + 3] for i in range(0, 12, 3))
    probe, everything = batches.probe_and_all()
    assert torch.equal(probe, TOKENS[:2])
    assert torch.equal(torch.cat(list(everything.items)), TOKENS[:12])
    assert everything.n_examples is None


@pytest.mark.parametrize("empty", [[], iter(()), TOKENS[:0]])
def test_empty_inputs_are_rejected(empty):
    with pytest.raises(SnapshotError, check=about("inputs")):
        Batches.of(empty).probe_and_all()


def test_unusable_inputs_are_rejected():
    with pytest.raises(SnapshotError, check=says("The inputs are a int, expected tensors, text, a task")):
        Batches.of(3)
    with pytest.raises(SnapshotError, check=says("Text needs a tokenizer; open the model by")):
        Batches.of(["a", "b"])
    with pytest.raises(SnapshotError, check=says("A batch holds no tensor; pass token ids, pixel values or")):
        Batches.of({"n": 3})


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, IDS[:, :4]),
        (IDS.float(), None),
        ({"input_ids": IDS, "attention_mask": IDS > 3}, {"input_ids": IDS[:, :4], "attention_mask": IDS[:, :4] > 3}),
        ({"input_ids": IDS, "pixel_values": torch.zeros(2, 3, 8, 8)}, None),
        ({"input_ids": IDS, "labels": "none"}, None),
        ((IDS, IDS), None),
    ],
)
def test_only_certain_axes_of_tokens_are_shortened(batch, expected):
    found = shortened(batch, 4)
    if expected is None:
        assert found is None
    else:
        torch.testing.assert_close(found, expected)


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


TASK = wb.tasks.text_bytes(length=16, batch_size=4)


@pytest.fixture(scope="module")
def model():
    return wb.zoo.transformer("pre_ln", d_model=16, n_layers=2, n_heads=2, vocab_size=256, max_length=16).eval()


@pytest.fixture(scope="module")
def mixture():
    return wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, vocab_size=256, max_length=16, n_experts=4, top_k=1)


def equal(found, expected):
    for name in expected.data_vars:
        np.testing.assert_array_equal(found[name].values, expected[name].values, err_msg=str(name))


def test_profile(model):
    found = wb.profile(model, TASK, n_snapshots=2000, progress=False)
    equal(found, wb.profile(model, TASK.probe(2000), n_snapshots=2000, progress=False))
    assert found.attrs["n_snapshots"] == 2000


def test_flow(model):
    options = {"n_tokens": 64, "n_jacobian_tokens": 4, "n_singular": 2}
    equal(wb.flow.measure(model, TASK, **options), wb.flow.measure(model, TASK.probe(64), **options))


def test_anatomy_and_weights(model, mixture):
    assert wb.read_anatomy(model, TASK).stack == wb.read_anatomy(model, TASK.probe(64)).stack
    assert len(wb.query_key_weights(model, TASK)) == 2
    assert [router.n_experts for router in wb.router_weights(mixture, TASK)] == [4, 4]


def test_a_probe_of_the_model(mixture):
    anatomy = wb.read_anatomy(mixture, TASK)
    found = wb.monitors.ModelProbe(mixture, anatomy, TASK).take()
    expected = wb.monitors.ModelProbe(mixture, anatomy, TASK.probe(1024)).take()
    for part in expected:
        for name, values in expected[part].items():
            np.testing.assert_array_equal(found[part][name], values)


def test_examples_and_batches_of_a_task():
    assert torch.equal(take_examples(TASK, slice(0, 2)), TASK.probe(1024)[:2])
    assert torch.equal(Batches.of(TASK, n_tokens=32).first(), TASK.probe(32))
