import math
import random

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from workbench.assessment.plan_trials import try_plan
from workbench.errors import AnatomyError, OptionError, SnapshotError, StoreError
from workbench.koopman.spectra import RankWarning


def test_the_loop_agrees_with_a_standard_loop(make_model, task):
    """The records and the parameters are those of an explicit loop."""
    expected, reference = [], make_model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 3)
        tokens, targets = task.batch(step)
        loss = cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        expected.append((step, loss.item(), norm.item(), optimizer.param_groups[0]["lr"]))
    model = make_model()
    settings = {"learning_rate": 1e-2, "warmup": 3, "clip_norm": 0.5, "optimizer_options": {"weight_decay": 0.1}}
    records = list(wb.train(model, task, n_steps=6, **settings))
    found = [(r.step, r.loss, r.grad_norm, r.learning_rate) for r in records]
    assert np.allclose(found, expected, rtol=1e-6)
    assert max(r.grad_norm for r in records) > 0.5  # so that clipping had an effect
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_accuracy_is_the_fraction_of_correct_predictions(make_model, task):
    model = make_model(init_std=0.5)
    tokens, targets = task.batch(0)
    guess = model(tokens)[:, -1].argmax(-1)
    record = next(wb.train(model, task, n_steps=1))
    assert record.accuracy == pytest.approx(float((guess == targets[:, -1]).float().mean()))


def dropout_model():
    """Create a Hugging Face model that draws random numbers during training."""
    import transformers

    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.3)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    torch.set_rng_state(state)
    return model


def test_alternating_runs_agree_with_each_run_alone(task):
    alone = [record.loss for record in wb.train(dropout_model(), task, n_steps=5, seed=7)]
    other = dropout_model()
    torch.manual_seed(123)
    both = zip(
        wb.train(dropout_model(), task, n_steps=5, seed=7), wb.train(other, task, n_steps=5, seed=8), strict=True
    )
    pairs = [(one.loss, two.loss, torch.rand(3)) for one, two in both]
    assert [one for one, _, _ in pairs] == alone
    assert [two for _, two, _ in pairs] != alone


def test_global_random_states_are_unchanged(task):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for _ in wb.train(dropout_model(), task, n_steps=3, spectra_every=1, profile_options={"n_snapshots": 64}):
        pass
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


def test_spectra_do_not_affect_training_and_are_those_of_profile(task, tmp_path):
    unmeasured, measured = dropout_model(), dropout_model()
    losses = [record.loss for record in wb.train(unmeasured, task, n_steps=7, seed=7)]
    options = {"n_snapshots": 96}
    run = wb.train(
        measured, task, n_steps=7, seed=7, spectra_every=3, profile_options=options, store=tmp_path / "a.zarr"
    )
    records = list(run)
    assert [record.loss for record in records] == losses
    assert same_weights(unmeasured, measured)
    assert [record.step for record in records if record.spectra is not None] == [0, 3, 6]
    stored = wb.open_run(tmp_path / "a.zarr")["spectra"].to_dataset()
    assert stored["step"].values.tolist() == [0, 3, 6]
    expected = wb.profile(dropout_model(), task.probe(96), progress=False, **options)
    first = stored.sel(step=0, drop=True).isel(mode=slice(expected.sizes["mode"]))
    xr.testing.assert_allclose(first.drop_attrs(), expected.drop_attrs(), rtol=1e-9)


def test_spectra_of_fewer_modes_are_padded_with_nan(make_model, tmp_path):
    few = torch.randint(5, (8, 1), generator=torch.Generator().manual_seed(0)).expand(8, 12)
    model = make_model(d_model=64, vocab_size=5)
    options = {"spectra_every": 1, "probe": few, "profile_options": {"n_snapshots": 64}}
    with pytest.warns(RankWarning, match="span fewer than 64 directions"):
        list(wb.train(model, [(few, few)], n_steps=3, store=tmp_path / "a.zarr", **options))
    spectra = wb.open_run(tmp_path / "a.zarr")["spectra"].to_dataset()
    wb.schema.runs.validate_spectra(spectra)
    assert spectra.sizes == {"step": 3, "layer": 2, "mode": 64}
    assert spectra["rank"].max() < 64
    is_mode = spectra["mode"] < spectra["rank"]
    assert spectra["eigenvalue"].notnull().equals(is_mode.transpose(*spectra["eigenvalue"].dims))
    assert spectra["residual"].notnull().equals(is_mode.transpose(*spectra["residual"].dims))
    assert not spectra["is_reliable"].where(~is_mode, False).any()


def test_a_run_is_recorded_completely(make_model, task, tmp_path):
    store = tmp_path / "run.zarr"
    records = list(wb.train(make_model(), task, n_steps=25, store=store, flush_every=10, learning_rate=1e-2))
    run = wb.open_run(store)
    for name in ("loss", "grad_norm", "accuracy", "learning_rate", "auxiliary_loss"):
        np.testing.assert_array_equal(run["monitors"][name].values, [getattr(record, name) for record in records])
    assert run["monitors"]["step"].values.tolist() == list(range(25))
    assert run["events"]["kind"].values.tolist() == ["finished"]
    assert run.attrs["state"] == "finished"
    wb.save(wb.open_run(store), tmp_path / "copy.zarr")  # follows the schema
    assert wb.open_run(wb.export_netcdf(run, tmp_path / "run.nc"))["monitors"].equals(run["monitors"])


def test_readers_see_complete_blocks_during_training(make_model, task, tmp_path):
    store, seen = tmp_path / "run.zarr", []
    for _ in wb.train(make_model(), task, n_steps=9, store=store, flush_every=4):
        run = wb.open_run(store)
        seen.append(run["monitors"].sizes["step"] if "monitors" in run.children else 0)
        assert run.attrs["state"] == "running"
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert wb.open_run(store)["monitors"].sizes["step"] == 9


def test_a_run_that_is_closed_early_keeps_its_rows(make_model, task, tmp_path):
    store = tmp_path / "run.zarr"
    run = wb.train(make_model(), task, n_steps=100, store=store)
    for record in run:
        if record.step == 6:
            break
    run.close()
    kept = wb.open_run(store)
    assert kept["monitors"].sizes["step"] == 7
    assert kept.attrs["state"] == "stopped"
    assert kept["events"]["kind"].values.tolist() == ["stopped"]


class Failing(nn.Module):
    """Model whose output is changed by a function after some steps."""

    def __init__(self, failure, at_step=3):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.failure, self.at_step, self.n_calls = failure, at_step, 0

    def forward(self, tokens):
        self.n_calls += 1
        logits = self.weight + torch.zeros(*tokens.shape, 32)
        return self.failure(logits) if self.n_calls > self.at_step else logits


@pytest.mark.parametrize(
    ("failure", "cause", "message"),
    [
        (lambda x: x + 400 * (torch.arange(32) == 0), "loss", "Loss 400 is above 50"),
        (lambda x: x + (1e4 * (x * torch.arange(32.0) - (x * torch.arange(32.0)).detach())), "grad_norm", "above 500"),
        (lambda x: x * math.nan, "non-finite", "not finite"),
        (lambda x: x + torch.sqrt(x - x), "non-finite", "not finite"),
    ],
)
def test_a_diverged_run_ends_cleanly_and_keeps_its_data(task, tmp_path, failure, cause, message):
    model, store = Failing(failure), tmp_path / "run.zarr"
    records = list(wb.train(model, task, n_steps=10, store=store))
    assert [record.diverged for record in records] == [False, False, False, True]
    assert records[-1].cause == cause
    assert torch.isfinite(model.weight).all()  # the diverged update was not applied
    run = wb.open_run(store)
    assert run.attrs["state"] == "diverged"
    assert run["monitors"].sizes["step"] == 4
    (event,) = [run["events"].isel(event=i) for i in range(run["events"].sizes["event"])]
    assert (int(event["step"]), str(event["kind"].values), str(event["source"].values)) == (3, "divergence", cause)
    assert message in str(event["message"].values)


@pytest.mark.parametrize("has_store", [True, False])
def test_whoever_trains_is_told_that_the_run_diverged_and_what_to_call(task, tmp_path, has_store):
    store = str(tmp_path / "run.zarr") if has_store else None
    model = Failing(lambda x: x + 400 * (torch.arange(32) == 0))
    with pytest.warns(UserWarning, match="The run diverged at step 3. Loss 400 is above 50") as issued:
        list(wb.train(model, task, n_steps=10, store=store))
    (warning,) = issued
    assert warning.filename == __file__
    assert (f"wb.diagnose({store!r})" if has_store else "Train with store=") in str(warning.message)


def test_functions_that_train_do_not_warn(task, recwarn):
    model = Failing(lambda x: x * math.nan, at_step=1)
    found = try_plan(model, task, wb.TrainingPlan(n_steps=4, learning_rate=1e-3))
    assert found["has_diverged"].values.all()
    assert not [each for each in recwarn if "diverged" in str(each.message)]


def test_the_learning_rate_of_an_optimizer_object_is_restored(make_model, task):
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    rates = [record.learning_rate for record in wb.train(model, task, n_steps=4, optimizer=sgd, schedule="linear")]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert sgd.param_groups[0]["lr"] == 0.01


def test_the_diverged_step_has_its_spectra(task, tmp_path, make_model):
    options = {"spectra_every": 1000, "profile_options": {"n_snapshots": 96}}
    model = make_model("none", d_model=32, n_layers=4)
    *_, last = wb.train(model, task, n_steps=150, learning_rate=0.1, store=tmp_path / "a.zarr", **options)
    steps = wb.open_run(tmp_path / "a.zarr")["spectra"]["step"].values.tolist()
    assert last.diverged
    assert steps == [0, last.step]


def test_missing_spectra_of_a_stream_that_is_not_finite_are_an_event(task, tmp_path, make_model):
    model = make_model()
    with torch.no_grad():
        model.token_embedding.weight[5] = math.nan
    list(wb.train(model, task, n_steps=3, store=tmp_path / "a.zarr", spectra_every=1))
    run = wb.open_run(tmp_path / "a.zarr")
    assert "spectra" not in run.children
    assert run["events"]["kind"].values.tolist() == ["no spectra", "divergence"]
    assert "NaN" in str(run["events"]["message"].values[0])


def test_a_model_without_blocks_is_rejected_before_a_store_is_created(task, tmp_path):
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    with pytest.raises(AnatomyError):
        next(wb.train(model, task, n_steps=3, store=tmp_path / "a.zarr", spectra_every=1))
    assert not (tmp_path / "a.zarr").exists()
    assert len(list(wb.train(model, task, n_steps=3, store=tmp_path / "a.zarr"))) == 3


def test_auxiliary_losses_are_minimized_and_recorded_separately(task):
    class WithAuxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(32))

        def forward(self, tokens):
            return self.weight.detach() + torch.zeros(*tokens.shape, 32)

        def auxiliary_loss(self):
            return ((self.weight - 1) ** 2).sum()

    model = WithAuxiliary()
    first, *_, last = wb.train(model, task, n_steps=200, learning_rate=0.05)
    assert first.auxiliary_loss == 32.0
    assert last.auxiliary_loss < 1.0
    assert first.loss == pytest.approx(math.log(32))


def test_auxiliary_losses_of_hugging_face_routers_are_used(task):
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    record = next(wb.train(transformers.MixtralForCausalLM(config), task, n_steps=1))
    assert 0.5 <= record.auxiliary_loss <= 2.0  # at least coefficient x top_k / top_k at perfect balance


def test_a_model_trains_on_a_loader_of_images():
    images = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = (images.mean((1, 2, 3)) > 0).long()
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    records = list(wb.train(model, loader, n_steps=60, learning_rate=0.05))
    assert np.mean([r.accuracy for r in records[-10:]]) > 0.9


@pytest.mark.parametrize("columns", [("input_ids",), ("input_ids", "attention_mask")])
def test_tokenized_datasets_train_zoo_and_hugging_face_models(make_model, columns, tmp_path):
    import datasets

    rows = torch.randint(1, 32, (24, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.arange(24)[:, None] % 6 + 6).long()
    columns = {name: {"input_ids": rows * mask, "attention_mask": mask}[name].tolist() for name in columns}
    data = datasets.Dataset.from_dict(columns)
    settings = {"n_steps": 3, "spectra_every": 2, "profile_options": {"n_snapshots": 64}}
    for index, model in enumerate((make_model(), dropout_model())):
        records = list(wb.train(model, data, store=tmp_path / f"{index}.zarr", **settings))
        assert np.isfinite([record.loss for record in records]).all()
        assert "spectra" in wb.open_run(tmp_path / f"{index}.zarr").children


def test_left_padding_is_rejected_if_a_model_takes_no_mask(make_model):
    inputs = {
        "input_ids": torch.ones(2, 6, dtype=torch.int64),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]] * 2),
    }
    data = [(inputs, torch.ones(2, 6, dtype=torch.int64))]
    with pytest.raises(SnapshotError):
        next(wb.train(make_model(), data, n_steps=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_training_on_cuda(make_model, task, tmp_path, precision):
    settings = {"n_steps": 8, "precision": precision, "clip_norm": 1.0, "checkpoint_every": 4, "spectra_every": 4}
    model = make_model().cuda()
    through = list(wb.train(model, task, store=tmp_path / "a.zarr", **settings))
    assert np.isfinite([record.loss for record in through]).all()
    run = wb.train(make_model().cuda(), task, store=tmp_path / "b.zarr", **settings)
    for record in run:
        if record.step == 5:
            break
    run.close()
    resumed = make_model().cuda()
    list(wb.train(resumed, task, store=tmp_path / "b.zarr", resume=True, **settings))
    assert same_weights(resumed, model)


def test_a_run_ends_with_its_data(task, make_model, tmp_path):
    batches = (task.batch(i) for i in range(4))
    records = list(wb.train(make_model(), batches, n_steps=10, store=tmp_path / "a.zarr"))
    assert len(records) == 4
    run = wb.open_run(tmp_path / "a.zarr")
    assert run["events"]["message"].values.tolist() == ["The data ended after 4 steps."]


def test_mixed_precision_agrees_approximately_with_float32(make_model, task):
    full = [r.loss for r in wb.train(make_model(), task, n_steps=20, learning_rate=1e-2)]
    mixed = [r.loss for r in wb.train(make_model(), task, n_steps=20, learning_rate=1e-2, precision="bfloat16")]
    assert mixed != full
    assert np.allclose(mixed, full, rtol=0.05)


@pytest.mark.parametrize(
    ("settings", "sentence"), [({}, "n_steps"), ({"n_steps": 3, "lr": 0.1}, "no argument lr; use learning_rate")]
)
def test_missing_and_unknown_settings_are_rejected_at_the_call(make_model, task, settings, sentence):
    with pytest.raises(TypeError, match=sentence):
        wb.train(make_model(), task, **settings)


@pytest.mark.parametrize(
    ("name", "value"), [("n_steps", "10"), ("checkpoint_every", 2), ("precision", "float16"), ("resume", True)]
)
def test_invalid_settings_are_rejected_at_the_call(make_model, task, name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        wb.train(make_model(), task, **{"n_steps": 3, name: value})


def test_an_existing_store_is_kept_and_an_error_raised_at_the_call(make_model, task, tmp_path):
    store = tmp_path / "run.zarr"
    list(wb.train(make_model(), task, n_steps=3, store=store))
    with pytest.raises(StoreError, check=says("exists already; pass overwrite=True to replace it, or")):
        wb.train(make_model(), task, n_steps=5, store=store)
    list(wb.train(make_model(), task, n_steps=5, store=store, overwrite=True))
    assert wb.open_run(store)["monitors"].sizes["step"] == 5


class Broken(wb.Callback):
    """Callback that makes one parameter infinite before a step."""

    name = "broken"

    @torch.no_grad()
    def begin_step(self, step):
        if step == 3:
            self.run.model.blocks[1].mlp.up.bias[0] = math.inf


def test_a_run_that_is_not_finite_reports_the_origin(task, tmp_path, make_model):
    model, store = make_model("pre_ln"), tmp_path / "run.zarr"
    records = list(wb.train(model, task, n_steps=10, store=store, callbacks=[Broken()]))
    assert (len(records), records[-1].cause) == (4, "non-finite")
    (message,) = wb.open_run(store)["events"]["message"].values.tolist()
    beginning = "Loss or gradients are not finite. Forward pass: parameter bias of blocks.1.mlp.up has 1 of 64 values"
    assert message.startswith(beginning)


def test_the_origin_may_be_unknown(task, tmp_path):
    class Unrepeatable(Failing):
        def forward(self, tokens):
            if self.n_calls > self.at_step:
                raise RuntimeError("no second pass")
            return super().forward(tokens)

    list(wb.train(Unrepeatable(lambda x: x * math.nan), task, n_steps=10, store=tmp_path / "run.zarr"))
    (message,) = wb.open_run(tmp_path / "run.zarr")["events"]["message"].values.tolist()
    assert message.endswith("Its origin is unknown (RuntimeError: no second pass).")
