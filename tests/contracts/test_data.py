import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contracts.small import N_IDS, Model, causal, checked, class_loss, lm_loss, next_token, tokens
from workbench.contracts.results import Status


def test_a_sound_training_breaks_nothing():
    report = checked()
    assert not report.failed
    assert report["labels_aligned"].evidence.startswith("Labels are the next tokens (agreement 1,")


@pytest.mark.parametrize(("ahead", "words"), [(2, "2 positions later"), (3, "3 positions later")])
def test_labels_shifted_twice_or_more(ahead, words):
    found = checked(None, lambda model, ids: next_token(model(ids), ids, ahead=ahead))["labels_aligned"]
    assert found.status is Status.FAILED
    assert words in found.evidence
    assert "small.py" in found.where


def test_labels_that_are_shown():
    def loss(model, ids):
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    found = checked(None, loss)["labels_aligned"]
    assert found.status is Status.FAILED
    assert "at the same position" in found.evidence


def test_classes_and_positions_that_reshape_mixes():
    def loss(model, ids):
        logits = model(ids)[:, :-1]
        return functional.cross_entropy(logits.reshape(len(ids), N_IDS, -1), ids[:, 1:])

    def right(model, ids):
        return functional.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:])

    assert "reshape" in checked(None, loss)["labels_aligned"].remedy
    assert checked(None, right)["labels_aligned"].status is Status.PASSED


def test_logits_that_are_transposed_before_they_are_flattened():
    def loss(model, batch):
        scores = model(batch[0]).transpose(0, 1).reshape(-1, 3)
        return functional.cross_entropy(scores, batch[1].view(-1))

    batches = [(ids, torch.randint(0, 3, ids.shape)) for ids in tokens()]
    found = checked(Model(n_classes=3), loss, batches)["labels_aligned"]
    assert found.status is Status.FAILED
    assert "transposed" in found.evidence


def test_labels_that_are_transposed_before_they_are_flattened():
    def loss(model, ids):
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].T.flatten())

    found = checked(loss=loss)["labels_aligned"]
    assert found.status is Status.FAILED
    assert "transposed" in found.evidence


def test_gradients_below_normal_numbers_say_nothing_of_classes():
    def loss(model, ids):
        return 1e-44 * next_token(model(ids), ids)

    assert checked(loss=loss)["labels_aligned"].status is not Status.FAILED


def open_mask(n):
    return torch.ones(n, n, dtype=torch.bool)


class Flattening(Model):
    """A decoder that returns its logits with one axis of positions, and the loss beside them."""

    def forward(self, ids, targets):
        logits = super().forward(ids).flatten(0, 1)
        return logits, functional.cross_entropy(logits, targets.flatten())


class Losing(Flattening):
    """The same, which returns its loss alone."""

    def forward(self, ids, targets):
        return super().forward(ids, targets)[1:]


@pytest.mark.parametrize(
    ("ahead", "mask", "broken"), [(1, causal, set()), (0, causal, {"labels_aligned"}), (1, open_mask, {"causal"})]
)
@pytest.mark.parametrize("kind", [Flattening, Losing])
def test_logits_with_one_axis_of_positions(ahead, mask, broken, kind):
    def loss(model, ids):
        return model(ids[:, :-1], ids[:, ahead : ids.shape[1] - 1 + ahead])[-1]

    found = checked(kind(mask=mask), loss)
    assert {each.id for each in found.failed} == broken
    if not broken:
        for id in ("labels_aligned", "causal", "examples_independent", "order_matters", "labels_present"):
            assert found[id].status is Status.PASSED


def test_an_id_that_ends_some_examples_of_one_batch_by_chance_is_no_padding():
    first, *others = tokens()
    first[first == 5] = 6
    first[0, -3:] = first[1, -2:] = 5
    others[0][:, 3] = 5
    assert checked(batches=[first, *others])["padding_ignored"].status is Status.NOT_APPLICABLE
    for each in others:
        each[each == 5] = 6
    assert checked(batches=[first, *others])["padding_ignored"].status is Status.FAILED


def test_other_losses_cannot_be_read():
    report = checked(None, lambda model, ids: model(ids).square().mean())
    assert report["labels_aligned"].status is Status.NOT_TESTED
    assert report.verdict == "could not be tested"


def test_batches_whose_labels_are_all_ignored():
    def loss(model, batch):
        return next_token(model(batch[0]), batch[1])

    ids = tokens()
    batches = [(each, each if i != 2 else torch.full_like(each, -100)) for i, each in enumerate(ids)]
    found = checked(None, loss, batches)["labels_present"]
    assert found.status is Status.FAILED
    assert "1 of 4 batches" in found.evidence


def test_a_policy_gradient_has_labels_whatever_the_sign_of_its_weights():
    def loss(model, ids):
        logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return -(torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])[:, None] * logp).mean()

    assert checked(None, loss)["labels_aligned"].status is Status.PASSED


@pytest.mark.parametrize("is_masked", [True, False])
def test_padding_in_the_loss(is_masked):
    def loss(model, ids):
        return next_token(model(ids), ids, ignore_index=0 if is_masked else -100)

    batches = tokens()
    for ids in batches:
        for i in range(len(ids)):
            ids[i, len(ids[i]) - i :] = 0
    found = checked(None, loss, batches)["padding_ignored"]
    assert found.status is (Status.PASSED if is_masked else Status.FAILED)
    if not is_masked:
        assert found.proof.startswith("Without them, the loss of this batch is")


def test_the_same_batch_for_ever_is_a_question_without_a_dataset_and_a_fault_with_one():
    one = tokens(1) * 4
    assert checked(None, lm_loss, one)["batches_differ"].status is Status.NOT_TESTED
    loader = torch.utils.data.DataLoader(torch.cat(tokens(20)), batch_size=6)
    found = checked(None, lambda model, i: lm_loss(model, next(iter(loader))), [1, 2, 3, 4])["batches_differ"]
    assert found.status is Status.FAILED
    assert "6 of 120 examples" in found.evidence


def test_epochs_of_few_examples_are_no_fault():
    ids = tokens(2)
    assert checked(None, lm_loss, ids, updates=6)["batches_differ"].status is Status.PASSED


def test_two_workers_that_read_the_same():
    ids = [each for each in tokens(3) for _ in range(2)]
    assert checked(None, lm_loss, ids, updates=6)["batches_differ"].status is Status.FAILED


def test_single_states_may_come_twice_in_a_row():
    states = [torch.eye(8)[[i // 2]] for i in range(12)]

    def loss(model, state):
        return functional.cross_entropy(model(state), state.argmax(-1))

    assert checked(nn.Linear(8, 8), loss, states, updates=12)["batches_differ"].status is Status.PASSED


def test_broken_tokenizer():
    ids = [torch.where(torch.rand(each.shape) < 0.97, 1, each) for each in tokens()]
    found = checked(None, lm_loss, ids)["batches_differ"]
    assert found.status is Status.FAILED
    assert "ids are 1" in found.evidence


def test_accepted_contracts_are_no_failure():
    two_ahead = checked(None, lambda model, ids: next_token(model(ids), ids, ahead=2), accept=["labels_aligned"])
    assert two_ahead["labels_aligned"].status is Status.ACCEPTED
    assert two_ahead.verdict != "failed"


@pytest.mark.parametrize(("n_different", "status"), [(5, Status.FAILED), (20, Status.NOT_TESTED), (160, Status.PASSED)])
def test_images_that_are_all_the_same(n_different, status):
    images = torch.randn(n_different, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [(images[i % n_different], i % 3) for i in range(160)]
    batches = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    assert checked(classifier, class_loss, batches)["batches_differ"].status is status


def test_a_template_that_masks_everything():
    def loss(model, ids):
        return next_token(model(ids), torch.full_like(ids, -100))

    found = checked(None, loss)["labels_present"]
    assert found.status is Status.FAILED
    assert found.evidence == "None of 4 batches has a label that counts."


def test_outputs_that_are_logarithms_of_probabilities_are_no_logits():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def forward(self, ids):
            logits = self.model(ids)[:, :-1]
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    found = checked(Scored(), lambda model, ids: -model(ids).mean())
    for id in ("labels_present", "initial_loss", "labels_aligned"):
        assert found[id].status in (Status.NOT_TESTED, Status.NOT_APPLICABLE), found[id]


def test_periodic_texts_whose_labels_are_the_tokens_before():
    ids = [each[:, :5].repeat(1, 2) for each in tokens()]

    def loss(model, ids):
        return functional.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())

    found = checked(None, loss, ids)["labels_aligned"]
    assert found.status is Status.FAILED
    assert "1 positions before" in found.evidence
