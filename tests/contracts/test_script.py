"""Scripts that nobody has edited, run under the command."""

import json
import subprocess
import sys

import pytest

import workbench.cli
from workbench.contracts.results import KEYS, CheckReport, Result, Status
from workbench.contracts.script import _in_stages, exit_status, merged, within

pytestmark = [pytest.mark.subprocess]

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional="--leak" in sys.argv)
        self.head = nn.LazyLinear(20)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


model = Tiny()
model(torch.zeros(1, 2, dtype=torch.long))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    ids = torch.randint(0, 20, (4, 17))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.17g}", torch.rand(()).item())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*words, cwd):
    command = [sys.executable, "-m", "workbench", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


STAGES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(n, optimizer, clears=True):
    for _ in range(n):
        x = torch.randn(6, 4)
        if clears:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()


optimizer = torch.optim.Adam(model.parameters())
train(7, optimizer)
torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, "last.pt")
state = torch.load("last.pt")
model.load_state_dict(state["model"])
optimizer = torch.optim.Adam(model.parameters())
train(9, optimizer, clears=False)
"""


@pytest.mark.medium
def test_a_later_stage_of_a_script_is_checked_too(tmp_path):
    (tmp_path / "train.py").write_text(STAGES)
    run("check", "--updates", 5, "--out", tmp_path / "o.json", "--", "python", "train.py", cwd=tmp_path)
    found = json.loads((tmp_path / "o.json").read_text())
    by_id = {each["id"]: each for each in found["checks"]}
    assert found["n_updates"] == 10
    assert len(found["losses"]) == 10
    assert {id for id, each in by_id.items() if each["status"] == "failed"} == {"resume", "gradients_cleared"}
    assert by_id["resume"]["where"].startswith("the optimizer (train.py:")
    assert by_id["gradients_cleared"]["where"].endswith("(after update 7)")


def test_results_of_stages_become_one():
    def stage(status, n_earlier):
        result = Result("causal", status, f"{status}", where="the mask" if status is Status.FAILED else "")
        return CheckReport([result], 3, 0.5, [1.0]).as_json() | {"n_earlier": n_earlier}

    both = _in_stages([stage(Status.PASSED, 0), stage(Status.NOT_TESTED, 9), stage(Status.FAILED, 20)])
    assert both["causal"].where == "the mask (after update 20)"
    assert (both.n_updates, both.seconds, both.losses) == (9, 1.5, (1.0, 1.0, 1.0))
    assert _in_stages([stage(Status.PASSED, 0), stage(Status.NOT_TESTED, 9)])["causal"].status is Status.PASSED
    question = stage(Status.NOT_TESTED, 9)
    question["checks"][0]["where"] = "the head"
    assert _in_stages([stage(Status.PASSED, 0), question])["causal"].where == "the head (after update 9)"


@pytest.mark.medium
def test_a_script_is_checked_ends_and_leaves_nothing(script, tmp_path):
    done = run("check", "--updates", 3, "--out", tmp_path / "o.json", "--", "python", script, "--leak", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["verdict"] == "failed"
    assert found["n_updates"] == 3
    by_id = {each["id"]: each for each in found["checks"]}
    assert by_id["causal"]["status"] == "failed"
    assert by_id["labels_aligned"]["status"] == "passed"
    assert {"id", "status", "where", "evidence", "remedy", "seconds"} <= by_id["causal"].keys()
    assert "✗ causal" in done.stdout
    assert len(done.stdout.splitlines()) > 5
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "o.json"}


@pytest.mark.medium
def test_a_training_that_goes_on_is_bit_identical(script, tmp_path):
    plain = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    done = run("check", "--updates", 3, "--go-on", "--", "python", script, cwd=tmp_path)
    assert done.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--", "python", "missing.py"], "before its first update"),
        (["--", "bash", "train.sh"], "python SCRIPT or torchrun SCRIPT"),
        ([], "There is no command; pass it after --"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, tmp_path):
    done = run("check", *words, cwd=tmp_path)
    assert done.returncode == 3
    assert sentence in done.stderr.splitlines()[-1]


def test_a_file_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "o.json").write_text("mine")
    assert workbench.cli.main(["check", "--out", str(tmp_path / "o.json"), "--", "python", "x.py"]) == 3
    assert (tmp_path / "o.json").read_text() == "mine"
    assert "overwrite" in capsys.readouterr().err


def test_reports_of_the_workbench_are_replaced_on_request(tmp_path, capsys):
    report = CheckReport([Result("causal", Status.PASSED, "fine")], 3, 0.1)
    assert report.as_json().keys() == {*KEYS}
    data, page = tmp_path / "a.json", tmp_path / "a.html"
    for overwrite in (False, True):
        report.write(data, overwrite=overwrite)
        report.write(page, html=True, overwrite=overwrite)
    command = ["check", "--out", str(data), "--out", str(page), "--", "ruby", "x.rb"]
    assert workbench.cli.main(["check", "--overwrite", *command[1:]]) == 3
    assert "ruby" in capsys.readouterr().err
    assert workbench.cli.main(command) == 3
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.medium
def test_a_reader_that_ends_early_is_no_error(script, tmp_path):
    command = f"{sys.executable} -m workbench check --updates 2 --out o.json -- python {script} | head -c 1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "o.json").exists()


def test_the_command_keeps_options_of_the_launcher():
    own = ["-m", "ours"]
    options = ["-W", "ignore", "-u"]
    assert within(["python", *options, "a.py", "--x"], own)[1:] == [*options, *own, "a.py", "--x"]
    assert within(["python", "-m", "pack.train", "-x"], own)[1:] == [*own, "-m", "pack.train", "-x"]
    given = ["torchrun", "--nproc-per-node", "2", "a.py", "--x", "1"]
    assert within(given, own)[3:] == ["--nproc-per-node", "2", *own, "a.py", "--x", "1"]


def test_a_failure_on_one_rank_counts_and_is_named():
    good = CheckReport([Result("causal", Status.PASSED, "fine")], 3, 0.1)
    bad = CheckReport([Result("causal", Status.FAILED, "leak", where="the mask", remedy="mask")], 3, 0.2)
    both = merged([good, bad])
    assert both["causal"].where == "the mask (rank 1)"
    assert exit_status(both) == 1
    assert exit_status(good) == 0


def test_a_report_is_the_same_from_json_and_written_as_a_page(tmp_path):
    report = CheckReport([Result("causal", Status.FAILED, "a < b & c", where="<x>", remedy="mask", proof="p")], 3, 0.25)
    again = CheckReport.of_json(json.loads(report.write(tmp_path / "a.json").read_text()))
    assert again == report
    page = report.write(tmp_path / "a.html", html=True).read_text()
    assert "a &lt; b &amp; c" in page
    assert "<x>" not in page
