import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about
from tests.io.tool_logs import LOGS
from workbench.diagnosis.diagnose import diagnose
from workbench.errors import MissingPackageError, SchemaError, StoreError
from workbench.io.store import open_run
from workbench.io.training_logs import is_log, read_log
from workbench.schema.runs import MONITORS


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


def test_evaluations_and_the_end_of_a_hugging_face_log_are_skipped(tmp_path):
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


@pytest.mark.parametrize("tool", LOGS)
def test_the_logs_of_many_tools_are_read(tmp_path, tool):
    name, text, steps, expected = LOGS[tool]
    path = tmp_path / "metrics" / name  # the folder that MLflow writes to
    path.parent.mkdir()
    path.write_text(text, newline="")
    log = read_log(path)
    assert log["step"].values.tolist() == steps
    assert set(log.data_vars) & set(MONITORS) == set(expected)
    for monitor, values in expected.items():
        np.testing.assert_allclose(log[monitor], values, rtol=1e-6)
    assert is_log(path) or not path.suffix or tool == "History of Keras"  # as any other columns of numbers


@pytest.mark.parametrize(
    ("steps", "value", "expected", "between"),
    [
        ([0, 1, 2, 3, 7, 8, 9], 7, "at most 1 after step 3", "3 and 7"),
        ([0, 10, 20, 50, 60, 70], 50, "at most 10 after step 20", "20 and 50"),
    ],
)
def test_missing_steps_are_noted_or_rejected(tmp_path, steps, value, expected, between):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[s, 1.0] for s in steps])
    log = read_log(path)
    assert log["step"].values.tolist() == steps
    assert between in log.attrs["notes"]
    with pytest.raises(SchemaError, check=about("step", value, expected)):
        read_log(path, allow_gaps=False)


def test_a_log_with_gaps_is_diagnosed(tmp_path):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[s, 2.0 - 0.01 * s] for s in (*range(20), *range(40, 60))])
    assert diagnose(path).attrs["kind"] == "diagnosis"


@settings(max_examples=30, deadline=None)
@given(starts=st.lists(st.integers(0, 40), min_size=1, max_size=4), length=st.integers(12, 25), every=st.integers(1, 9))
def test_the_later_run_counts_where_steps_overlap(tmp_path_factory, starts, length, every):
    rows, expected, resumed, end = [], {}, [], 0
    for run, start in enumerate(starts):
        first = min(start, end)  # a run resumes before the end of the one before it
        resumed += [first * every] if first < end - 1 else []
        end = first + length
        expected = {step: loss for step, loss in expected.items() if step < first * every}
        for step in range(first, end):
            expected[step * every] = run + step / 1000
            rows.append([step * every, run + step / 1000])
    log = read_log(write(tmp_path_factory.mktemp("log") / "log.csv", ["step", "loss"], rows))
    assert dict(zip(log["step"].values.tolist(), log["loss"].values.tolist(), strict=True)) == expected
    assert log.attrs.get("resumed_at", []) == resumed
    assert ("resumed" in log.attrs["notes"]) == bool(resumed)


def test_a_repeated_step_counts_once_and_is_noted(tmp_path):
    log = read_log(write(tmp_path / "log.csv", ["step", "loss"], [[0, 3], [1, 2.5], [1, 2], [2, 1]]))
    assert log["loss"].values.tolist() == [3, 2, 1]
    assert "1 row" in log.attrs["notes"]


@pytest.mark.parametrize(
    ("header", "rows", "name", "value"),
    [
        (["step", "value"], [[0, 1]], "loss", "step, value"),
        (["time", "loss"], [[0, 1]], "step", "time, loss"),
        (["step", "loss"], [[0, 1], [1, "much"]], "loss", "much"),
        (["step", "loss"], [[0.5, 1]], "step", 0.5),
        (["step", "loss"], [[0, None]], "loss", "step"),
    ],
)
def test_invalid_logs_are_rejected(tmp_path, header, rows, name, value):
    with pytest.raises(SchemaError, check=about(name, value)):
        read_log(write(tmp_path / "log.csv", header, rows))


def test_an_empty_log_is_rejected(tmp_path):
    path = write(tmp_path / "log.csv", ["step", "loss"], [])
    with pytest.raises(SchemaError, check=about("path", path)):
        read_log(path)


def test_a_missing_log_is_rejected(tmp_path):
    with pytest.raises(StoreError, check=about("path", tmp_path / "nowhere.csv")):
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
    """A log of six steps, in each supported form."""
    if request.param == "CSV":
        return write(tmp_path / "log.csv", ["step", "loss"], [[step, 3 - 0.1 * step] for step in range(6)])
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(6):
            writer.add_scalar("loss", 3 - 0.1 * step, step)
    (file,) = (tmp_path / "events").iterdir()
    return file.parent if request.param == "TensorBoard folder" else file


def test_the_path_of_a_log_is_diagnosed_like_its_data(log_path):
    by_path, by_data = diagnose(log_path), diagnose(read_log(log_path))
    assert by_path.attrs["run"] == str(log_path)
    for tree in (by_path, by_data):
        del tree.attrs["run"], tree.attrs["created"]  # the calls may differ by a second
    assert by_path.identical(by_data)


def test_a_log_is_not_opened_as_a_run(log_path):
    with pytest.raises(StoreError, check=about("path", log_path, "a run")):
        open_run(log_path)


def test_tensorboard_folder_without_scalars(tmp_path):
    with pytest.raises(StoreError, check=about("path", tmp_path)):
        read_log(tmp_path)


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(MissingPackageError, check=about("tensorboard", None)):
        read_log(tmp_path)
