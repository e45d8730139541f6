"""Copies of a run that continue from one of its checkpoints, while the run itself is unchanged."""

import pytest

import workbench as wb
from tests.about import says
from tests.small_training import same_weights
from workbench.errors import CheckpointError, StoreError
from workbench.models.checkpoint import list_checkpoints
from workbench.training.checkpoints import branch_run

SETTINGS = {"learning_rate": 1e-2, "seed": 5, "flush_every": 3, "checkpoint_every": 4, "spectra_every": 2}


@pytest.fixture
def store(make_model, task, tmp_path):
    """A finished run of ten steps with checkpoints at 4, 8 and 10."""
    list(wb.train(make_model(), task, store=tmp_path / "run.zarr", n_steps=10, **SETTINGS))
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
    list(wb.train(through, task, n_steps=10, **{**SETTINGS, "checkpoint_every": None}))
    records = list(wb.train(resumed, task, store=branch, resume=True, n_steps=10, **SETTINGS))
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
