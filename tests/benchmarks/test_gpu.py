import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import accelerator, gpu

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

#: Runs the benchmark while only the standard library, torch, NumPy and the requirements of these two can be imported.
_WITH_TORCH_AND_NUMPY_ALONE = """
import sys
ALLOWED = {
    "torch", "torchgen", "functorch", "numpy", "networkx", "sympy", "mpmath", "fsspec", "jinja2", "markupsafe",
    "filelock", "typing_extensions", "setuptools", "triton", "workbench", "benchmarks",
}

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return self.finder.find_spec(name, path, target)
        return None

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
for absent in ("scipy", "xarray", "tqdm", "lazy_loader"):
    try:
        __import__(absent)
    except ImportError:
        continue
    raise AssertionError(absent)
from benchmarks.gpu import main
main(["--small", "--device", "cpu", "--out", sys.argv[1], "--only", "moments", "profiles", "eigenvalues"])
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_moments_and_spectra_are_measured_with_torch_and_numpy_alone(tmp_path):
    command = [sys.executable, "-c", _WITH_TORCH_AND_NUMPY_ALONE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "gpu_small.md").read_text()
    assert text.partition("\n<!--")[0] in done.stdout  # the file has a mark of who wrote it
    assert "failed" not in text
    assert "not complete" not in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Moments of the snapshots",
        "## Profile",
        "## Eigenvalues of a layer",
    ]
    assert "these figures were measured on a CPU" in text
    assert "s left)" in done.stderr


@pytest.mark.slow
def test_what_watching_costs_is_measured_in_a_quick_call(tmp_path, capsys):
    gpu.main(["--quick", "--small", "--device", "cpu", "--out", str(tmp_path)])
    text, said = (tmp_path / "gpu_quick_small.md").read_text(), capsys.readouterr().err
    assert "failed" not in text
    assert "not measured" not in text
    assert "not complete" not in text
    assert text.count("## ") == len(gpu.WATCHING)
    values = next(part for part in text.split("## ") if part.startswith("Values"))
    assert values.count("| 0e+00 |") == 10  # the device is the host
    assert len(said.splitlines()) == text.count("\n| ") - len(gpu.WATCHING) + 1
    gpu.main(["--quick", "--small", "--device", "cpu", "--out", str(tmp_path), "--seconds", "1"])
    assert (tmp_path / "gpu_quick_small.md").read_text() == text


def section(*measurements, **options):
    return accelerator.Section("Example", "", ("what", "a", "b"), list(measurements), **options)


def test_a_failed_measurement_is_reported_and_the_others_continue(tmp_path):
    def fail():
        raise RuntimeError("no memory | at all")

    example = section(
        gpu.Measurement("first", fail),
        gpu.Measurement("second", lambda: (["1", "2"], 3)),
        conclude=lambda values: f"Values: {values}.",
    )
    out = tmp_path / "gpu.md"
    accelerator.measure_all(CPU, [example], out=out)
    text = out.read_text()
    assert "| first | failed: RuntimeError: no memory / at all |  |\n| second | 1 | 2 |" in text
    assert "Values: {'second': 3}." in text


def test_an_interrupted_run_keeps_its_results_and_does_not_measure_them_again(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    files = {"out": tmp_path / "gpu.md", "kept": tmp_path / "gpu.json"}
    first = gpu.Measurement("first", lambda: (["1", "2"], 3))
    with pytest.raises(KeyboardInterrupt):
        accelerator.measure_all(CPU, [section(first, gpu.Measurement("second", interrupt))], **files)
    assert "| first | 1 | 2 |\n\nThis section is not complete." in files["out"].read_text()
    again = gpu.Measurement("first", interrupt), gpu.Measurement("second", lambda: (["4"], None))
    assert "| first | 1 | 2 |\n| second | 4 |  |" in accelerator.measure_all(CPU, [section(*again)], **files)


def test_a_measurement_that_takes_too_long_is_given_up(tmp_path):
    def wait():
        for _ in range(2):
            try:
                threading.Event().wait()
            except Exception:  # noqa: BLE001  as the recorder guards its parts
                pytest.fail("the measurement went on")

    kept = tmp_path / "gpu.json"
    rows = [gpu.Measurement("first", wait, seconds=0.1), gpu.Measurement("second", lambda: (["1", "2"], 3))]
    text = accelerator.measure_all(CPU, [section(*rows)], kept=kept)
    assert "| first | not measured: more than 0 s |  |\n| second | 1 | 2 |" in text
    text = accelerator.measure_all(CPU, [section(gpu.Measurement("third", wait))], kept=kept, seconds=0)
    assert "| third | not measured: no time left |" in text
    assert [*json.loads(kept.read_text())] == ["Example/second"]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"512": 0.5, "1,024": 1.5, "2,048": 3.0}, "should be 1,024"),
        ({"512": 1.5, "1,024": 0.5, "2,048": 3.0}, "should be 2,048"),  # a single width may be an outlier
        ({"512": 0.5, "2,048": 0.9}, "should be above 2,048"),
        ({"512": float("nan")}, "needs a CUDA device"),
    ],
)
def test_the_crossover_of_the_eigenvalues(ratios, expected):
    assert expected in gpu.eigenvalues(CPU, small=True).conclude(ratios)


def test_the_benchmark_sets_the_device_of_the_eigenproblem_and_restores_it():
    before = gpu.modes.CUDA_EIG_MIN_WIDTH
    with gpu.eig_on_device_from(0):
        assert gpu.modes.CUDA_EIG_MIN_WIDTH == 0
    assert before == gpu.modes.CUDA_EIG_MIN_WIDTH


def test_a_model_that_does_not_fit_is_not_built(monkeypatch):
    monkeypatch.setattr(accelerator, "free_bytes", lambda device: 10**9)
    monkeypatch.setitem(gpu.OPENERS, "resident", lambda shape, device: pytest.fail("the model was built"))
    rows = {row.label: row for row in gpu.profiles(CPU, small=False).measurements}
    cells, value = rows["Llama 2 7B, resident, full"].run()
    assert cells[0] == "13.5 GB"
    assert "not measured: needs 29 GB, has 1 GB" in cells[1]
    assert value is None


def test_a_model_of_random_parameters_computes_finite_numbers():
    subject = gpu.resident(gpu.SMALL, CPU)
    model = subject.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(torch.arange(8)[None]).detach()
    assert bool(torch.isfinite(logits).all())
    assert float(logits.float().std()) > 0


def test_without_an_accelerator_the_published_file_is_not_written(monkeypatch):
    found = []
    monkeypatch.setattr(gpu, "measure_all", lambda *_, **files: found.append(files) or "")
    gpu.main(["--device", "cpu"])
    assert found[0]["out"] is None
