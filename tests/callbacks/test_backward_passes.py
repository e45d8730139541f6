"""What backward passes show: which forward passes are training, the loss that is differentiated, and its labels."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.callbacks.test_kss_loops import gpt2
from tests.callbacks.test_recorder import adam, dense, loss_of, of_part, recorder_with, task  # noqa: F401
from tests.callbacks.test_recorder_loops import heard_by
from tests.small_training import same_weights
from workbench.callbacks.recorder.backward_passes import labels_from_gradient


def column(recorder, name):
    return np.array([float(o.values[name]) for o in of_part(recorder, "monitors")])


@dataclass
class Result:
    """An output of a kind of which nothing is known."""

    scores: torch.Tensor
    extra: dict


class Wrapped(nn.Module):
    """A model that computes its loss itself and returns it in one of many forms."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = dense(), form

    def forward(self, tokens, targets):
        logits = self.inner(tokens)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {
            "pair": lambda: (logits, loss),
            "mapping": lambda: {"logits": logits, "total": loss},
            "nested": lambda: Result(logits, {"losses": [loss, loss.detach()]}),
        }[self.form]()


LOSS_OF_FORM = {
    "pair": lambda output: output[1],
    "mapping": lambda output: output["total"],
    "nested": lambda output: output.extra["losses"][0],
}


class TestMode:
    def test_a_model_in_eval_mode_is_recorded_like_any_other(self, task):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            tokens = task.batch(i)[0]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        evaluated, trained = heard_by(loop, gpt2(**no_dropout).eval()), heard_by(loop, gpt2(**no_dropout).train())
        assert [(o.step, o.part) for o in evaluated.heard] == [(o.step, o.part) for o in trained.heard]
        for name in ("loss", "batch_size", "n_tokens", "label_entropy", "largest_losses", "grad_norm"):
            assert column(evaluated, name).tolist() == column(trained, name).tolist()
        assert column(evaluated, "is_training").tolist() == [0, 0, 0]
        assert column(trained, "is_training").tolist() == [1, 1, 1]

    @pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_passes_without_backward_do_not_count(self, task, context):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            loss_of(model, task.batch(i)).backward()
            with context():
                model(task.batch(100 + i)[0])
            optimizer.step()

        assert column(heard_by(loop, dense(), every=None), "batch_size").tolist() == [8, 8, 8]


class TestLoss:
    @pytest.mark.parametrize("form", LOSS_OF_FORM)
    def test_losses_in_any_output_are_found(self, task, form):  # noqa: F811
        losses = []

        def loop(model, optimizer, recorder, i):
            loss = LOSS_OF_FORM[form](model(*task.batch(i)))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()

        recorder = heard_by(loop, Wrapped(form), every=None)
        assert column(recorder, "loss").tolist() == losses
        assert column(recorder, "loss_weight").tolist() == [1, 1, 1]

    @pytest.mark.parametrize("n_parts", [1, 2])
    def test_a_loss_outside_of_the_model_is_found(self, task, n_parts):  # noqa: F811
        losses = []

        def loop(model, optimizer, recorder, i):
            total = 0.0
            for _ in range(n_parts):
                loss = loss_of(model, task.batch(i)) / n_parts
                loss.backward()
                total += loss.item()
            losses.append(total)
            optimizer.step()

        recorder = heard_by(loop, dense(), every=None)
        assert column(recorder, "loss") == pytest.approx(losses, rel=1e-6)
        assert np.isnan(column(recorder, "loss_weight")).all()

    def test_a_logged_loss_comes_first(self, task):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            loss_of(model, task.batch(i)).backward()
            recorder.log(loss=i)
            optimizer.step()

        assert column(heard_by(loop, dense(), every=None), "loss").tolist() == [0, 1, 2]

    @pytest.mark.parametrize("factor", [1.0, 0.25])
    def test_sum_and_mean_of_batches_are_told_apart(self, task, factor):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            tokens = task.batch(i)[0]
            for rows in tokens.split(2):
                (model(input_ids=rows, labels=rows).loss * factor).backward()
            optimizer.step()

        assert column(heard_by(loop, gpt2(), every=None), "loss_weight").tolist() == [4 * factor] * 3

    def test_training_is_bitwise_identical_and_outputs_can_be_copied(self, task):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            logits, loss = model(*task.batch(i))
            assert logits._backward_hooks is None
            loss.backward()
            optimizer.step()

        model, twin = Wrapped("pair"), Wrapped("pair")
        heard_by(loop, model)
        optimizer = adam(twin)
        for i in range(3):
            optimizer.zero_grad()
            loop(twin, optimizer, None, i)
            if i == 2:
                break
        assert same_weights(model, twin)


class TestLabels:
    def test_labels_are_those_that_the_loss_reads(self, task):  # noqa: F811
        """A shuffled half of the labels is seen, although neither model nor recorder receives labels."""

        def loop(model, optimizer, recorder, i):
            generator = torch.Generator().manual_seed(i)
            tokens = torch.randint(16, (8, 9), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[: 4 * (i == 2)] = (labels[: 4 * (i == 2)] + 7) % 16
            labels[:, -1] = -100
            cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()

        recorder = heard_by(loop, wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8))
        agreement = column(recorder, "label_agreement")
        assert agreement[:2].tolist() == [1, 1]
        assert agreement[2] == pytest.approx(0.5, abs=0.1)
        assert column(recorder, "ignored_labels") == pytest.approx([1 / 8] * 3)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_labels_in_the_gradient(self, smoothing):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(6, 5, 32, generator=generator, requires_grad=True)
        labels = torch.randint(32, (6, 5), generator=generator)
        labels[2, 1:] = -100
        cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing).backward()
        found, is_known = labels_from_gradient(logits.grad, -100)
        assert found.tolist() == labels.tolist()
        assert is_known

    def test_other_losses_show_no_labels(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(6, 5, 32, generator=generator, requires_grad=True)
        (logits - torch.randn(6, 5, 32, generator=generator)).square().mean().backward()
        assert not labels_from_gradient(logits.grad, -100)[1]
        assert not labels_from_gradient(torch.zeros(6, 5, 32), -100)[1]
