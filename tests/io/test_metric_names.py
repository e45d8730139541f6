from pathlib import PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import workbench as wb
from workbench.io.run_output import RunOutput, stored_names
from workbench.io.run_writer import RunWriter
from workbench.schema.runs import MONITORS

HOSTILE = [
    "step", "event", "layer", "train/acc", "train_acc", "loss/raw", "../../evil", "/x", "..", ".", "", "x" * 256,
    "y" * 256 + "/", "zarr.json", "c/0", "c", "new\nline", "loss ", "Loss", "a\0b", "a\\b", "__proto__", "é☃", "\ud800",
    "<script>", "grad/norm",
]  # fmt: skip


@given(names=st.sets(st.sampled_from([*MONITORS, *HOSTILE]) | st.text(max_size=150)))
@example(names={"loss", "Loss", "LOSS"})
@example(names=set(HOSTILE))
def test_every_name_is_stored_once_under_one_of_a_file(names):
    found = stored_names(sorted(names))
    assert found.keys() == names
    assert len({name.lower() for name in found.values()}) == len(names)
    assert all(found[name] == name for name in names & MONITORS.keys())
    for name in found.values():
        assert PurePosixPath(name).name == name
        assert len(name.encode()) < 255
        assert name not in ("step", "event", "zarr.json", "..")
        assert not name.startswith(("__", "."))
        assert name.isprintable()
    assert stored_names(sorted(names, reverse=True)) == found


def test_usual_names_are_unchanged():
    names = ["loss", "my loss", "accuracy_top-5", "lr.head", "größe", "_private"]
    assert stored_names(names) == {name: name for name in names}
    assert stored_names(["train/acc"]) == {"train/acc": "train_acc"}


@pytest.mark.medium
def test_hostile_names_cost_no_row_and_no_other_metric(tmp_path):
    path, metrics = tmp_path / "run.zarr", ["loss", *HOSTILE]
    for first in (0, 3):
        writer = RunWriter.reopen(path, before_step=first) if first else RunWriter(path, {})
        output = RunOutput(writer)
        for step in range(first, first + 3):
            output.add("monitors", step, {name: float(step + place) for place, name in enumerate(metrics)})
        output.close()
    monitors = wb.open_run(path).load()["monitors"].to_dataset()
    assert [each for each in tmp_path.iterdir() if each.name != ".index"] == [path]
    assert monitors["step"].values.tolist() == [0, 1, 2, 3, 4, 5]
    kept = {variable.attrs.get("logged_as", name): variable for name, variable in monitors.data_vars.items()}
    for place, name in enumerate(metrics):
        values = kept[name.encode(errors="backslashreplace").decode()]
        assert values.values.tolist() == [step + place for step in range(6)]
