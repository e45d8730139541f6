"""The recorder in third-party trainers observes the same as in a custom loop."""

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.test_kss_integrations import fit, lightning, lightning_module, trainer, without_dropout  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.callbacks.test_recorder import dense, events_of, of_part, recorder_with, task  # noqa: F401
from tests.callbacks.test_recorder_loops import assert_same
from tests.callbacks.test_recorder_store import same_rows
from tests.small_training import same_weights

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("quiet")]


class TestHuggingFace:
    def test_it_observes_the_same_as_in_a_custom_loop(self, tmp_path):
        """With the batches of the Trainer, two per update; gradients are clipped."""
        model, by_hand = without_dropout(gpt2), without_dropout(gpt2)
        found, expected, seen = recorder_with(), recorder_with(), []
        options = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "optim": "sgd"}
        options |= {"lr_scheduler_type": "constant", "learning_rate": 0.05}
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(dict(kwargs)) if module.training else None, with_kwargs=True
        )
        subject = trainer(model, tmp_path, wb.trainer_callback(found), **options)
        subject.train()
        optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05)
        logged = [row for row in subject.state.log_history if "loss" in row]
        with expected.attach(by_hand, optimizer):
            for i in range(3):
                optimizer.zero_grad()
                for inputs in seen[2 * i : 2 * i + 2]:
                    by_hand(**inputs).loss.backward()
                torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
                # Losses that are summands of an update's loss are summed without help of the loop.
                expected.log(grad_norm=logged[i]["grad_norm"])
                optimizer.step()
        assert_same(found, expected, 1e-4)
        rows = of_part(found, "monitors")
        assert [float(o.values["loss"]) for o in rows] == pytest.approx([row["loss"] for row in logged], abs=1e-3)
        assert [float(o.values["batch_size"]) for o in rows] == [8, 8, 8]
        assert all(not module._forward_pre_hooks for module in model.modules() if module is not model)

    @pytest.mark.slow
    def test_resuming_from_a_checkpoint_of_the_trainer(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        through, parts = tmp_path / "through.zarr", tmp_path / "parts.zarr"
        trainer(gpt2(), tmp_path / "one", wb.trainer_callback(recorder_with(through)), **options).train()
        killed = recorder_with(parts)
        killed.observe(lambda o: 1 / (o.step - 4) if o.part == "monitors" else None)
        with pytest.raises(ZeroDivisionError):
            trainer(gpt2(), tmp_path / "two", wb.trainer_callback(killed), **options).train()
        resumed = recorder_with(parts, resume=True)
        subject = trainer(gpt2(), tmp_path / "two", wb.trainer_callback(resumed), **options)
        subject.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
        assert [o.step for o in of_part(resumed, "monitors")] == [3, 4, 5]
        assert same_rows(through, parts)

    def test_the_loss_of_a_trainer_that_hides_nan_is_nan(self, tmp_path):
        model, recorder = without_dropout(gpt2), recorder_with(every=None)
        model.register_forward_hook(lambda module, args, out: out.__setitem__("loss", out.loss * float("nan")))
        trainer(model, tmp_path, wb.trainer_callback(recorder), max_steps=2).train()
        assert all(np.isnan(o.values["loss"]) for o in recorder.heard)


class TestLightning:
    def test_it_observes_the_same_as_in_a_custom_loop(self, lightning, task):  # noqa: F811
        model, by_hand = without_dropout(gpt2), without_dropout(gpt2)
        found, expected = recorder_with(), recorder_with()
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        module = lightning_module(lightning, model)
        fit(lightning, module, wb.lightning_callback(found), n_steps=3, task=task, **options)
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
        with expected.attach(by_hand, optimizer):
            for i in range(3):
                optimizer.zero_grad()
                losses = []
                for k in (2 * i, 2 * i + 1):
                    tokens, targets = task.batch(k)
                    logits = by_hand(tokens).logits
                    losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
                    (losses[-1] / 2).backward()
                norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
                expected.log(loss=sum(losses) / 2, grad_norm=norm)
                optimizer.step()
        assert same_weights(model, by_hand)
        assert_same(found, expected)
        assert {o.part for o in found.heard} == {"monitors", "attention", "optimizer", "activations"}

    @pytest.mark.slow
    def test_resuming_from_a_checkpoint(self, lightning, task, tmp_path):  # noqa: F811
        through, parts = tmp_path / "through.zarr", tmp_path / "parts.zarr"
        data = {"task": task, "n_batches": 1}  # Lightning may begin with any batch
        for path, n_steps, checkpoint in ((through, 6, None), (parts, 3, None), (parts, 6, tmp_path / "at-3.ckpt")):
            recorder = recorder_with(path, resume=checkpoint is not None)
            module = lightning_module(lightning, without_dropout(gpt2))
            subject = fit(
                lightning, module, wb.lightning_callback(recorder), n_steps=n_steps, checkpoint=checkpoint, **data
            )
            if n_steps == 3:
                subject.save_checkpoint(tmp_path / "at-3.ckpt")
        assert same_rows(through, parts)
