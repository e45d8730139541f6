"""The adapters: several trainings with one callback, checkpoints of the first version, and the example of the docs."""

import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests.about import says
from tests.callbacks.test_kss_integrations import fit, lightning, lightning_module, trainer, without_dropout  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.small_training import same_weights
from workbench.callbacks.train import gather
from workbench.errors import StoreError
from workbench.training.callback import TrainingRun

pytestmark = pytest.mark.usefixtures("quiet")

GUIDE = Path(__file__).parents[2] / "docs" / "how_to" / "write_a_callback.md"


def everything():
    """Callbacks of every kind that acts outside of `workbench.train`, all with a state at the end of a training."""
    return (
        wb.KSS.recommended(strength=10.0),  # at the end, the trust region has reduced the updates
        wb.faults.large_rate(start=1),
        wb.faults.stale_reduction(start=0),  # at the end, delayed gradients are stored
        wb.baselines.RandomL2(0.5),
        wb.Recorder(every={"attention": 2}),
        wb.Alarms(),
        wb.Actions(policy={"otherwise": ("cut_rate",)}),
    )


class TestOneCallbackForSeveralTrainings:
    """The state of a callback after a training does not affect the next one."""

    @pytest.mark.framework
    def test_in_a_hugging_face_trainer(self, tmp_path):
        first, second, control = (without_dropout(gpt2) for _ in range(3))
        shared, options = wb.trainer_callback(*everything()), {"max_steps": 4, "learning_rate": 0.03}
        for model, callback in ((first, shared), (second, shared), (control, wb.trainer_callback(*everything()))):
            subject = trainer(model, tmp_path, callback, **options)
            subject.train()
        assert subject.state.log_history[-2]["kss_update_size"] < 1
        assert all(parameter.isfinite().all() for parameter in control.parameters())
        assert same_weights(second, control)
        assert same_weights(first, control)

    @pytest.mark.framework
    def test_in_lightning(self, lightning, task):  # noqa: F811
        first, second, control = (without_dropout(gpt2) for _ in range(3))
        shared = wb.lightning_callback(*everything())
        for model, callback in ((first, shared), (second, shared), (control, wb.lightning_callback(*everything()))):
            fit(lightning, lightning_module(lightning, model), callback, task=task, n_batches=1)
        assert all(parameter.isfinite().all() for parameter in control.parameters())
        assert same_weights(second, control)
        assert same_weights(first, control)

    def test_a_reduced_learning_rate_ends_with_its_training(self):
        (guard,) = gather([wb.Recorder(every=None), wb.Alarms(), wb.Actions(policy={"otherwise": ("cut_rate",)})])
        for resumes, factor in ((True, 0.5), (False, 1.0)):
            model = gpt2()
            guard.setup(TrainingRun(model, torch.optim.SGD(model.parameters(), 0.1), lambda event: None))
            if resumes:
                guard.load_state_dict({"rate_factor": 0.5, "n_answered": 0, "unsound": []})
            guard.begin()
            assert guard.rate_factor == factor
            guard.end()


def example_of_the_docs():
    """Return the example callback of the guide."""
    code = re.search(r"```python\n(import workbench.*?)```", GUIDE.read_text(), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 12
    names = {}
    exec(code, names)
    return names["LargeGradients"]


class TestTheExampleOfTheDocs:
    def test_in_train(self, make_model, task, tmp_path):
        path = tmp_path / "run.zarr"
        list(wb.train(make_model(), task, n_steps=3, store=path, callbacks=[example_of_the_docs()(limit=0.0)]))
        self.check(path)

    @pytest.mark.framework
    def test_in_a_hugging_face_trainer(self, tmp_path):
        path = tmp_path / "run.zarr"
        callback = wb.trainer_callback(example_of_the_docs()(limit=0.0), wb.Recorder(path, every=None))
        trainer(without_dropout(gpt2), tmp_path, callback, max_steps=3).train()
        self.check(path)

    @pytest.mark.framework
    def test_in_lightning(self, lightning, task, tmp_path):  # noqa: F811
        path = tmp_path / "run.zarr"
        callback = wb.lightning_callback(example_of_the_docs()(limit=0.0), wb.Recorder(path, every=None))
        fit(lightning, lightning_module(lightning, without_dropout(gpt2)), callback, n_steps=3, task=task)
        self.check(path)

    def check(self, path):
        run = wb.open_run(path)
        events = run["events"].to_dataset()
        seen = events["kind"].values == "large gradient"
        assert events["step"].values[seen].tolist() == [0, 1, 2]
        np.testing.assert_allclose(events["score"].values[seen], run["monitors"]["grad_norm"], rtol=1e-5)
        np.testing.assert_array_equal(run["monitors"]["is_large"], 1.0)


class FailsAt(wb.Callback):
    def __init__(self, step):
        self.step = step

    def end_step(self, step, numbers):
        if step == self.step:
            raise KeyError(step)


class Watching(wb.Callback):
    """A callback that notes its calls, and checks that a pass has ended where it should have."""

    def __init__(self):
        self.calls, self.inside, self.numbers = [], False, []

    def begin(self):
        self.event(0, "at begin")

    def begin_step(self, step):
        self.calls.append(("begin_step", step))

    def change_batch(self, inputs, targets):
        self.calls.append(("change_batch", None))
        return inputs, targets

    @contextmanager
    def around_pass(self):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def before_update(self, step, numbers):
        assert not self.inside

    def end_step(self, step, numbers):
        assert not self.inside
        self.numbers.append(numbers)

    def end(self, *, is_broken=False):
        self.event(0, "at end")
        super().end(is_broken=is_broken)

    def count(self, name):
        return sum(call == name for call, _ in self.calls)


class OfFirstStates(wb.Callback):
    """A callback with a state that JSON would change."""

    state = None

    def state_dict(self):
        return {1: (2, 3)}

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.framework
class TestHuggingFace:
    @pytest.mark.slow
    def test_a_failed_training_does_not_affect_the_next_one(self, tmp_path):
        model, watching, fails = without_dropout(gpt2), Watching(), FailsAt(2)
        recorder = wb.Recorder(tmp_path / "run.zarr", every=None)
        callback = wb.trainer_callback(watching, fails, wb.baselines.RandomL2(0.1), recorder)
        subject = trainer(model, tmp_path, callback, max_steps=4)
        with pytest.raises(KeyError):
            subject.train()
        callback.detach()
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
        assert wb.open_run(tmp_path / "run.zarr").attrs["state"] == "stopped"
        fails.step, watching.calls = None, []
        with pytest.raises(
            StoreError, check=says("exists already; pass resume=True to continue it,")
        ):  # the first run is not overwritten
            subject.train()
        other = Watching()
        subject = trainer(model, tmp_path, wb.trainer_callback(other, wb.baselines.RandomL2(0.1)), max_steps=4)
        subject.train()
        assert other.count("change_batch") == other.count("begin_step") == 4
        assert not model._forward_pre_hooks

    def test_states_that_json_would_change_are_restored(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        trainer(gpt2(), tmp_path, wb.trainer_callback(OfFirstStates()), **options).train()
        resumed = OfFirstStates()
        subject = trainer(gpt2(), tmp_path, wb.trainer_callback(resumed), **{**options, "max_steps": 3})
        subject.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state == {1: (2, 3)}


@pytest.mark.framework
class TestLightning:
    def test_a_pass_ends_with_its_backward_pass_and_a_step_begins_once(self, lightning, task):  # noqa: F811
        watching = Watching()
        module = lightning_module(lightning, without_dropout(gpt2))
        fit(lightning, module, wb.lightning_callback(watching), n_steps=3, task=task, accumulate_grad_batches=2)
        assert [step for name, step in watching.calls if name == "begin_step"] == [0, 1, 2]
        assert watching.count("change_batch") == 6
        assert all(numbers["learning_rate"] == 0.01 for numbers in watching.numbers)

    def test_a_training_step_that_takes_only_the_batch(self, lightning, task):  # noqa: F811
        class OfBatch(type(lightning_module(lightning, without_dropout(gpt2)))):
            def training_step(self, batch):
                return super().training_step(batch, 0)

        module, watching = lightning_module(lightning, without_dropout(gpt2)), Watching()
        module.__class__ = OfBatch
        fit(lightning, module, wb.lightning_callback(watching), n_steps=2, task=task)
        assert watching.count("change_batch") == 2
        assert "training_step" not in vars(module)

    def test_losses_of_a_failed_training_are_not_used_in_the_next_one(self, lightning, task):  # noqa: F811
        model, seen = without_dropout(gpt2), Watching()
        callback = wb.lightning_callback(seen)
        handle = model.lm_head.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(lightning, lightning_module(lightning, model), callback, n_steps=1, task=task, n_batches=1)
        handle.remove()
        with torch.no_grad():
            model.lm_head.weight.mul_(50.0)  # changes the loss
        fit(lightning, lightning_module(lightning, model), callback, n_steps=1, task=task, n_batches=1)
        expected, control = Watching(), without_dropout(gpt2)
        with torch.no_grad():
            control.lm_head.weight.mul_(50.0)
        callback = wb.lightning_callback(expected)
        fit(lightning, lightning_module(lightning, control), callback, n_steps=1, task=task, n_batches=1)
        assert seen.numbers[-1]["loss"] == expected.numbers[-1]["loss"]

    def test_an_existing_store_is_not_overwritten(self, lightning, task, tmp_path):  # noqa: F811
        module = lightning_module(lightning, without_dropout(gpt2))
        callback = wb.lightning_callback(wb.Recorder(tmp_path / "run.zarr", every=None))
        fit(lightning, module, callback, n_steps=3, task=task)
        with pytest.raises(StoreError, check=says("exists already; pass resume=True to continue it,")):
            fit(lightning, module, callback, n_steps=2, task=task)
        assert wb.open_run(tmp_path / "run.zarr")["monitors"].sizes["step"] == 3


@pytest.mark.parametrize("trains_in", ["train", pytest.param("trainer", marks=pytest.mark.framework)])
def test_events_at_the_beginning_and_the_end_are_recorded(trains_in, make_model, task, tmp_path):
    path = tmp_path / "run.zarr"
    if trains_in == "train":
        list(wb.train(make_model(), task, n_steps=2, store=path, callbacks=[Watching()]))
    else:
        callback = wb.trainer_callback(Watching(), wb.Recorder(path, every=None))
        trainer(without_dropout(gpt2), tmp_path, callback, max_steps=2).train()
    kinds = wb.open_run(path)["events"].to_dataset()["kind"].values.tolist()
    assert {"at begin", "at end"} <= {*kinds}
