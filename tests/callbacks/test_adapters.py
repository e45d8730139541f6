"""The adapters: trained twice with one callback, checkpoints of the first version, and the example of the docs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks.test_kss_integrations import fit, lightning, lightning_module, trainer, without_dropout  # noqa: F401
from tests.callbacks.test_kss_loops import gpt2
from tests.callbacks.test_kss_shaper import kss_with
from tests.small_training import same_weights
from workbench.callbacks.gathering import gather
from workbench.training.callback import TrainingRun

pytestmark = pytest.mark.usefixtures("quiet")

DOCS = Path(__file__).parents[2] / "docs"


def everything():
    """Callbacks of every kind that act outside of the loop of `workbench.train`, such that each leaves a state."""
    return (
        wb.KSS.recommended(strength=10.0),  # the trust region ends with smaller updates
        wb.faults.large_rate(start=1),
        wb.faults.stale_reduction(start=0),  # ends with gradients that are still to come
        wb.baselines.RandomL2(0.5),
        wb.Recorder(every={"attention": 2}),
        wb.Alarms(),
        wb.Actions(policy={}, otherwise=("cut_rate",)),
    )


class TestOneCallbackForSeveralTrainings:
    """What a training leaves in the callback does not reach the next one."""

    @pytest.mark.framework
    def test_in_a_hugging_face_trainer(self, tmp_path):
        first, again, anew = (without_dropout(gpt2) for _ in range(3))
        callback, options = wb.trainer_callback(*everything()), {"max_steps": 4, "learning_rate": 0.03}
        for model, of_it in ((first, callback), (again, callback), (anew, wb.trainer_callback(*everything()))):
            subject = trainer(model, tmp_path, of_it, **options)
            subject.train()
        assert subject.state.log_history[-2]["kss_update_size"] < 1
        assert all(weight.isfinite().all() for weight in anew.parameters())
        assert same_weights(again, anew)
        assert same_weights(first, anew)

    @pytest.mark.framework
    def test_in_lightning(self, lightning, task):  # noqa: F811
        first, again, anew = (without_dropout(gpt2) for _ in range(3))
        callback = wb.lightning_callback(*everything())
        for model, of_it in ((first, callback), (again, callback), (anew, wb.lightning_callback(*everything()))):
            fit(lightning, lightning_module(lightning, model), of_it, task=task, n_batches=1)
        assert all(weight.isfinite().all() for weight in anew.parameters())
        assert same_weights(again, anew)
        assert same_weights(first, anew)

    def test_a_cut_of_the_rate_ends_with_its_training(self):
        (guard,) = gather([wb.Recorder(every=None), wb.Alarms(), wb.Actions(policy={}, otherwise=("cut_rate",))])
        for resumes, factor in ((True, 0.5), (False, 1.0)):
            model = gpt2()
            guard.setup(TrainingRun(model, torch.optim.SGD(model.parameters(), 0.1), lambda event: None))
            if resumes:
                guard.load_state_dict({"rate_factor": 0.5, "n_skipped": 0, "n_answered": 0, "unsound": []})
            guard.begin()
            assert guard.rate_factor == factor
            guard.end()


def states_of_the_first_version(now):
    """A checkpoint's states as the first version wrote them: one callback for KSS, one for the recorder."""
    states = {"KSSCallback": {"options": now["kss"]["options"], "shaper": now["kss"]["state"]}}
    return states | {"RecorderCallback": now["guard"]["state"]["recorder"]}


@pytest.mark.framework
class TestCheckpointsOfTheFirstVersion:
    def test_of_a_hugging_face_trainer(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        through = without_dropout(gpt2)
        parts = (
            kss_with(layers="half", n_snapshots=24),
            wb.Recorder(tmp_path / "through.zarr", every={"attention": 2}),
        )
        trainer(through, tmp_path, wb.trainer_callback(*parts), **options).train()
        file = tmp_path / "checkpoint-3" / "trainer_state.json"
        state = json.loads(file.read_text())
        now = state["stateful_callbacks"].pop("WorkbenchCallback")["attributes"]["saved"]
        for name, saved in states_of_the_first_version(now).items():
            state["stateful_callbacks"][name] = {"args": {}, "attributes": {"saved": saved}}
        file.write_text(json.dumps(state))
        resumed, kss = without_dropout(gpt2), kss_with(layers="half", n_snapshots=24, strength=7.0)
        recorder = wb.Recorder(tmp_path / "resumed.zarr", every={"attention": 2})
        subject = trainer(resumed, tmp_path / "resumed", wb.trainer_callback(kss, recorder), **options)
        subject.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert kss.strength == 1.0
        assert same_weights(resumed, through)
        whole, second = (wb.open_run(tmp_path / f"{name}.zarr") for name in ("through", "resumed"))
        assert second["monitors"]["step"].values.tolist() == [3, 4, 5]
        # Measured on the probe of the first half, which is not in the data again.
        step = second["attention"]["step"].values
        for name in ("entropy_mean", "max_logit") if "entropy_mean" in second["attention"] else ():
            np.testing.assert_array_equal(second["attention"][name], whole["attention"][name].sel(step=step))

    def test_of_lightning(self, lightning, task, tmp_path):  # noqa: F811
        def parts(path, **options):
            return kss_with(layers="half", n_snapshots=24, **options), wb.Recorder(path, every={"attention": 2})

        data = {"task": task, "n_batches": 1}
        through, half = without_dropout(gpt2), without_dropout(gpt2)
        callback = wb.lightning_callback(*parts(tmp_path / "through.zarr"))
        fit(lightning, lightning_module(lightning, through), callback, n_steps=6, **data)
        callback = wb.lightning_callback(*parts(tmp_path / "half.zarr"))
        subject = fit(lightning, lightning_module(lightning, half), callback, n_steps=3, **data)
        subject.save_checkpoint(tmp_path / "at-3.ckpt")
        checkpoint = torch.load(tmp_path / "at-3.ckpt", weights_only=False)
        checkpoint["callbacks"] = states_of_the_first_version(checkpoint["callbacks"]["WorkbenchCallback"])
        torch.save(checkpoint, tmp_path / "first.ckpt")
        kss, recorder = parts(tmp_path / "resumed.zarr", strength=7.0)
        resumed = without_dropout(gpt2)
        callback = wb.lightning_callback(kss, recorder)
        options = {"n_steps": 6, "checkpoint": tmp_path / "first.ckpt", **data}
        fit(lightning, lightning_module(lightning, resumed), callback, **options)
        assert kss.strength == 1.0
        assert same_weights(resumed, through)
        assert wb.open_run(tmp_path / "resumed.zarr")["monitors"]["step"].values.tolist() == [3, 4, 5]


def example_of_the_docs():
    """The callback that docs/callbacks.md shows."""
    code = re.search(r"```python\n(import workbench.*?)```", (DOCS / "callbacks.md").read_text(), re.DOTALL).group(1)
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
