import gzip
import json
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about, says
from tests.io.tool_logs import LOGS
from workbench.diagnosis.diagnose import diagnose
from workbench.errors import MissingPackageError, SchemaError, StoreError
from workbench.io.store import open_run, open_run_or_log, save
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
    ("steps", "between"),
    [
        ([0, 1, 2, 3, 7, 8, 9], "3 and 7"),
        ([0, 10, 20, 50, 60, 70], "20 and 50"),
        ([0, 1, 10, 20, 30], ""),
        ([1, 2, 3, 10, 20, 30], ""),
    ],
)
def test_missing_steps_are_noted(tmp_path, steps, between):
    path = write(tmp_path / "log.csv", ["step", "loss"], [[s, 1.0] for s in steps])
    log = read_log(path)
    assert log["step"].values.tolist() == steps
    assert diagnose(path).attrs["summary"].endswith(log.attrs["notes"])
    assert log.attrs["notes"] == (f"No steps between {between}." if between else "")


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
    assert "(1 left out)" in log.attrs["notes"]


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
    with pytest.raises(SchemaError, check=says("has no step with a loss that is recognized; it has no")):
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


#: Form -> the line of one step; all are read back as they were written.
FORMS = {
    "lines of JSON": lambda step, loss, lr: json.dumps({"lr": lr, "train": {"loss": loss}, "step": step, "text": "x"}),
    "dicts": lambda step, loss, lr: str({"loss": loss, "learning_rate": lr, "step": step}),
    "dicts of text": lambda step, loss, lr: str({"loss": str(loss), "learning_rate": str(lr), "step": str(step)}),
    "colons": lambda step, loss, lr: f"[2026-01-01 10:00:00,123][INFO] step: {step:>5}  loss: {loss}  lr: {lr}",
    "equal signs": lambda step, loss, lr: f"rank0 lr={lr}, loss={loss}, val_loss=9.5, step={step}, eta=0:10:00",
    "words": lambda step, loss, lr: f"Iteration {step:,} / 1,000,000 | Loss {loss} (9.5) | LR {lr} | 2.5s | 50% MFU",
    "Megatron": lambda step, loss, lr: f" iteration {step:8d}/ 2000 | learning rate: {lr!r} | lm loss: {loss!r} |",
    "in color": lambda step, loss, lr: f"\x1b[32mstep: {step}\x1b[0m \x1b[1mloss: {loss}\x1b[0m lr: {lr}",
    "a bar": lambda step, loss, lr: f"\r 10%|#   | {step}/100000 [00:10<01:30,  9.9it/s, loss={loss}, lr={lr}]",
    "a block": lambda step, loss, lr: f"[step={step}/9000,epoch=0]\n    optim/lr={lr}\n    train/CE loss={loss}",
}
FINITE = st.floats(-1e6, 1e6).map(lambda value: float(np.float32(value)))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(
    every=st.integers(1, 12_000),
    values=st.lists(st.tuples(FINITE | st.sampled_from([np.nan, np.inf]), FINITE), min_size=2, max_size=7),
)
def test_what_is_written_is_read(tmp_path_factory, form, every, values):
    steps = [every * (row + 1) for row in range(len(values))]
    path = tmp_path_factory.mktemp("log") / "train.log"
    path.write_text("".join(FORMS[form](step, *row) + "\n" for step, row in zip(steps, values, strict=True)))
    log = read_log(path)
    assert log["step"].values.tolist() == steps
    np.testing.assert_array_equal(log["loss"], [loss for loss, _ in values])
    np.testing.assert_array_equal(log["learning_rate"], [rate for _, rate in values])


def test_what_the_log_lacks_and_other_numbers_are_said(tmp_path):
    header = ["step", "loss", "val/loss", "n_tokens", "memory"]
    log = read_log(write(tmp_path / "log.csv", header, [[0, 3, 3.5, 99, "50%"], [10, 2, None, 198, "60%"]]))
    assert log.attrs["missing"] == "no gradient norm, no learning rate"
    assert log["val_loss"].attrs["source_name"] == "val/loss"
    assert log["memory"].attrs["units"] == "%"
    # The tokens so far are not the monitor of this name, which counts those of a batch.
    assert set(log.data_vars) == {"loss", "val_loss", "n_tokens_of_log", "memory"}


def test_ranks_and_runs_are_told_apart(tmp_path):
    (tmp_path / "ranks.log").write_text(
        "".join(f"[rank{r}] step: {s} loss: {5 - s + r / 8}\n" for s in range(4) for r in (1, 0))
    )
    log = read_log(tmp_path / "ranks.log")
    assert log["loss"].values.tolist() == [5, 4, 3, 2]
    assert log["rank_1_loss"].values.tolist() == [5.125, 4.125, 3.125, 2.125]
    header = ["Step", "short - train/loss", "short - train/loss__MIN", "long - train/loss", "long - train/loss__MAX"]
    log = read_log(write(tmp_path / "panel.csv", header, [[0, 1, 9, 3, 9], [1, None, 9, 2, 9]]))
    assert log["loss"].values.tolist() == [3, 2]
    np.testing.assert_array_equal(log["short_train_loss"], [1, np.nan])
    assert "'long' has the most rows" in log.attrs["notes"]


def test_several_processes_in_one_log_are_no_resumption(tmp_path):
    rows = [[s, 5 - s] for block in range(8) for _ in range(2) for s in range(5 * block, 5 * block + 5)]
    log = read_log(write(tmp_path / "log.csv", ["step", "loss"], rows))
    assert log["step"].values.tolist() == list(range(40))
    assert "resumed_at" not in log.attrs
    assert "8 times" in log.attrs["notes"]


def test_numbers_of_a_run_that_was_replaced_are_dropped(tmp_path):
    rows = [[s, 3, 0.1, None] for s in range(20)] + [[19, None, None, 7.0]]
    rows += [[s, 2, 0.2, None] for s in range(10, 15)]
    log = read_log(write(tmp_path / "log.csv", ["step", "loss", "lr", "val_loss"], rows))
    assert log["step"].values.tolist() == list(range(15))
    np.testing.assert_allclose(log["learning_rate"], [0.1] * 10 + [0.2] * 5)
    assert np.isnan(log["val_loss"]).all()


def test_the_latest_checkpoint_of_a_folder_is_read(tmp_path):
    for last in (10, 5):
        history = [{"loss": 3 - step / 8, "step": step, "epoch": step / 10} for step in range(1, last + 1)]
        (tmp_path / f"checkpoint-{last}").mkdir()
        state = {"global_step": last, "log_history": [*history, {"train_loss": 1.0, "step": last}]}
        (tmp_path / f"checkpoint-{last}" / "trainer_state.json").write_text(json.dumps(state, indent=2))
    log = read_log(tmp_path)
    assert log["step"].values.tolist() == list(range(1, 11))
    assert log.identical(read_log(tmp_path / "checkpoint-10").assign_attrs(log.attrs))
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs" / "host")) as writer:
        for step in range(1, 14):
            writer.add_scalar("train/loss", 3 - step / 8, step)
    log = read_log(tmp_path)  # the run went on after its last checkpoint
    assert log["loss"].values.tolist() == [3 - step / 8 for step in range(1, 14)]
    assert "'runs/host' has the most rows" in log.attrs["notes"]


def test_a_folder_of_mlflow_is_read(tmp_path):
    for name, value in (("train/loss", 2.5), ("val/loss", 9.0), ("lr", 0.125)):
        path = tmp_path / "1" / "abc" / "metrics" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"170000000000{step} {value} {step}\n" for step in range(3)))
    log = read_log(tmp_path)
    assert log["loss"].values.tolist() == [2.5] * 3
    assert log["learning_rate"].values.tolist() == [0.125] * 3
    assert log["val_loss"].values.tolist() == [9.0] * 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.log", b"the weather at 10:30 is fine\nfoo: 3, bar: 4\n", "foo: 3, bar: 4"),
        ("a.log", b"it=1 L=2.5\nit=2 L=2.25 g=1\n", "it=2 L=2.25 g=1"),
        ("a.txt", b"nothing\n", "no numbers"),
        ("a.log", b"", "no numbers"),
        ("a.json", b"[" * 5000, "no numbers"),
        ("a.json", b"null", "no numbers"),
        ("a.json", b'{\n "log_history": [\n  {\n   "loss": 2.5,\n   "step": 10\n  },\n', "no complete JSON"),
        ("a.csv", b"\x89PNG\r\n\0\0", "binary"),
        ("a.log", bytes(range(250, 200, -1)) + b"\0", "binary"),
        ("a.csv", b"step,loss," + b",".join(b"c%d" % i for i in range(100_000)), "100,002 columns"),
        ("a.log.gz", gzip.compress(b"step: 1 loss: 2\n" * 1_000_000, mtime=0), "longer line or more text"),
        ("a.csv.gz", gzip.compress(b"step,loss\n1,2\n", mtime=0)[:-12], "cut off"),
        ("events.out.tfevents.1", b"garbage" * 9, "damaged at its start"),
    ],
)
def test_files_that_are_no_logs_are_rejected_with_what_was_found(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    for read in (read_log, diagnose):
        with pytest.raises((SchemaError, StoreError), match=said) as caught:
            read(tmp_path / name)
        assert "step" in str(caught.value) or "text, CSV, JSON" in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.log")
    for read in (read_log, diagnose):
        with pytest.raises(StoreError, check=about("path", tmp_path / "a.log")):
            read(tmp_path / "a.log")


def test_packed_and_other_encodings(tmp_path):
    text = "step,loss\n0,3.5\n1,3.25\n"
    for name, content in (
        ("a.csv.gz", gzip.compress(text.encode())), ("b.csv", text.encode("utf-16")),
        ("c.csv", text.encode("utf-8-sig")),
        ("d.csv", text.replace("\n", "\r\n").encode()), ("e.csv", b"# by hand\n\n" + text.encode()),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert read_log(tmp_path / name)["loss"].values.tolist() == [3.5, 3.25]


def test_incomplete_lines_are_said(tmp_path):
    lines = "".join(json.dumps({"step": step, "loss": 3.0}) + "\n" for step in range(3))
    (tmp_path / "cut.jsonl").write_text(lines + '{"step": 3, "lo')
    log = read_log(tmp_path / "cut.jsonl")
    assert log.sizes["step"] == 3
    assert "left out: 1" in log.attrs["notes"]


def test_tensorboard_that_is_damaged_resumed_or_of_several_runs(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for name, steps in (("a", range(20)), ("b/x", range(5)), ("b/y", range(9)), ("c", range(10)), ("c", range(6, 12))):
        with SummaryWriter(str(tmp_path / name), filename_suffix=str(steps.start)) as writer:
            for step in steps:
                writer.add_scalar("train/loss", 3 - step / 8 + steps.start, step)
                writer.add_scalar("train/loss vs samples", 9, step * 1000)
    (file,) = (tmp_path / "a").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    log = read_log(tmp_path / "a")
    assert 2 < log.sizes["step"] < 18
    assert f"damaged after step {log['step'].values[-1]}" in log.attrs["notes"]
    several = read_log(tmp_path / "b")
    assert several["loss"].values.tolist() == [3 - step / 8 for step in range(9)]
    assert several["x_train_loss"].values[:5].tolist() == [3 - step / 8 for step in range(5)]
    resumed = read_log(tmp_path / "c")
    assert resumed["loss"].values.tolist() == [3 - step / 8 + 6 * (step >= 6) for step in range(12)]
    assert resumed.attrs["resumed_at"] == [6]
    assert open_run_or_log(tmp_path / "c")["events"]["step"].values.tolist() == [6]


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


def test_a_log_can_be_saved_as_a_run(log_path, tmp_path):
    log = read_log(log_path)
    saved = open_run(save(log, tmp_path / "log.zarr"))
    np.testing.assert_array_equal(saved["monitors"]["loss"], log["loss"])


def test_a_log_is_not_opened_as_a_run(log_path):
    with pytest.raises(StoreError, check=about("path", log_path, "an undamaged run")):
        open_run(log_path)


def test_tensorboard_folder_without_scalars(tmp_path):
    with pytest.raises(StoreError, check=says("holds no log; pass a folder with TensorBoard events,")):
        read_log(tmp_path)


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(MissingPackageError, check=about("tensorboard", None)):
        read_log(tmp_path)
