"""The protocol of callbacks, in three trainers."""

import dataclasses
import inspect
import json
import shutil
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.callbacks.test_kss_integrations import fit, lightning, lightning_module, trainer, without_dropout  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.small_training import same_weights
from workbench.errors import OptionError, StoreError
from workbench.training.recording import Recording
from workbench.training.training_plan import TrainingPlan

FIRST_FORMAT = Path(__file__).parents[1] / "training" / "first_format"


class NotesLosses(wb.Callback):
    """A short user-defined callback, which notes the losses, records an event for each, and returns a metric."""

    def __init__(self):
        self.seen = []

    def end_step(self, step, numbers):
        self.seen.append((step, numbers.get("loss")))
        if numbers.get("loss", 0.0) > 0:
            self.event(step, "loss seen", score=numbers["loss"], message="The loss is known.")
        return {"n_seen": float(len(self.seen))}


def events_of(path, kind):
    events = wb.open_run(path)["events"].to_dataset()
    return events["step"].values[events["kind"].values == kind].tolist()


class TestUserDefinedCallbacks:
    def test_in_train(self, make_model, task, tmp_path):
        mine = NotesLosses()
        records = list(wb.train(make_model(), task, n_steps=4, store=tmp_path / "run.zarr", callbacks=[mine]))
        assert mine.seen == [(record.step, record.loss) for record in records]
        assert events_of(tmp_path / "run.zarr", "loss seen") == [0, 1, 2, 3]
        np.testing.assert_array_equal(wb.open_run(tmp_path / "run.zarr")["monitors"]["n_seen"], [1, 2, 3, 4])
        assert [record.numbers["n_seen"] for record in records] == [1, 2, 3, 4]

    def test_the_state_is_part_of_the_checkpoints(self, make_model, task, tmp_path):
        class Counter(wb.Callback):
            n = 0

            def end_step(self, step, numbers):
                self.n += 1

            def state_dict(self):
                return {"n": self.n}

            def load_state_dict(self, state):
                self.n = state["n"]

        settings = {"n_steps": 6, "store": tmp_path / "run.zarr", "checkpoint_every": 2}
        run = wb.train(make_model(), task, callbacks=[Counter()], **settings)
        for record in run:
            if record.step == 3:
                break
        run.close()
        resumed = Counter()
        list(wb.train(make_model(), task, callbacks=[resumed], resume=True, **settings))
        assert resumed.n == 6


class Everywhere(wb.Callback):
    """A callback with all methods of the protocol, which notes their calls and changes nothing."""

    calls = ()

    def __init__(self):
        self.calls = []

    def setup(self, run):
        super().setup(run)
        self.calls.append("setup")

    def begin(self):
        self.calls.append("begin")

    def begin_step(self, step):
        self.calls.append("begin_step")

    def change_batch(self, inputs, targets):
        self.calls.append("change_batch")
        return inputs, targets

    def run_pass(self, one_pass, inputs, targets):
        self.calls.append("run_pass")
        return one_pass(inputs, targets)

    def auxiliary_loss(self, task_loss, auxiliary):
        self.calls.append("auxiliary_loss")
        return auxiliary

    def before_update(self, step, numbers):
        self.calls.append("before_update")

    def end_step(self, step, numbers):
        self.calls.append("end_step")

    def after_step(self, step):
        self.calls.append("after_step")

    def end(self, *, is_broken=False):
        super().end(is_broken=is_broken)
        self.calls.append("end")


class TestTheProtocol:
    def test_the_order_of_the_calls(self, make_model, task):
        callback = Everywhere()
        list(wb.train(make_model(), task, n_steps=2, callbacks=[callback]))
        of_step = [
            "begin_step", "change_batch", "run_pass", "auxiliary_loss", "before_update", "end_step", "after_step",
        ]  # fmt: skip
        assert callback.calls == ["setup", "begin", *of_step, *of_step, "end"]

    def test_a_callback_that_changes_nothing_leaves_training_bitwise_identical(self, make_model, task):
        control, model = make_model(), make_model()
        callbacks = [Everywhere(), NotesLosses()]
        expected = [record.loss for record in wb.train(control, task, n_steps=4)]
        found = [record.loss for record in wb.train(model, task, n_steps=4, callbacks=callbacks)]
        assert found == expected
        assert same_weights(control, model)

    def test_a_callback_may_change_the_loss_and_the_learning_rate(self, make_model, task):
        class Changes(wb.Callback):
            rate_factor = 0.5

            def auxiliary_loss(self, task_loss, auxiliary):
                return 0.0 * task_loss + 1.0 if auxiliary is None else auxiliary

        records = list(wb.train(make_model(), task, n_steps=2, learning_rate=1e-2, callbacks=[Changes()]))
        assert [record.auxiliary_loss for record in records] == [1.0, 1.0]
        assert [record.learning_rate for record in records] == [5e-3, 5e-3]

    def test_arguments_of_the_keywords_may_be_among_the_callbacks(self, make_model, task):
        parts = [wb.KSS(interval=2), wb.faults.large_rate(start=1), wb.baselines.RandomL2(0.1), wb.Recorder(every=None)]
        kss, fault, penalty, recorder = parts
        one, other = make_model(), make_model()
        first = list(wb.train(one, task, n_steps=3, callbacks=parts))
        keywords = {"kss": kss, "faults": [fault], "penalties": [penalty], "recorder": recorder}
        second = list(wb.train(other, task, n_steps=3, **keywords))
        assert same_weights(one, other)
        assert [record.monitors() for record in first][1:] == [record.monitors() for record in second][1:]

    @pytest.mark.parametrize(
        ("callbacks", "error"),
        [
            (lambda: [print], about("callbacks", "builtin_function_or_method")),
            (lambda: [NotesLosses(), NotesLosses()], says("Two callbacks have the name")),
            (lambda: [wb.KSS(), wb.KSS()], says("A run takes at most one wb.KSS, got")),
            (lambda: wb.KSS(), about("callbacks", "KSS")),
            (lambda: wb.Alarms(), about("callbacks", "Alarms")),
            (lambda: wb.Actions(), about("callbacks", "Actions")),
            (lambda: NotesLosses, about("callbacks", "NotesLosses")),
            (lambda: 3, about("callbacks", 3)),
            (lambda: [NotesLosses], about("callbacks", "NotesLosses")),
            (lambda: [[NotesLosses()]], about("callbacks", ("NotesLosses",))),
        ],
    )
    def test_invalid_callbacks_are_rejected(self, make_model, task, callbacks, error):
        with pytest.raises(OptionError, check=error):
            wb.train(make_model(), task, n_steps=1, callbacks=callbacks())

    def test_a_path_in_place_of_a_recorder_is_explained(self, make_model, task):
        with pytest.raises(OptionError, match=r"recorder=wb.Recorder\(\), and the path as store="):
            wb.train(make_model(), task, n_steps=1, recorder="runs/x.zarr")

    def test_none_stands_for_no_callbacks(self, make_model, task):
        control, model = make_model(), make_model()
        list(wb.train(control, task, n_steps=2))
        list(wb.train(model, task, n_steps=2, callbacks=None, faults=None, penalties=None))
        assert same_weights(control, model)

    @pytest.mark.framework
    def test_an_adapter_takes_callbacks_one_by_one(self):
        for adapter in (wb.trainer_callback, wb.lightning_callback):
            with pytest.raises(OptionError, check=about("callbacks", ("NotesLosses", "KSS"))):
                adapter([NotesLosses(), wb.KSS()])

    def test_after_an_error_in_a_callback_all_hooks_are_removed(self, make_model, task):
        class Fails(wb.Callback):
            def end_step(self, step, numbers):
                raise KeyError(step)

        model = make_model()
        with pytest.raises(KeyError):
            list(wb.train(model, task, n_steps=3, kss=wb.KSS(), callbacks=[Fails()]))
        assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())

    def test_all_contexts_are_closed_if_one_cannot_be_entered(self, make_model, task):
        inside = []

        class Outer(wb.Callback):
            @contextmanager
            def around_pass(self):
                inside.append(self)
                try:
                    yield
                finally:
                    inside.pop()

        class Fails(wb.Callback):
            def around_pass(self):
                raise KeyError("no context")

        with pytest.raises(KeyError):
            list(wb.train(make_model(), task, n_steps=1, callbacks=[Outer(), Fails()]))
        assert inside == []

    @pytest.mark.parametrize("method", ["state_dict", "end"])
    def test_after_an_error_at_the_end_everything_is_closed(self, make_model, task, tmp_path, method):
        class Fails(wb.Callback):
            pass

        def fail(self, **options):
            raise KeyError(method)

        setattr(Fails, method, fail)
        model, path = make_model(), tmp_path / "run.zarr"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"optimizer": optimizer, "warmup": 5, "store": path}
        with pytest.raises(KeyError):
            list(wb.train(model, task, n_steps=2, kss=wb.KSS(), callbacks=[Fails()], **settings))
        assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
        assert wb.open_run(path).attrs["state"] == "finished"
        assert optimizer.param_groups[0]["lr"] == 0.1

    @pytest.mark.parametrize(
        ("returned", "error"),
        [
            (3.0, says("returned a float, expected a mapping of numbers or None.")),
            ({"x": "text"}, says("returned x as a str, expected one number; return its mean")),
            ({"x": None}, says("returned x as a NoneType, expected one number; return its")),
            ({"x": torch.ones(2)}, says("returned x as a Tensor, expected one number; return its")),
            ({"loss": 0.0}, says("which the run records already; choose another name.")),
            ({"step": 3}, says("which the run records already; choose another name.")),
        ],
    )
    def test_invalid_metrics_are_rejected_in_the_first_step(self, make_model, task, returned, error):
        class Returns(wb.Callback):
            def end_step(self, step, numbers):
                return returned

        with pytest.raises(OptionError, check=error):
            list(wb.train(make_model(), task, n_steps=2, callbacks=[Returns()]))

    def test_a_callback_cannot_act_on_two_runs_at_a_time(self, make_model, task):
        callback = NotesLosses()
        first = wb.train(make_model(), task, n_steps=3, callbacks=[callback])
        second = wb.train(make_model(), task, n_steps=3, callbacks=[callback])  # neither run has begun
        next(second)
        error = about("callbacks", "NotesLosses")
        with pytest.raises(OptionError, check=error):
            wb.train(make_model(), task, n_steps=3, callbacks=[callback])
        assert len(list(second)) == 2
        with pytest.raises(OptionError, check=error):
            next(first)


class TestResuming:
    def stopped(self, make_model, task, tmp_path, **options):
        """Train for five steps and keep only the checkpoint of step 4, as after a crash; return the settings."""
        settings = {"n_steps": 6, "checkpoint_every": 2, "store": tmp_path / "run.zarr"}
        run = wb.train(make_model(), task, **settings, **options)
        for record in run:
            if record.step == 4:
                break
        run.close()
        shutil.rmtree(tmp_path / "run.checkpoints" / "step-00000005")
        return settings

    def test_missing_callbacks_are_rejected(self, make_model, task, tmp_path):
        settings = self.stopped(make_model, task, tmp_path, recorder=wb.Recorder(every=None))
        with pytest.raises(StoreError, check=says("was trained with a recorder; resume with the same")):
            wb.train(make_model(), task, resume=True, **settings)

    def test_a_new_recorder_is_rejected(self, make_model, task, tmp_path):
        settings = self.stopped(make_model, task, tmp_path)
        with pytest.raises(OptionError, check=says("The run to resume has no recorder, but this call has one;")):
            next(wb.train(make_model(), task, resume=True, recorder=wb.Recorder(every=None), **settings))


@pytest.mark.framework
@pytest.mark.usefixtures("quiet")
class TestInOtherTrainers:
    """Faults and penalties act by hooks in other trainers."""

    @pytest.mark.parametrize(
        "name",
        [
            "corrupted_data",
            *(
                pytest.param(n, marks=pytest.mark.slow)
                for n in ("large_rate", "small_batch", "low_precision_attention")
            ),
        ],
    )
    def test_faults_act_in_a_hugging_face_trainer(self, tmp_path, name):
        fault = getattr(wb.faults, name)
        control, off, faulty = (without_dropout(gpt2) for _ in range(3))
        trainer(control, tmp_path, max_steps=3).train()
        trainer(off, tmp_path, wb.trainer_callback(fault()), max_steps=3).train()
        trainer(faulty, tmp_path, wb.trainer_callback(fault(start=1)), max_steps=3).train()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(control.parameters(), off.parameters(), strict=True))
        assert not same_weights(control, faulty)

    def test_penalties_are_added_to_the_loss_of_a_hugging_face_trainer(self, tmp_path):
        control, penalized = without_dropout(gpt2), without_dropout(gpt2)
        first = trainer(control, tmp_path, max_steps=2)
        first.train()
        second = trainer(penalized, tmp_path, wb.trainer_callback(wb.baselines.RandomL2(5.0)), max_steps=2)
        second.train()
        losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (first, second)]
        assert all(with_penalty > without for without, with_penalty in zip(*losses, strict=True))
        assert not same_weights(control, penalized)

    def test_penalties_and_faults_act_in_lightning(self, lightning, task):  # noqa: F811
        models = [without_dropout(gpt2) for _ in range(3)]
        fit(lightning, lightning_module(lightning, models[0]), task=task)
        callback = wb.lightning_callback(wb.faults.large_rate(start=1), wb.faults.corrupted_data())
        fit(lightning, lightning_module(lightning, models[1]), callback, task=task)
        fit(
            lightning,
            lightning_module(lightning, models[2]),
            wb.lightning_callback(wb.baselines.RandomL2(5.0)),
            task=task,
        )
        assert not same_weights(models[0], models[1])
        assert not same_weights(models[0], models[2])

    @pytest.mark.parametrize("name", ["no_auxiliary_loss", "low_precision_reduction"])
    def test_faults_that_need_the_loop_of_the_workbench_are_rejected(self, tmp_path, name):
        fault = getattr(wb.faults, name)(start=0)
        with pytest.raises(OptionError, check=about("faults", name)):
            trainer(gpt2(), tmp_path, wb.trainer_callback(fault)).train()


def test_the_signature_of_train_contains_all_settings():
    parameters = inspect.signature(wb.train).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for settings in (TrainingPlan, Recording):
        for field in dataclasses.fields(settings):
            given = parameters[field.name].default
            if field.default_factory is not dataclasses.MISSING:
                assert dict(given) == field.default_factory()
            elif field.default is dataclasses.MISSING:
                assert given is inspect.Parameter.empty
            else:
                assert given == field.default, field.name


def test_a_run_of_the_first_format_is_resumed(tmp_path):
    """Callbacks had no names in it; the run has KSS, a fault, a penalty, a recorder, alarms and actions."""
    with zipfile.ZipFile(FIRST_FORMAT / "run.zip") as file:
        file.extractall(tmp_path)
    expected = json.loads((FIRST_FORMAT / "losses.json").read_text())
    model = wb.zoo.transformer("pre_ln", n_heads=2, max_length=16, d_model=16, n_layers=2, vocab_size=32, seed=1)
    task = wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)
    kss = wb.KSS(strength=7.0, interval=5)
    records = list(
        wb.train(
            model, task, n_steps=12, store=tmp_path / "run.zarr", checkpoint_every=5, resume=True, kss=kss,
            faults=[wb.faults.large_rate(start=4, stop=8)], penalties=[wb.baselines.RandomL2(0.2)],
            recorder=wb.Recorder(every=5), alarms=wb.Alarms(), actions=wb.Actions(),
        )
    )  # fmt: skip
    assert (kss.strength, kss.interval) == (1.0, 2)
    assert [record.step for record in records] == list(range(7, 12))
    np.testing.assert_allclose([record.loss for record in records], expected[7:], rtol=1e-5)
    assert records[0].active_faults == ("large_rate",)
    run = wb.open_run(tmp_path / "run.zarr")
    np.testing.assert_allclose(run["monitors"]["loss"], expected, rtol=1e-5)
    assert isinstance(model, nn.Module)
