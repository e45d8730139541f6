import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.diagnosis.diagnose import diagnose
from workbench.errors import MissingPackageError, SchemaError, StoreError
from workbench.io.store import open_run
from workbench.io.training_logs import read_log


def write(path, header, rows):
    path.write_text(
        "\n".join([",".join(header), *(",".join("" if v is None else str(v) for v in row) for row in rows)]) + "\n"
    )
    return path


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(["step", "train/loss", "lr", "grad_norm", "comment"]), every=st.integers(1, 20))
def test_any_order_of_columns_gives_the_same_log(tmp_path_factory, order, every):
    values = {
        "step": [i * every for i in range(8)], "train/loss": np.linspace(3, 1, 8), "lr": np.linspace(0, 1e-3, 8),
        "grad_norm": np.linspace(1, 2, 8), "comment": ["x"] * 8,
    }  # fmt: skip
    path = write(tmp_path_factory.mktemp("log") / "log.csv", order, zip(*(values[name] for name in order), strict=True))
    log = read_log(path)
    assert log["step"].values.tolist() == values["step"]
    for name, column in (("loss", "train/loss"), ("learning_rate", "lr"), ("grad_norm", "grad_norm")):
        np.testing.assert_allclose(log[name], values[column])
    assert log["loss"].attrs["units"] == "nat"


def test_hugging_face_log_leaves_out_evaluations_and_the_end(tmp_path):
    header = ["epoch", "eval_loss", "grad_norm", "learning_rate", "loss", "step", "train_runtime"]
    rows = [
        [0.1, None, 1.5, 1e-4, 3.0, 10, None],
        [0.2, None, 1.4, 2e-4, 2.5, 20, None],
        [0.2, 2.6, None, None, None, 20, None],
    ]
    rows += [[0.3, None, None, 2e-4, 2.2, 30, None], [0.3, None, None, None, None, 30, 12.5]]
    log = read_log(write(tmp_path / "trainer.csv", header, rows))
    assert log["step"].values.tolist() == [10, 20, 30]
    np.testing.assert_allclose(log["grad_norm"], [1.5, 1.4, np.nan])


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([0, 1, 2, 3, 7, 8, 9], "lacks steps between 3 and 7, expected one every 1; .*allow_gaps=True"),
        ([0, 10, 20, 50, 60, 70], "lacks steps between 20 and 50, expected one every 10"),
        ([0, 1, 2, 2, 3], "Step 2 of .* comes twice, expected steps that rise"),
        ([0, 1, 2, 0, 1], "Step 2 of .* is followed by 0, expected steps that rise"),
    ],
)
def test_missing_repeated_and_falling_steps_are_refused(tmp_path, steps, sentence):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[s, 1.0] for s in steps])
    with pytest.raises(SchemaError, match=sentence):
        read_log(path)


def test_a_log_with_gaps_is_taken_when_allowed(tmp_path):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[s, 2.0 - 0.01 * s] for s in (*range(20), *range(40, 60))])
    log = read_log(path, allow_gaps=True)
    assert log.sizes["step"] == 40
    assert diagnose(log).attrs["kind"] == "diagnosis"


def test_allowing_gaps_allows_no_repeated_steps(tmp_path):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[0, 1], [0, 1]])
    with pytest.raises(SchemaError, match="comes twice"):
        read_log(path, allow_gaps=True)


@pytest.mark.parametrize(
    ("header", "rows", "sentence"),
    [
        (["step", "value"], [[0, 1]], "has no column of the loss among step, value; name it 'loss'"),
        (["time", "loss"], [[0, 1]], "has no column of steps among time, loss; name it 'step'"),
        (["step", "loss"], [[0, 1], [1, "much"]], "Line 3 of .* has 'much' for loss, expected a number"),
        (["step", "loss"], [[0.5, 1]], "Line 2 of .* has no whole number for its step"),
        (["step", "loss"], [[0, None]], "has no row with a loss"),
    ],
)
def test_what_is_no_log_is_refused_with_one_sentence(tmp_path, header, rows, sentence):
    with pytest.raises(SchemaError, match=sentence):
        read_log(write(tmp_path / "log.csv", header, rows))


def test_nothing_there(tmp_path):
    with pytest.raises(StoreError, match="There is no log at"):
        read_log(tmp_path / "nowhere.csv")


def test_tensorboard_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(12):
            writer.add_scalar("train/loss", 3 - 0.1 * step, step)
            writer.add_scalar("train/learning_rate", 1e-3, step)
            if step % 2 == 0:
                writer.add_scalar("train/grad_norm", 1.0 + step, step)
    log = read_log(tmp_path / "events")
    np.testing.assert_allclose(log["loss"], 3 - 0.1 * np.arange(12), rtol=1e-6)
    assert np.isnan(log["grad_norm"].values[1])
    assert log["grad_norm"].values[2] == 3.0


@pytest.fixture(params=["CSV", "TensorBoard folder", "TensorBoard file"])
def log_path(request, tmp_path):
    """A log of six steps, in each form that there is."""
    if request.param == "CSV":
        return write(tmp_path / "log.csv", ["step", "loss"], [[step, 3 - 0.1 * step] for step in range(6)])
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(6):
            writer.add_scalar("loss", 3 - 0.1 * step, step)
    (file,) = (tmp_path / "events").iterdir()
    return file.parent if request.param == "TensorBoard folder" else file


def test_the_path_of_a_log_is_diagnosed_as_what_read_log_gives(log_path):
    by_path, by_data = diagnose(log_path), diagnose(read_log(log_path))
    assert by_path.attrs["run"] == str(log_path)
    for tree in (by_path, by_data):
        del tree.attrs["run"], tree.attrs["created"]  # two calls may be made in two seconds
    assert by_path.identical(by_data)


def test_a_log_is_no_run_to_open(log_path):
    with pytest.raises(StoreError, match=r"is a log of another tool, not a run; read it with wb.read_log\(\)"):
        open_run(log_path)


def test_tensorboard_folder_without_scalars(tmp_path):
    with pytest.raises(StoreError, match="has no scalars of TensorBoard"):
        read_log(tmp_path)


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(MissingPackageError, match="needs the package tensorboard; install it"):
        read_log(tmp_path)
