"""The command line: its exit status can gate a pipeline, and errors are one sentence."""

import importlib
import json
import os
import subprocess
import sys

import pytest

import workbench as wb
from tests.reports import made_trees
from workbench import cli
from workbench.errors import OptionError
from workbench.schema.statuses import ExitStatus, Verdict


@pytest.fixture
def assessed(monkeypatch):
    """A replacement of the assessment that returns synthetic trees and keeps its arguments."""
    calls = []

    def assess(subject, task=None, *, plan=None, seed=0, progress=False):
        calls.append((subject, plan, seed))
        calls[-1] += (progress,)
        return made_trees.assessment(assess.verdict)

    assess.verdict = "proceed"
    monkeypatch.setattr(importlib.import_module("workbench.assessment.assess"), "assess", assess)
    reports = importlib.import_module("workbench.reports.make_report")
    monkeypatch.setattr(reports, "report", lambda tree, path, overwrite=False: path.write_text(tree.attrs["verdict"]))
    assess.calls = calls
    return assess


@pytest.mark.parametrize(("verdict", "status"), [("proceed", 0), ("cannot say", 4), ("at risk", 1), ("refuse", 2)])
def test_the_verdict_is_the_exit_status(verdict, status, assessed, tmp_path, capsys):
    assessed.verdict = verdict
    paths = [tmp_path / "a.html", tmp_path / "a.md"]
    words = ["assess", "gpt2", "--seed", "7", "--out", str(paths[0]), "--out", str(paths[1])]
    assert cli.main([*words, "--tree", str(tmp_path / "a.nc")]) == status
    out, err = capsys.readouterr()
    assert out == f"{verdict}: {made_trees.assessment(verdict).attrs['summary']}\n"
    assert err.splitlines()[0] == f"wrote {tmp_path / 'a.nc'}"
    assert [path.read_text() for path in paths] == [verdict] * 2
    assert wb.open_run(tmp_path / "a.nc").attrs["verdict"] == verdict
    ((subject, plan, seed, progress),) = assessed.calls
    assert (subject.name, plan, seed, progress) == ("gpt2", None, 7, True)


def test_quiet_prints_only_the_verdict(assessed, capsys):
    assert cli.main(["assess", "gpt2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert assessed.calls[0][-1] is False


def test_plans_and_options_are_read_from_files(assessed, tmp_path):
    (tmp_path / "plan.toml").write_text("[training]\nlearning_rate = 0.01\n")
    (tmp_path / "mine.toml").write_text('norm = "none"\nd_model = 32\nn_layers = 3\nn_heads = 2\n')
    (tmp_path / "mine.json").write_text('{"norm": "none", "d_model": 32, "n_layers": 3, "n_heads": 2}')
    for name in ("mine.toml", "mine.json"):
        assert cli.main(["assess", str(tmp_path / name), "--plan", str(tmp_path / "plan.toml"), "--quiet"]) == 0
    for subject, plan, *_ in assessed.calls:
        assert (subject.name, subject.width, subject.depth) == ("mine", 32, 3)
        assert plan.training.learning_rate == 0.01


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["assess", "gpt2", "--out", "a.pdf"],
            "'a.pdf' has the suffix '.pdf', expected one of .html, .md, .ipynb.",
        ),
        (["assess", "gpt2", "--out", "there.html"], "there.html exists already; pass --overwrite"),
        (["assess", "gpt2", "--tree", "a.csv"], "'a.csv' has the suffix '.csv', expected one of .nc, .zarr."),
        (["assess", "gpt2", "--plan", "nowhere.toml"], "nowhere.toml"),
        (["assess", "gpt2", "--tree", "c.nc", "--out", "c.ipynb"], "c.nc would be written twice"),
        (["assess", "gpt2", "--out", "c.md", "--out", "./c.md"], "c.md would be written twice"),
        (["assess", "gtp2"], "gtp2"),
        (["assess", "broken.toml"], "it is not valid TOML"),
        (["assess", "broken.json"], "it is not valid JSON"),
        (["assess", "weights.bin"], "weights.bin does not describe a design"),
        (["diagnose", "nowhere.zarr"], "nowhere.zarr is not an undamaged run (there is no such file)"),
        (["profile", "./nowhere"], "There is no file or folder ./nowhere; check the path."),
        (["lab", "notebooks/nothing.ipynb"], "There is no notebook notebooks/nothing.ipynb"),
    ],
)
def test_invalid_input_is_one_sentence_and_status_3(words, sentence, assessed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("there.html", "mine"), ("broken.toml", "norm ="), ("broken.json", "{"), ("weights.bin", "")):
        (tmp_path / name).write_text(text)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.main(words) == ExitStatus.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("workbench: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert not assessed.calls
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [[], ["assess"], ["asses", "gpt2"], ["assess", "gpt2", "--seed", "x"]])
def test_invalid_arguments_are_not_mistaken_for_a_verdict(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == ExitStatus.BAD_INPUT
    assert "--help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("x"), 5), (KeyboardInterrupt(), 130), (OptionError("bad"), 3)]
)
def test_errors_are_not_mistaken_for_a_verdict(error, status, assessed, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(importlib.import_module("workbench.assessment.assess"), "assess", fail)
    assert cli.main(["assess", "gpt2", "--quiet"]) == status


def test_a_checkpoint_is_profiled(tmp_path, capsys):
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=256, max_length=64)
    wb.save_checkpoint(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("some words of a text\n" * 40)
    words = ["profile", str(tmp_path / "model"), "--quiet", "--tree", str(tmp_path / "s.nc")]
    status = cli.main([*words, "--text", str(tmp_path / "text.txt")])
    out, err = capsys.readouterr()
    # Models of the zoo have no tokenizer, so text is rejected.
    assert (status, out) == (ExitStatus.BAD_INPUT, "")
    assert err.startswith("workbench: ")


def test_exit_statuses_are_unique_and_listed_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["assess", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    expected = "0 proceed, 1 at risk, 2 refuse, 3 invalid input, 4 cannot say, 5 internal error."
    assert f"Exit status: {expected}" in words
    statuses = [*(verdict.exit_status for verdict in Verdict), *ExitStatus]
    assert len(set(statuses)) == len(statuses)


@pytest.mark.subprocess
def test_help_loads_no_large_package():
    code = "import sys; from workbench import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'xarray', 'numpy', 'matplotlib', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "assess" in done.stdout


@pytest.mark.subprocess
def test_the_status_is_that_of_the_process():
    done = subprocess.run([sys.executable, "-m", "workbench", "asses"], capture_output=True, text=True, check=False)
    assert done.returncode == ExitStatus.BAD_INPUT
    assert "--help" in done.stderr


@pytest.mark.slow
@pytest.mark.render
def test_a_design_and_a_plan_are_assessed_and_reported(tmp_path, monkeypatch, capsys):
    """A complete assessment of a tiny design, without replacements."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(
        'norm = "none"\nd_model = 16\nn_layers = 2\nn_heads = 2\nvocab_size = 32\nmax_length = 16\n'
    )
    (tmp_path / "plan.toml").write_text("[training]\nlearning_rate = 3.0\nn_steps = 50\n")
    words = ["assess", "tiny.toml", "--plan", "plan.toml", "--out", "report.html", "--tree", "tree.nc"]
    status = cli.main(words)
    out, err = capsys.readouterr()
    tree = wb.open_run(tmp_path / "tree.nc")
    assert status == tree.attrs["exit_status"], err
    assert status in (1, 2)  # no design converges at a rate of 3
    assert out == f"{tree.attrs['verdict']}: {tree.attrs['summary']}\n"
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(html.encode()) < 3_000_000
    assert tree.attrs["summary"].replace("'", "&#39;") in html
    assert "wrote report.html" in err


def commands():
    (action,) = (each for each in cli._parser()._actions if each.dest == "==SUPPRESS==")
    return action.choices


def test_every_command_has_an_example_that_is_valid_and_json(capsys):
    for name, command in commands().items():
        example = command.epilog.removeprefix("Example: ").split()
        assert example[:2] == ["workbench", name]
        given = cli._parser().parse_args(example[1:])
        assert given.example == " ".join(example)
        assert hasattr(given, "json") == (name not in ("mcp", "lab"))


def test_diagnosis_as_json(tmp_path, capsys):
    run = str(wb.samples.failed_run("architecture"))
    assert cli.main(["diagnose", run, "--json", "--out", str(tmp_path / "a.md")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["causes"][0]["cause"], found["causes"][0]["layer"]) == ("diagnosis", "architecture", 1)
    assert found["found"][0].startswith("The first loss is 18.6 nat")
    assert not [name for each in (found, *found["causes"]) for name in each if "probabilit" in name]


def test_a_report_of_saved_data_and_of_a_run(tmp_path, capsys):
    run = str(wb.samples.failed_run("architecture"))
    assert cli.main(["diagnose", run, "--quiet", "--tree", str(tmp_path / "a.nc")]) == 0
    for i, data in enumerate((tmp_path / "a.nc", run)):
        assert cli.main(["report", str(data), "--quiet", "--out", str(tmp_path / f"{i}.md")]) == 0
    first, second = ((tmp_path / f"{i}.md").read_text().splitlines()[:8] for i in (0, 1))
    assert first == second


def test_recorded_runs_are_compared(capsys):
    runs = [str(wb.samples.failed_run(name)) for name in ("architecture", "healthy")]
    assert cli.main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["architectures"]
    expected = wb.compare({name: wb.open_run(wb.samples.failed_run(name)) for name in ("architecture", "healthy")})
    assert [row["architecture"] for row in rows] == ["architecture", "healthy"]
    assert [row["spectral_radius"] for row in rows] == pytest.approx(
        expected["spectral_radius"].sel(source="ours").values
    )
    assert cli.main(["compare", *runs]) == 0
    assert "healthy" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.medium
def test_the_rates_of_a_design(tmp_path, capsys):
    options = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 16, "max_length": 8}
    (tmp_path / "mine.json").write_text(json.dumps(options))
    (tmp_path / "plan.toml").write_text("[training]\nn_steps = 100\nbatch_size = 4\n")
    words = ["find-rate", str(tmp_path / "mine.json"), "--plan", str(tmp_path / "plan.toml"), "--budget", "200"]
    assert cli.main([*words, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_steps"] == 100
    assert 0 < found["n_updates"] <= 200
    assert set(found["best_rate"]) >= {"value", "low", "high"}


@pytest.mark.slow
@pytest.mark.subprocess
def test_the_demonstration_finds_its_fault(tmp_path, capsys):
    assert cli.main(["demo", "--store", str(tmp_path / "demo.zarr"), "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["established"] == ["precision"]


@pytest.mark.subprocess
def test_names_of_commands_are_completed(tmp_path):
    line = "workbench fi"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": " ",
    }
    environment["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "out")
    subprocess.run([sys.executable, "-m", "workbench"], env=environment, check=True, timeout=60)
    assert (tmp_path / "out").read_text().split() == ["find-rate"]
