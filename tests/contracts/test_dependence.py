from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.contracts.small import LENGTH, Model, checked, class_loss, lm_loss, next_token, tokens
from workbench.contracts.lab import Lab
from workbench.contracts.observer import Observer
from workbench.contracts.results import Status


@pytest.mark.parametrize(("above", "n_leaks"), [(LENGTH, LENGTH // 2), (1, 1)])
def test_a_mask_that_shows_later_tokens_is_not_causal(above, n_leaks):
    model = Model(mask=lambda n: torch.ones(n, n, dtype=torch.bool).tril(above))
    found = checked(model)["causal"]
    assert found.status is Status.FAILED
    # Two blocks that are off by one see two tokens ahead.
    assert f"at {n_leaks if above > 1 else 2} positions" in found.evidence


def test_a_causal_model_is():
    found = checked()["causal"]
    assert found.status is Status.PASSED
    assert "before it by 0" in found.evidence


def masked_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[:, ::3] = True
    logits = model(ids.masked_fill(chosen, 1))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.masked_fill(~chosen, -100).flatten())


def test_an_encoder_of_masked_tokens_need_not_be_causal():
    everything = Model(mask=lambda n: torch.ones(n, n, dtype=torch.bool))
    report = checked(everything, masked_loss)
    assert report["causal"].status is Status.NOT_APPLICABLE
    assert report["labels_aligned"].status is Status.NOT_APPLICABLE


def test_order_matters_with_positions_only():
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    without = Model(mask=lambda n: everything[:n, :n], has_positions=False)
    found = checked(without, masked_loss)["order_matters"]
    assert found.status is Status.FAILED
    assert "position" in found.where
    assert checked()["order_matters"].status is Status.PASSED


class Scaled(nn.Module):
    def forward(self, x):
        return 3e-5 * x


def test_an_order_that_rounding_hides_is_not_tested():
    model = Model()
    for block in model.blocks:
        block.out = nn.Sequential(block.out, Scaled())
    assert checked(model)["order_matters"].status is Status.NOT_TESTED


def test_statistics_over_the_batch_mix_examples_and_are_named():
    found = checked(Model(over_batch=True))["examples_independent"]
    assert found.status is Status.FAILED
    assert found.where == "blocks.0"
    assert checked()["examples_independent"].status is Status.PASSED


def test_batch_norm_is_no_mixture_in_eval_mode():
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(4)]
    report = checked(layers, class_loss, batches)
    assert report["examples_independent"].status is Status.PASSED
    assert report["causal"].status is Status.NOT_APPLICABLE


def test_passes_in_train_mode_leave_the_statistics_of_norms_over_the_batch():
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    with Observer(1) as seen:
        class_loss(layers, (torch.randn(6, 8), torch.randint(0, 3, (6,)))).backward()
    before, lab = [each.clone() for each in layers.buffers()], Lab(seen)
    with lab.undisturbed(lab.call):
        layers.train()
        lab.run(lab.call)
        assert not torch.equal(before[0], layers[1].running_mean)
    assert all(map(torch.equal, before, layers.buffers()))


def padded() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids with padding 0 on the left, and their masks."""
    found = []
    for ids in tokens():
        mask = torch.ones_like(ids)
        for i in range(len(ids)):
            mask[i, : i % 4] = 0
        found.append((ids * mask, mask))
    return found


@pytest.mark.parametrize("is_passed", [True, False])
def test_padding_on_the_left_needs_its_mask(is_passed):
    def loss(model, batch):
        ids, mask = batch
        labels = ids.masked_fill(mask == 0, -100)
        return next_token(model(ids, attention_mask=mask) if is_passed else model(ids), labels)

    found = checked(None, loss, padded())["mask_respected"]
    assert found.status is (Status.PASSED if is_passed else Status.FAILED)
    if not is_passed:
        assert "test_dependence.py" in found.where


def test_outputs_that_are_not_finite_say_nothing_of_the_order():
    class Infinite(Model):
        def forward(self, ids):
            return super().forward(ids) * float("nan")

    found = checked(Infinite())
    assert found["finite"].status is Status.FAILED
    assert found["order_matters"].status is found["labels_present"].status is Status.NOT_TESTED


def test_a_batch_without_padding_needs_no_mask():
    assert checked(None, lm_loss)["mask_respected"].status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_targets_that_are_broadcast(shape):
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1].view(shape))

    batches = [(torch.randn(6, 8), torch.randn(6)) for _ in range(4)]
    found = checked(nn.Sequential(nn.Linear(8, 1)), loss, batches)["examples_independent"]
    assert found.status is (Status.FAILED if len(shape) == 1 else Status.PASSED)


def test_attention_over_examples_instead_of_tokens():
    class Encoder(nn.Module):
        def __init__(self, *, batch_first: bool) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(1, 1, 16))
            self.attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            x = torch.cat([self.first.expand(len(x), 1, -1), x], 1)
            return self.head((x + self.attention(x, x, x)[0])[:, 0])

    batches = [(torch.randn(6, 5, 16), torch.randint(0, 3, (6,))) for _ in range(4)]
    found = checked(Encoder(batch_first=False), class_loss, batches)["examples_independent"]
    assert found.status is Status.FAILED
    assert "not even their own" in found.evidence
    assert checked(Encoder(batch_first=True), class_loss, batches)["examples_independent"].status is Status.PASSED


@pytest.mark.parametrize("dim", [0, -1])
def test_a_softmax_over_examples(dim):
    def loss(model, batch):
        return nn.functional.nll_loss(model(batch[0]).log_softmax(dim), batch[1])

    batches = [(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(4)]
    found = checked(nn.Linear(8, 3), loss, batches)["examples_independent"]
    assert found.status is (Status.PASSED if dim else Status.FAILED)


def test_a_mask_that_is_off_by_one_is_found_behind_a_prompt_without_labels():
    def loss(model, ids):
        labels = ids.clone()
        labels[:, : LENGTH // 2 + 1] = -100
        return next_token(model(ids), labels)

    assert checked(None, loss)["causal"].status is Status.PASSED
    off_by_one = Model(mask=lambda n: torch.ones(n, n, dtype=torch.bool).tril(1))
    assert checked(off_by_one, loss)["causal"].status is Status.FAILED


class Two(nn.Module):
    """A tower of ids whose mask comes from the ids, and one of numbers; the first of two outputs is that of numbers."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        self.is_masked, self.embedding = is_masked, nn.Embedding(24, 8, padding_idx=0)
        self.ids, self.numbers = nn.Linear(8, 4), nn.Linear(5, 4)

    def forward(self, numbers, ids):
        keep = (ids != 0)[..., None] if self.is_masked else torch.ones_like(ids)[..., None]
        # The embedding of padding is not 0 for ever, as its norm shows after a while.
        states = (self.embedding(ids) + 1).tanh() * keep
        return self.numbers(numbers), self.ids(states.sum(1) / keep.sum(1))


@pytest.mark.parametrize("is_masked", [True, False])
def test_masks_that_a_model_makes_from_ids_of_one_of_its_inputs(is_masked):
    def loss(model, batch):
        a, b = model(*batch)
        return (a - b).square().mean()

    batches = [(torch.randn(len(ids), 5), ids) for ids, _ in padded()]
    found = checked(Two(is_masked=is_masked), loss, batches)["mask_respected"]
    assert found.status is (Status.PASSED if is_masked else Status.FAILED), found


def test_nodes_of_a_graph_are_mixed_on_purpose():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, edges):
            return edges @ self.layer(x)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(*batch[:2]), batch[2])

    batches = [(torch.randn(40, 8), torch.rand(40, 40), torch.randint(0, 3, (40,))) for _ in range(4)]
    assert checked(Graph(), loss, batches)["examples_independent"].status is Status.NOT_APPLICABLE


class TwoTowers(nn.Module):
    """Similarities of all pairs of texts and images, with states that the texts do not reach."""

    def __init__(self):
        super().__init__()
        self.ids, self.positions = nn.Embedding(24, 8), nn.Parameter(torch.randn(LENGTH, 8))
        self.image = nn.Linear(7, 8 * LENGTH)

    def forward(self, ids, image):
        states = self.image(image)
        text = ((self.ids(ids) + self.positions).tanh() * self.positions.roll(1, 0)).mean(1)
        return text @ states[:, :8].mT, states


def test_similarities_of_pairs_and_states_beside_them_are_sound():
    def loss(model, batch):
        similar, states = model(*batch)
        return nn.functional.cross_entropy(similar, torch.arange(len(similar))) + states.square().mean()

    report = checked(TwoTowers(), loss, [(ids, torch.randn(6, 7)) for ids in tokens()])
    assert report["examples_independent"].status is Status.PASSED, report["examples_independent"]
    assert report["order_matters"].status is Status.PASSED, report["order_matters"]


class OfAll(nn.Module):
    """A mean over all examples, of its first or of its second input."""

    def __init__(self, which):
        super().__init__()
        self.which, self.layers = which, nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, *given):
        found = [layer(each) for layer, each in zip(self.layers, given, strict=True)]
        found[self.which] = found[self.which] + found[self.which].softmax(1).mean(0)
        return found[0] + found[1]


@pytest.mark.parametrize("which", [0, 1])
def test_examples_that_mix_in_any_input(which):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(*batch[:2]), batch[2])

    batches = [(torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) % 3) for _ in range(4)]
    assert checked(OfAll(which), loss, batches)["examples_independent"].status is Status.FAILED


def test_sets_of_normalized_examples_mix():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            x = (x - x.mean(2, keepdim=True)) / x.std(2, keepdim=True)
            return self.head(x.sum((0, 1)) + 0.1 * x.sum(1))

    batches = [(torch.randn(6, 4, 5), torch.arange(6) % 3) for _ in range(4)]
    found = checked(Sets(), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches)
    assert found["examples_independent"].status is Status.FAILED


class Translator(nn.Module):
    """An encoder whose states are an output, and a decoder that begins with the id of padding."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.ids, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, ids, attention_mask, labels):
        states = self.ids(ids)
        source = (states * attention_mask[..., None]).sum(1, keepdim=True)
        shifted = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
        return self.head((self.ids(shifted).cumsum(1) + source).tanh()), states


def test_the_first_token_of_a_decoder_and_states_of_padding_are_no_outputs_of_padding():
    def loss(model, batch):
        scores, states = model(*batch)
        return nn.functional.cross_entropy(scores.mT, batch[2]) + 1e-3 * states.square().mean()

    mask = torch.arange(LENGTH) < torch.randint(4, LENGTH, (6, 1))
    batches = [(ids * mask, mask.long(), ids[:, :5]) for ids in tokens()]
    found = checked(Translator(), loss, batches)["mask_respected"]
    assert found.status is Status.PASSED, found
