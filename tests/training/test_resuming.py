"""Resumed runs and branches of runs continue bit for bit, and damaged checkpoints are named."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.about import about, says
from tests.small_training import same_weights
from tests.training.test_loop import dropout_model
from workbench.errors import CheckpointError, StoreError
from workbench.models.checkpoint import latest_checkpoint, list_checkpoints
from workbench.training.recording import branch_run

SETTINGS = {"n_steps": 14, "learning_rate": 1e-2, "warmup": 4, "schedule": "cosine", "seed": 5, "flush_every": 3}


def run_to(step, model, task, **settings):
    """Train up to a step, and close the generator."""
    run = wb.train(model, task, **settings)
    for record in run:
        if record.step == step:
            break
    run.close()


def assert_resumes_bit_for_bit(make, task, folder, **settings):
    """Check that a run resumed after three steps ends with the parameters of an uninterrupted run."""
    through = make()
    list(wb.train(through, task, checkpoints=folder / "a", **settings))
    run_to(3, make(), task, checkpoints=folder / "b", **settings)
    torch.manual_seed(99)  # the global random state has no effect
    resumed = make()
    list(wb.train(resumed, task, checkpoints=folder / "b", resume=True, **settings))
    assert same_weights(resumed, through)


def loader_task():
    """Create a shuffling loader over tokens, a new one each time, as in a new process."""
    tokens = torch.randint(32, (50, 12), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=8, shuffle=True)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("source", "stop_at"),
    [
        ("task", 5),
        ("task", 9),
        ("loader", 0),
        ("loader", 4),
        *(pytest.param("task", stop_at, marks=pytest.mark.slow) for stop_at in (0, 4)),
        *(pytest.param("loader", stop_at, marks=pytest.mark.slow) for stop_at in (5, 9)),
    ],
)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(task, tmp_path, stop_at, source):
    data = (lambda: task) if source == "task" else loader_task
    through = dropout_model()
    list(wb.train(through, data(), store=tmp_path / "through.zarr", checkpoint_every=5, **SETTINGS))
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 5}
    run_to(stop_at, dropout_model(), data(), **settings)
    torch.manual_seed(99)  # another process has other global random states
    resumed = dropout_model()
    with torch.no_grad():
        for weight in resumed.parameters():
            weight.zero_()
    first, *_ = wb.train(resumed, data(), resume=True, **settings)
    assert first.step == stop_at + 1
    assert same_weights(resumed, through)
    left, right = (wb.open_run(tmp_path / f"{name}.zarr")["monitors"].to_dataset() for name in ("run", "through"))
    assert left.identical(right)
    kinds = wb.open_run(tmp_path / "run.zarr")["events"]["kind"].values.tolist()
    assert kinds == ["resumed", "finished"] or kinds == ["stopped", "resumed", "finished"]


def test_a_constant_run_may_be_extended(make_model, task, tmp_path):
    settings = {"store": tmp_path / "run.zarr", "checkpoint_every": 4}
    list(wb.train(make_model(), task, n_steps=6, **settings))
    more = list(wb.train(make_model(), task, n_steps=9, resume=True, **settings))
    assert [record.step for record in more] == [6, 7, 8]
    assert wb.open_run(tmp_path / "run.zarr")["monitors"]["step"].values.tolist() == list(range(9))


def test_checkpoints_can_be_opened(make_model, task, tmp_path):
    model = make_model()
    list(wb.train(model, task, n_steps=4, checkpoints=tmp_path, checkpoint_every=2))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    opened = wb.open_checkpoint(latest_checkpoint(tmp_path))
    assert same_weights(opened.model, model)
    hugging_face = dropout_model()
    list(wb.train(hugging_face, task, n_steps=2, checkpoints=tmp_path / "hf", checkpoint_every=2))
    opened = wb.open_checkpoint(latest_checkpoint(tmp_path / "hf"))
    tokens = task.batch(0)[0]
    assert torch.equal(opened.model(tokens).logits, hugging_face.eval()(tokens).logits)


def test_checkpoints_of_fused_experts_can_be_opened(task, tmp_path):
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    list(wb.train(model, task, n_steps=2, checkpoints=tmp_path, checkpoint_every=2))
    opened = wb.open_checkpoint(latest_checkpoint(tmp_path))
    tokens = task.batch(0)[0]
    assert torch.equal(opened.model(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"learning_rate": 2e-2}, "training.learning_rate", 0.02),
        ({"n_steps": 20}, "training.n_steps", 20),
        ({"seed": 6}, "training.seed", 6),
        ({"optimizer_options": {"weight_decay": 0.5}}, "training.optimizer_options.weight_decay", 0.5),
        ({"loss": nn.functional.mse_loss}, "training.loss", "mse_loss"),
        ({"spectra_every": 3}, "spectra.every", 3),
    ],
)
def test_another_configuration_is_rejected_with_its_first_difference(make_model, task, tmp_path, change, name, value):
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 5}
    run_to(7, make_model(), task, **settings)
    before = wb.open_run(tmp_path / "run.zarr").load()
    model = make_model()
    with pytest.raises(StoreError, check=about(name, value)):
        wb.train(model, task, resume=True, **{**settings, **change})
    assert same_weights(model, make_model())
    assert wb.open_run(tmp_path / "run.zarr").identical(before)


def test_another_model_or_task_is_rejected(make_model, task, tmp_path):
    settings = {**SETTINGS, "store": tmp_path / "run.zarr", "checkpoint_every": 5}
    run_to(7, make_model(), task, **settings)
    with pytest.raises(StoreError, check=says("has model.config.norm = pre_ln, but this call has post_ln;")):
        wb.train(make_model("post_ln"), task, resume=True, **settings)
    other = wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=3, batch_size=8, seed=3)
    with pytest.raises(StoreError, check=says("resume with the same configuration, or start another run.")):
        wb.train(make_model(), other, resume=True, **settings)


def test_resuming_needs_a_checkpoint_and_a_run(make_model, task, tmp_path):
    settings = {"n_steps": 4, "store": tmp_path / "run.zarr"}
    with pytest.raises(CheckpointError, check=says("holds no checkpoint to resume; use")):
        wb.train(make_model(), task, resume=True, **settings)
    list(wb.train(make_model(), task, checkpoint_every=2, **settings))
    shutil.rmtree(tmp_path / "run.zarr")
    with pytest.raises(StoreError, check=about("path", tmp_path / "run.zarr")):
        wb.train(make_model(), task, resume=True, checkpoint_every=2, **settings)


@pytest.mark.parametrize("file", ["training.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_named(make_model, task, tmp_path, file):
    settings = {"n_steps": 4, "checkpoints": tmp_path, "checkpoint_every": 2}
    list(wb.train(make_model(), task, **settings))
    place = latest_checkpoint(tmp_path)
    (place / file).write_bytes((place / file).read_bytes()[:200])
    with pytest.raises(CheckpointError, match="step-00000004"):
        wb.train(make_model(), task, resume=True, **settings)


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(make_model, task, tmp_path):
    settings = {"checkpoints": tmp_path, "checkpoint_every": 2}
    list(wb.train(make_model(), task, n_steps=8, **settings))
    with pytest.raises(StoreError, check=says("holds an earlier run; pass resume=True")):
        wb.train(make_model(), task, n_steps=4, **settings)
    list(wb.train(make_model(), task, n_steps=4, overwrite=True, **settings))
    assert latest_checkpoint(tmp_path).name == "step-00000004"


BRANCHED = {"learning_rate": 1e-2, "seed": 5, "flush_every": 3, "checkpoint_every": 4, "spectra_every": 2}


@pytest.fixture
def store(make_model, task, tmp_path):
    """A finished run of ten steps with checkpoints at 4, 8 and 10."""
    list(wb.train(make_model(), task, store=tmp_path / "run.zarr", n_steps=10, **BRANCHED))
    return tmp_path / "run.zarr"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.medium
def test_a_branch_continues_bit_for_bit_from_an_older_checkpoint(store, make_model, task, tmp_path):
    before = contents(tmp_path)
    assert list(list_checkpoints(store.with_suffix(".checkpoints"))) == [4, 8, 10]
    branch = branch_run(store, tmp_path / "branch" / "run.zarr", step=4)
    copied = wb.open_run(branch)
    assert copied["monitors"]["step"].values.tolist() == [0, 1, 2, 3]
    assert copied["spectra"]["step"].values.tolist() == [0, 2]
    assert copied.attrs["branched_from"] == f"{store}, step 4"
    through, resumed = make_model(), make_model()
    list(wb.train(through, task, n_steps=10, **{**BRANCHED, "checkpoint_every": None}))
    records = list(wb.train(resumed, task, store=branch, resume=True, n_steps=10, **BRANCHED))
    assert [record.step for record in records] == [4, 5, 6, 7, 8, 9]
    assert same_weights(through, resumed)
    one, other = (wb.open_run(path)["monitors"].to_dataset() for path in (store, branch))
    assert one.identical(other)
    assert {path: path.read_bytes() for path in before} == before


def test_a_branch_needs_a_checkpoint_a_run_and_a_new_path(store, tmp_path):
    with pytest.raises(CheckpointError, check=says("has no checkpoint of step")):
        branch_run(store, tmp_path / "branch.zarr", step=5)
    with pytest.raises(CheckpointError, check=says("the existing ones are: none.")):
        branch_run(tmp_path / "nothing.zarr", tmp_path / "branch.zarr", step=4)
    with pytest.raises(StoreError, check=says("exists already; pass overwrite=True to replace it, or")):
        branch_run(store, store, step=4)
    assert not (tmp_path / "branch.zarr").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", {}), ("optimizer", {"state": {}, "param_groups": []}), ("random", {}), ("step", None)],
)
def test_a_damaged_state_changes_no_parameter(name, value, make_model, task, tmp_path):
    options = {"n_steps": 4, "store": tmp_path / "a.zarr", "checkpoint_every": 2}
    list(wb.train(make_model(), task, **options))
    for file in (tmp_path / "a.checkpoints").glob("*/training.pt"):
        kept = torch.load(file, weights_only=True)
        kept[name] = value
        if value is None:
            del kept[name]
        torch.save(kept, file)
    model = make_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(wb.errors.CheckpointError, match="is damaged"):
        list(wb.train(model, task, **options, resume=True))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
