import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

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
main(["--small", "--device", "cpu", "--out", sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_the_benchmark_runs_with_torch_and_numpy_alone(tmp_path):
    out = tmp_path / "gpu.md"
    command = [sys.executable, "-c", _WITH_TORCH_AND_NUMPY_ALONE, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.partition("\n<!--")[0] in done.stdout  # the file has a mark of who wrote it
    failed = {line.split(" | ")[0].strip("| ") for line in text.splitlines() if "failed" in line}
    assert failed == {"monitors and alarms"}  # alarms need SciPy
    assert "not complete" not in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Moments of the snapshots",
        "## The training loop, and how often the host waits for the device",
        "## Cost of the monitors",
        "## Profile",
        "## Eigenvalues of a layer",
    ]
    assert "these figures were measured on a CPU" in text
    assert "min left)" in done.stderr


def section(*measurements, **options):
    return gpu.Section("Example", "", ("what", "a", "b"), list(measurements), **options)


def test_a_failed_measurement_is_reported_and_the_others_continue(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("no memory | at all")

    example = section(
        gpu.Measurement("first", fail),
        gpu.Measurement("second", lambda: (["1", "2"], 3)),
        conclude=lambda values: f"Values: {values}.",
    )
    monkeypatch.setitem(gpu.SECTIONS, "example", lambda device, small: example)
    out = tmp_path / "gpu.md"
    gpu.measure_all(CPU, ["example"], True, out)
    text = out.read_text()
    assert "| first | failed: RuntimeError: no memory / at all |  |\n| second | 1 | 2 |" in text
    assert "Values: {'second': 3}." in text


def test_an_interrupted_run_keeps_its_results(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    example = section(gpu.Measurement("first", lambda: (["1", "2"], 3)), gpu.Measurement("second", interrupt))
    monkeypatch.setitem(gpu.SECTIONS, "example", lambda device, small: example)
    out = tmp_path / "gpu.md"
    with pytest.raises(KeyboardInterrupt):
        gpu.measure_all(CPU, ["example"], True, out)
    assert "| first | 1 | 2 |\n\nThis section is not complete." in out.read_text()


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
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 10**9)
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


def test_without_an_accelerator_the_published_file_is_not_written(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "measure_all", lambda device, names, small, out: f"out: {out}")
    gpu.main(["--device", "cpu"])
    assert "out: None" in capsys.readouterr().out
