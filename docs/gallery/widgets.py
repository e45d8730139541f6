"""Widgets."""

import workbench as wb
from workbench import widgets


def Workbench():
    """All widgets in one: a list of sources on the left, and views of what is ticked on the right.

    Two recorded runs, compared. The widget shows the lines of Python that do the same.
    """
    bench = widgets.Workbench()
    bench.ticked = ["Pre-LN", "Mamba"]
    bench.shown = ["compare"]
    bench.wait()
    return bench


def Ward():
    """A practice case: a run with a hidden cause, and a budget of measurements to find it.

    The complaint and the first measurement of a case. The score appears when the case is finished.
    """
    ward = widgets.Ward(3, level=2)
    ward.measure("loss")
    ward.wait()
    return ward


def SpectrumExplorer():
    """The eigenvalues of several models, with controls of layers, reliability and thresholds.

    Two trained models that ship with the package. Selecting modes in one panel highlights their layers in the others.
    """
    text, _ = wb.tasks.text_bytes(batch_size=32, seed=1).batch(0)
    names = ("pre_ln", "no_norm")
    spectra = {name: wb.profile(wb.samples.load(name), text, n_snapshots=2048, progress=False) for name in names}
    return widgets.SpectrumExplorer(spectra)


def ArchitectureComparison():
    """Architectures side by side: radar charts, layers, eigenvalues, training and a table.

    Recorded runs of two architectures; the step can be moved from the first to the last.
    """
    runs = wb.samples.recorded_runs("healthy")
    names = ("Pre-LN", "No-Norm")
    return widgets.ArchitectureComparison({name: runs[name] for name in names})


def LiveTraining():
    """Two runs that train side by side, with switches for Koopman Spectral Shaping (KSS) and faults.

    The picture shows the state at the end of a short training.
    """
    live = widgets.LiveTraining(n_steps=60, spectra_every=5)
    live.start()
    live.wait()
    return live


def Timeline():
    """The signals and alarms of several runs, also of runs that are still training in another process.

    A recorded run that failed, next to a healthy one. A click on a step shows its layers, heads and eigenvalues.
    """
    runs = {kind: wb.open_run(wb.samples.failed_run(kind)) for kind in ("healthy", "hyperparameter")}
    return widgets.Timeline(runs, signals=["loss", "grad_norm", "effective_rank D2"])


def RiskExplorer():
    """The risk that a planned training does not learn well, with controls of model, task and plan.

    A small Pre-LN transformer, measured by a forward pass. A pilot makes the estimate more certain.
    """
    model = wb.zoo.transformer(norm="pre_ln", d_model=32, n_layers=4, n_heads=4, vocab_size=64)
    explorer = widgets.RiskExplorer(model)
    explorer.measure()
    explorer.wait()
    return explorer


def AssessmentReport():
    """The report of an assessment, in which each number links to its source in the data.

    A recorded assessment of a published design.
    """
    return widgets.AssessmentReport(wb.samples.open("assessments")["gpt2"])


def show():
    """Any figure of ``workbench.plots`` as a widget that is as wide as the page.

    The figure can be zoomed and has tooltips; the saved notebook keeps a picture of it.
    """
    return widgets.show(wb.plots.explosion_edge(wb.samples.open("shaping", "controls")))
