"""Progress of long computations in a terminal, in a notebook and in a function."""

import re
import subprocess
import sys
import threading
import time

import pytest

import workbench as wb
from workbench.assessment.plan_trials import rate_pilot
from workbench.errors import SnapshotError
from workbench.io.progress import Progress
from workbench.models.losses import token_loss
from workbench.training.training_plan import TrainingPlan


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in which progress is shown without delay."""
    monkeypatch.setattr("workbench.io.progress._DELAY", 0.05)
    monkeypatch.setattr("workbench.io.progress._EVERY_IN_FILE", 0.05)


def test_a_notebook_has_one_display_that_ends_as_one_line(notebook):
    with Progress(True, "profiled", total=3, unit="layer") as bar:
        bar.describe("spectra of <a>")
        bar.update()
        wait_for(lambda: len(notebook.contents) > 2)  # without another completed unit
        bar.update()
        bar.update()
    assert notebook.n_displays == 1
    first = notebook.contents[0]
    assert re.fullmatch(
        r"profiled 1 of 3 layers · spectra of <a> · 0 s, about 1 s left · interrupt \(■\) to stop", first["text/plain"]
    )
    assert '<progress aria-label="progress" value="0.333"' in first["text/html"]
    assert 'role="status"' in first["text/html"]
    assert "&lt;a&gt;" in first["text/html"]
    assert "var(--jp-" in first["text/html"]
    assert notebook.lines[-1] == "profiled 3 layers in 0 s"
    assert "<progress" not in notebook.contents[-1]["text/html"]


def test_an_unknown_total_is_not_shown(notebook):
    with Progress(True, "read", unit="line") as bar:
        bar.update()
        wait_for(lambda: notebook.contents)
    assert notebook.lines[0] == "read 1 line · 0 s · interrupt (■) to stop"
    assert "value=" not in notebook.contents[0]["text/html"]
    assert notebook.lines[-1] == "read 1 line in 0 s"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SnapshotError])
def test_stopped_work_shows_its_progress_and_raises_its_error(notebook, error):
    def stop(bar):
        bar.update()
        wait_for(lambda: notebook.contents)
        raise error

    with pytest.raises(error), Progress(True, "profiled", total=30, unit="layer") as bar:
        stop(bar)
    assert notebook.lines[-1] == "stopped after 1 of 30 layers"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("Progress")]


def test_fast_work_shows_nothing(notebook, monkeypatch, capsys):
    monkeypatch.undo()
    for progress in (True, False):
        with Progress(progress, "profiled", total=1, unit="layer") as bar:
            bar.update()
    with pytest.raises(KeyboardInterrupt), Progress(True, "profiled", total=1, unit="layer"):
        raise KeyboardInterrupt
    assert not notebook.contents
    assert capsys.readouterr() == ("", "")


def test_other_threads_show_nothing_in_a_notebook(notebook):
    def work():
        with Progress(True, "profiled", total=1, unit="layer"):
            time.sleep(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not notebook.contents


def test_a_terminal_has_a_bar_that_disappears(terminal, capsys):
    def stop():
        time.sleep(0.2)
        raise KeyboardInterrupt

    with Progress(True, "profiled", total=3, unit="layer") as bar:
        bar.update()
        time.sleep(0.3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "profiled 1 of 3 layers · 0 s, about 1 s left" in err
    assert not err.rpartition("\r")[0].rpartition("\r")[2].strip()
    with pytest.raises(KeyboardInterrupt), Progress(True, "profiled", total=3, unit="layer"):
        stop()
    assert capsys.readouterr().err.endswith("stopped after 0 of 3 layers\n")


def test_a_function_receives_all_texts_and_may_end_the_work(capsys):
    texts = []
    with Progress(texts.append, "assessed it", total=4, unit="%") as bar:
        bar.begin("structure", 1)
        bar.heading = "of two: "
        bar.begin("rates", 2)
        bar.step("20 of 40", 0.5)
        assert str(bar).startswith("assessed it: 50 % · of two: rates: 20 of 40 · 0 s, about")
        bar.begin("devices", 1)
        assert bar.fraction == 0.75
    assert texts == ["structure", "of two: rates", "of two: rates: 20 of 40", "of two: devices"]

    def stop(text):
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="1 of 2 runs"), Progress(stop, "made", total=2, unit="run") as bar:
        bar.update()
    assert capsys.readouterr() == ("", "")


SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 16}


def test_an_interrupted_assessment_leaves_no_hooks_and_one_line(notebook):
    model = wb.zoo.transformer(**SIZE)

    def loss(logits, targets):
        if notebook.lines and "useful rates" in notebook.lines[-1]:
            raise KeyboardInterrupt
        return token_loss(logits, targets)

    with pytest.raises(KeyboardInterrupt):
        wb.assess(model, loss=loss, plan={"training": {"n_steps": 100, "batch_size": 4}})
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert re.fullmatch(r"stopped at \d+ %", notebook.lines[-1])


@pytest.mark.medium
def test_an_interrupted_pilot_raises_although_rounds_are_finished():
    task = wb.tasks.associative_recall(length=16, vocab_size=16, n_pairs=3, batch_size=4)
    n_updates = []

    def stop_late():
        n_updates.append(1)
        if len(n_updates) == 250:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rate_pilot(wb.zoo.transformer(**SIZE), task, TrainingPlan(n_steps=300), on_update=stop_late)


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_saved_notebook_holds_only_the_last_line(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    source = """
        import time
        from workbench.io.progress import Progress
        with Progress(True, "profiled", total=2, unit="layer") as bar:
            for _ in range(2):
                time.sleep(0.9)
                bar.update()
    """
    cell = nbformat.v4.new_code_cell(re.sub("^ {8}", "", source.strip("\n"), flags=re.M))
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=120, kernel_name="python3").execute()
    (output,) = cell.outputs
    assert output["output_type"] == "display_data"
    assert output["data"]["text/plain"] == "profiled 2 layers in 2 s"
    assert "<progress" not in output["data"]["text/html"]


@pytest.mark.subprocess
def test_progress_does_not_import_ipython():
    code = "import sys, workbench as wb; wb.profile(wb.zoo.transformer(d_model=8, n_layers=2, n_heads=1), "
    code += "wb.tasks.associative_recall(), n_snapshots=64); print('IPython' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
