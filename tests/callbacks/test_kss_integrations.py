import json
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.about import about, says
from tests.callbacks.test_kss_loops import gpt2, llama
from tests.callbacks.test_kss_shaper import hooks_of, kss_with, loss_of, sgd, step
from tests.small_training import same_weights
from workbench.errors import MissingPackageError, OptionError, StoreError

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("quiet")]


def examples(n=64, length=12):
    tokens = torch.randint(1, 32, (n, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, folder, *callbacks, data=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
            **options,
        },
    )
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data or examples(), callbacks=list(callbacks)
    )


def without_dropout(make):
    options = {} if make is llama else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return make(**options)


class TestHuggingFace:
    @pytest.mark.parametrize("make", [gpt2, llama])
    def test_with_accumulation_and_gradient_checkpointing(self, tmp_path, make):
        model, kss = make(), kss_with(strength=0.5, interval=2)
        options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True}
        subject = trainer(model, tmp_path, wb.trainer_callback(kss), max_steps=5, **options)
        subject.train()
        logged = [row for row in subject.state.log_history if "loss" in row]
        assert len(logged) == 5
        assert [row["kss_strength"] for row in logged] == [0.5] * 5
        assert [row["kss_enabled"] for row in logged] == [1.0] * 5
        assert all(row["kss_acting"] == 2 and row["kss_penalty"] > 0 for row in logged)
        # Measured in steps 0, 2 and 4; the steps between repeat the last measurement.
        assert logged[0]["kss_penalty"] == logged[1]["kss_penalty"] != logged[2]["kss_penalty"]
        assert all(not module._forward_pre_hooks for module in model.modules())

    def test_it_is_equivalent_to_attaching_kss_to_a_loop(self, tmp_path):
        """The parameters are those after a loop over the same batches."""
        model, by_hand = without_dropout(gpt2), without_dropout(gpt2)
        data = examples(24)
        options = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        subject = trainer(model, tmp_path, wb.trainer_callback(kss_with()), data=data, **options)
        seen = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs) if module.training else None,
            with_kwargs=True,
        )
        subject.train()
        optimizer = sgd(by_hand, 0.05)
        with kss_with().attach(by_hand, optimizer):
            for inputs in seen:
                optimizer.zero_grad()
                by_hand(**inputs).loss.backward()
                optimizer.step()
        pairs = zip(model.parameters(), by_hand.parameters(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)

    @pytest.mark.slow
    def test_resuming_from_a_checkpoint_of_the_trainer(self, tmp_path):
        """Controls that were changed are restored, and the parameters are those of an uninterrupted run."""

        class ChangeControls(transformers.TrainerCallback):
            def __init__(self, kss):
                self.kss = kss

            def on_step_end(self, args, state, control, **others):
                if state.global_step == 2:
                    self.kss.set(strength=0.3, layers=(1,))

        options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        uninterrupted, kss = gpt2(), kss_with(layers="half", n_snapshots=24)
        subject = trainer(uninterrupted, tmp_path, wb.trainer_callback(kss), ChangeControls(kss), **options)
        subject.train()
        saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
        states = saved["stateful_callbacks"]["WorkbenchCallback"]["attributes"]["saved"]
        assert states["kss"]["state"]["control"]["strength"] == 0.3
        for restores in (False, True):
            resumed, kss = gpt2(), kss_with(layers="half", n_snapshots=24, strength=7.0)
            callback = wb.trainer_callback(kss)
            extra = {**options, "restore_callback_states_from_checkpoint": restores}
            subject = trainer(resumed, tmp_path / str(restores), callback, **extra)
            subject.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
            assert same_weights(resumed, uninterrupted)
            assert (kss.strength, kss.layers) == (0.3, (1,))
        other = kss_with(layers="half", n_snapshots=24, coupling="decoupled")
        subject = trainer(gpt2(), tmp_path / "other", wb.trainer_callback(other), **options)
        with pytest.raises(StoreError, check=about("kss.coupling", "decoupled")):
            subject.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    def test_a_second_callback_of_the_workbench_is_rejected(self, tmp_path):
        subject = trainer(gpt2(), tmp_path, wb.trainer_callback(kss_with()), wb.trainer_callback(kss_with()))
        with pytest.raises(OptionError, check=says("A Trainer takes one callback of the workbench, got")):
            subject.train()


class Collector:
    """Creates a Lightning logger that stores the metrics that it receives."""

    def __new__(cls, lightning):
        class Keeping(lightning.pytorch.loggers.logger.Logger):
            name, version = "keeping", 0

            def __init__(self):
                super().__init__()
                self.rows = []

            def log_metrics(self, metrics, step=None):
                self.rows.append(metrics)

            def log_hyperparams(self, *args, **kwargs):
                """Ignore the hyperparameters."""

        return Keeping()


@pytest.fixture(scope="module")
def lightning():
    import lightning

    return lightning


def lightning_module(lightning, model, *, rate=0.01, optimizers=1):
    class Shell(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, batch_idx):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            created = [torch.optim.AdamW(self.model.parameters(), lr=rate) for _ in range(optimizers)]
            return created if optimizers > 1 else created[0]

    return Shell()


def fit(lightning, module, *callbacks, n_steps=4, n_batches=8, task, checkpoint=None, **options):
    batches = [task.batch(i) for i in range(n_batches)]
    loader = DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True))), batch_size=8)
    subject = lightning.Trainer(
        **{
            "max_steps": n_steps,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "log_every_n_steps": 1,
            "callbacks": list(callbacks),
            **options,
        }
    )
    subject.fit(module, loader, ckpt_path=checkpoint)
    return subject


class TestLightning:
    def test_it_is_equivalent_to_attaching_kss_to_a_loop(self, lightning, task):
        """Although Lightning computes the gradient within the step of the optimizer."""
        by_hand, model = without_dropout(gpt2), without_dropout(gpt2)
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
        with kss_with().attach(by_hand, optimizer):
            for i in range(4):
                step(by_hand, optimizer, task.batch(i))
        logger = Collector(lightning)
        module = lightning_module(lightning, model)
        fit(lightning, module, wb.lightning_callback(kss_with()), task=task, logger=logger)
        assert same_weights(model, by_hand)
        assert hooks_of(module, optimizer)[0] == [(0, 0, 0)] * len(list(module.modules()))
        assert [row["kss_strength"] for row in logger.rows] == [1.0] * 4
        assert all(row["kss_acting"] == 2 and row["kss_penalty"] > 0 for row in logger.rows)

    @pytest.mark.parametrize("coupling", ["gradient", "decoupled"])
    def test_with_accumulation_clipping_and_bfloat16(self, lightning, task, coupling):
        def trained(strength):
            model, logger = llama(), Collector(lightning)
            kss = kss_with(strength=strength, interval=2, coupling=coupling)
            options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": "bf16-mixed"}
            module = lightning_module(lightning, model)
            fit(lightning, module, wb.lightning_callback(kss), task=task, logger=logger, **options)
            return model, logger.rows

        (model, logged), (control, _) = trained(0.5), trained(0.0)
        assert logged[-1]["kss_acting"] == 2
        assert not same_weights(model, control)

    def test_resuming_from_a_checkpoint(self, lightning, task, tmp_path):
        def new(**options):
            return without_dropout(gpt2), kss_with(layers="half", n_snapshots=24, **options)

        data = {"task": task, "n_batches": 1}  # Lightning may resume with any batch
        uninterrupted, kss = new()
        fit(lightning, lightning_module(lightning, uninterrupted), wb.lightning_callback(kss), n_steps=6, **data)
        model, kss = new()
        module = lightning_module(lightning, model)
        subject = fit(lightning, module, wb.lightning_callback(kss), n_steps=3, **data)
        subject.save_checkpoint(tmp_path / "at-3.ckpt")
        resumed, kss = new(strength=7.0)
        options = {"n_steps": 6, "checkpoint": tmp_path / "at-3.ckpt", **data}
        fit(lightning, lightning_module(lightning, resumed), wb.lightning_callback(kss), **options)
        assert kss.strength == 1.0
        assert same_weights(resumed, uninterrupted)
        _, other = new(coupling="projection")
        with pytest.raises(StoreError, check=says("but this run has projection; resume with the same options,")):
            fit(lightning, lightning_module(lightning, gpt2()), wb.lightning_callback(other), **options)

    def test_several_optimizers_are_rejected(self, lightning, task):
        module = lightning_module(lightning, gpt2(), optimizers=2)
        module.automatic_optimization = False
        with pytest.raises(OptionError, check=says("or steps them itself; attach by kss.attach(model,")):
            fit(lightning, module, wb.lightning_callback(kss_with()), task=task)

    def test_a_lightning_module_that_is_the_model(self, lightning, task):
        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(32, 8)
                self.blocks = nn.ModuleList(
                    [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True) for _ in range(2)]
                )
                self.head = nn.Linear(8, 32)

            def forward(self, tokens):
                x = self.embedding(tokens)
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

            def training_step(self, batch, batch_idx):
                return loss_of(self, batch)

            def configure_optimizers(self):
                return sgd(self)

        logger = Collector(lightning)
        fit(lightning, Model(), wb.lightning_callback(kss_with()), task=task, logger=logger)
        assert [row["kss_acting"] for row in logger.rows] == [2.0] * 4

    def test_the_other_name_of_lightning(self, monkeypatch, lightning):
        """The callback is created for the package that the caller has imported."""
        import pytorch_lightning

        assert isinstance(wb.lightning_callback(wb.KSS()), lightning.pytorch.Callback)
        monkeypatch.delitem(sys.modules, "lightning.pytorch")
        assert isinstance(wb.lightning_callback(wb.KSS()), pytorch_lightning.Callback)


def test_missing_lightning_raises(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr(sys, "meta_path", [Absent("lightning", "pytorch_lightning"), *sys.meta_path])
    with pytest.raises(MissingPackageError, check=about("lightning")):
        wb.lightning_callback(wb.KSS())


class Absent:
    """An importer that hides packages."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
