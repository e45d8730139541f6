"""Views of the workbench: the sources of each, the call that makes its widget, its controls, and what it waits for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import CheckpointError, WorkbenchError
from workbench.models.subject import Subject
from workbench.plots.figure_files import for_backend, save
from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.figure import FigureStage
from workbench.widgets.risk.controls import longest_of, vocabulary_of
from workbench.widgets.workbench_parts.calls import Derived, LibraryCall, Missing, Named, Results, as_code
from workbench.widgets.workbench_parts.sources import Kind, Source, is_of_zoo, subject_or_model

#: Returns the result of a call; raises `Missing` if it has not been computed.
Known = Callable[[Any], Any]
#: Kinds of sources with a model, which can be built or opened here.
_MODELS = frozenset({Kind.CHECKPOINT, Kind.DESIGN})
#: Kinds of sources that are diagnosed, and those whose reports need no assessment.
_RECORDS = frozenset({Kind.RUN, Kind.LOG})
_TREES = _RECORDS | {Kind.REPORT}
#: Longest sequence of a task on which a model without a tokenizer is profiled.
_LONGEST = 64


class View:
    """A view: one of the widgets, created from at most ``most`` sources of some kinds, the last ones ticked.

    ``wanted`` says what to tick, and ``controls`` are the attributes of the widget that become code once they have
    changed. A busy widget whose view ``stays`` remains visible when other sources are ticked.
    """

    name: str
    tip: str
    widget: str
    variable: str
    kinds: frozenset[Kind]
    most: int | None = None
    wanted: str
    named: str = ""
    stays: bool = False
    controls: tuple[str, ...] = ()

    def chosen(self, ticked: Sequence[Source]) -> list[Source]:
        """Return the sources that it shows if their contents fit."""
        fitting = [source for source in ticked if source.kind in self.kinds]
        return fitting if self.most is None else fitting[-self.most :]

    def entry(self, source: Source, known: Known) -> Any:
        """Return what the widget shows of a source, as a call or text; None if its contents do not fit."""
        raise NotImplementedError

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call that makes the widget, given at least one entry by name of the source."""
        return LibraryCall(self.widget, (Named(tuple(entries.items()), self.named),), variable=self.variable)

    def state(self, widget: Any) -> dict[str, Any]:
        """Return the values of the controls."""
        return {path: attrgetter(path)(widget) for path in self.controls}

    def changes(self, widget: Any, variable: str, before: dict[str, Any]) -> list[str]:
        """Return the statements that bring a new widget into the state of this one."""
        now = self.state(widget)
        return [f"{variable}.{path} = {as_code(now[path])}" for path in now if now[path] != before[path]]

    def is_busy(self, widget: Any) -> bool:
        """Return whether the widget trains or measures, so that it must not be closed."""
        return bool(getattr(widget, "is_measuring", False))


class Spectra(View):
    """Eigenvalues of models and of the last spectra of runs."""

    name, tip = "spectra", "Eigenvalues of checkpoints, designs and runs, in linked panels"
    widget, variable, named = "SpectrumExplorer", "explorer", "spectra"
    kinds = _MODELS | {Kind.RUN}
    wanted = "Tick a checkpoint, a design, or a run with spectra; several are shown side by side."
    controls = (
        "layers.value", "near_unit_lower.value", "near_unit_upper.value", "contractive_upper.value",
        "reliable_residual.value", "reliable_only.value", "zoom.value",
    )  # fmt: skip

    def entry(self, source: Source, known: Known) -> Any:
        """Return the spectra of a model, or the last ones of a run."""
        if source.kind in _MODELS:
            return profile_of(source, known)
        run = _run_with_spectra(source, known)
        return run and Derived(run, '["spectra"].to_dataset().isel(step=-1, missing_dims="ignore")', _last_spectra)


class Compare(View):
    """Runs and models side by side, at one step of training."""

    name, tip = "compare", "Runs and checkpoints at one step: eigenvalues, layers, losses, table, radar"
    widget, variable, named = "ArchitectureComparison", "comparison", "compared"
    kinds = _MODELS | {Kind.RUN}
    wanted = "Tick at least one run with spectra, checkpoint or design; two or more are compared."
    controls = ("view", "models", "step", "layers", "highlight", "measures")

    def entry(self, source: Source, known: Known) -> Any:
        """Return a run, or the spectra of a model."""
        return profile_of(source, known) if source.kind in _MODELS else _run_with_spectra(source, known)


class Live(View):
    """Training of one or two architectures, with switches."""

    name, tip = "live", "Train one or two small architectures here, and switch KSS while they train"
    widget, variable = "LiveTraining", "live"
    kinds, most, stays = _MODELS, 2, True
    wanted = "Tick one or two small designs, or checkpoints of the zoo, to train them here."
    controls = (
        *(f"setup.first.{name}.value" for name in ("family", "norm", "d_model", "n_layers")),
        *(f"setup.{name}.value" for name in ("task", "learning_rate", "seed", "n_steps", "spectra_every", "compare")),
        *(f"setup.second.{name}.value" for name in ("family", "norm", "d_model", "n_layers")),
        "kss.enabled", "kss.strength", "kss.interval",
    )  # fmt: skip

    def entry(self, source: Source, known: Known) -> Any:
        """Return the configuration of an architecture of the zoo."""
        if source.kind == Kind.DESIGN:
            return source.value
        if not is_of_zoo(known(source.value).model):
            return None
        assert not isinstance(source.value, str)
        return Derived(source.value, ".model.config", attrgetter("model.config"))

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget."""
        first, *second = entries.values()
        return LibraryCall(self.widget, (first,), tuple(("versus", other) for other in second), variable=self.variable)

    def changes(self, widget: Any, variable: str, before: dict[str, Any]) -> list[str]:
        """Return the statements that bring a new widget into the state of this one."""
        start = [] if widget.state == "ready" else [f"{variable}.start()"]
        return super().changes(widget, variable, before) + start

    def is_busy(self, widget: Any) -> bool:
        """Return whether it is training."""
        return bool(widget.is_running)


class TimelineView(View):
    """Signals of runs over steps."""

    name, tip = "timeline", "Signals and alarms of runs over steps, also while they train"
    widget, variable, named = "Timeline", "timeline", "runs"
    kinds = frozenset({Kind.RUN, Kind.LOG})
    wanted = "Tick a run or a log; a run that is still being written is followed."
    controls = ("signals", "shown", "reduce", "view")

    def entry(self, source: Source, known: Known) -> Any:
        """Return the path of a store, which the widget follows, or a run or log."""
        is_store = source.kind == Kind.RUN and source.path is not None and source.path.is_dir()
        if is_store and isinstance(source.value, LibraryCall):
            return source.value.args[0]
        return source.value


class RateAndRisk(View):
    """Risk of a planned training, and a pilot; or the useful rates of a sweep."""

    name, tip = "rate and risk", "Risk of a planned training and a pilot of its learning rates; useful rates of a sweep"
    widget, variable = "RiskExplorer", "risk"
    kinds, most = _MODELS | {Kind.SWEEP}, 1
    wanted = "Tick a checkpoint or a small design to find its learning rates, or a sweep to see those that it found."
    controls = (
        *(f"setup.{name}.value" for name in ("source", "path", "family", "norm", "initialization", "init_std")),
        *(f"setup.{name}.value" for name in ("d_model", "n_layers", "task", "length", "batch_size", "seed")),
        *(f"plan.{name}.value" for name in ("learning_rate", "warmup", "n_steps")),
        *(f"plan.{name}.value" for name in ("clip_norm", "schedule", "optimizer")),
        "budget.value",
    )  # fmt: skip

    def entry(self, source: Source, known: Known) -> Any:
        """Return a model, or the rates of a sweep."""
        if source.kind == Kind.SWEEP:
            outcomes = LibraryCall("wb.rates.rate_outcomes", (source.value,), variable="outcomes", topic=source.name)
            return LibraryCall("wb.plots.rate_bands", (outcomes,), variable="bands", topic=source.name)
        return source.value

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget or figure."""
        (entry,) = entries.values()
        is_figure = isinstance(entry, LibraryCall) and entry.function == "wb.plots.rate_bands"
        return LibraryCall(
            "show" if is_figure else self.widget, (entry,), variable="rates" if is_figure else self.variable
        )

    def state(self, widget: Any) -> dict[str, Any]:
        """Return the values of the controls; a figure has none."""
        return super().state(widget) if hasattr(widget, "setup") else {}

    def changes(self, widget: Any, variable: str, before: dict[str, Any]) -> list[str]:
        """Return the statements that bring a new widget into the state of this one."""
        lines = super().changes(widget, variable, before)
        if not before or widget.risk is None:
            return lines
        if not widget.setup.is_automatic:
            lines.append(f"{variable}.measure()")
        if widget.pilot is None:
            return lines
        lines += [f"{variable}.wait()", f"{variable}.run_pilot()", f"{variable}.wait()"]
        return [*lines, f"found = {variable}.pilot  # as returned by wb.find_rate()"]


class Report(View):
    """The assessment of a design, the diagnosis of a run, or a saved report."""

    name, tip = "report", "Assess a design or checkpoint, diagnose a run, or open a saved assessment"
    widget, variable = "AssessmentReport", "report"
    kinds = _MODELS | {Kind.PUBLISHED, Kind.RUN, Kind.LOG, Kind.REPORT}
    most = 1
    wanted = "Tick a design or checkpoint to assess it (with a plan, if one is ticked), or a run or log to diagnose it."
    controls = ("view",)

    def entry(self, source: Source, known: Known) -> Any:
        """Return a subject to assess, or the tree of a report."""
        if source.kind not in _RECORDS:
            return source.value
        if source.path is not None and "kind" in known(source.value).attrs:
            return source.value  # an exported report
        return LibraryCall("wb.diagnose", (source.value,), variable="tree", topic=source.name)

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget."""
        ((name, entry),) = entries.items()
        if next(source.kind for source in ticked if source.name == name) in _TREES:
            return LibraryCall(self.widget, (entry,), variable=self.variable)
        plans = [source.value for source in ticked if source.kind == Kind.PLAN]
        options = (("subject", entry), *(("plan", plan) for plan in plans[-1:]))
        return LibraryCall(self.widget, options=options, variable=self.variable)


#: All views, in the order of their buttons and places.
VIEWS: dict[str, View] = {
    view.name: view for view in (Spectra(), Compare(), Live(), TimelineView(), RateAndRisk(), Report())
}


def profile_of(source: Source, known: Known) -> LibraryCall:
    """Return the call that computes the spectra of a checkpoint or of a small design at initialization."""
    model = subject_or_model(source)
    inputs = inputs_of(known(model))
    return LibraryCall("wb.profile", (model, inputs), variable=f"spectra_{source.name}", topic=source.name)


def inputs_of(model: Any) -> LibraryCall:
    """Return the call that makes inputs for a model: text if it has a tokenizer, otherwise a task that fits."""
    name = type(model).__name__
    if isinstance(model, Subject):
        try:
            if model.tokenizer is not None:
                return LibraryCall("wb.tasks.reference_passages", (25,), variable="texts")
        except CheckpointError:
            pass
        name, model = model.name, model.model
    config: Any = getattr(model, "config", None)
    if is_of_zoo(model) and config.image_size is not None:
        sizes = tuple((size, getattr(config, size)) for size in ("image_size", "n_channels", "n_classes"))
        return LibraryCall("wb.tasks.digits", options=sizes, variable="images")
    size = vocabulary_of(model)
    if size is None:
        raise CheckpointError(
            f"The inputs of {name} are unknown; profile it with wb.profile(), save the spectra and open them here."
        )
    length = ("length", min(_LONGEST, longest_of(model) or _LONGEST))
    if size == 256:
        return LibraryCall("wb.tasks.text_bytes", options=(length,), variable="texts")
    return LibraryCall("wb.tasks.random_tokens", options=(length, ("vocab_size", size)), variable="tokens")


def _run_with_spectra(source: Source, known: Known) -> LibraryCall | Derived | None:
    """Return the call that opens a run; None if it has no spectra."""
    run = known(source.value)
    if isinstance(source.value, str) or "spectra" not in run.children:
        return None
    return source.value


def _last_spectra(run: Any) -> Any:
    return run["spectra"].to_dataset().isel(step=-1, missing_dims="ignore")


class ViewPlan(NamedTuple):
    """What a view will show: the call that makes its widget (None if nothing fits or results are missing), a remark."""

    call: LibraryCall | None
    remark: str
    waits: bool


def plan_of(view: View, ticked: Sequence[Source], results: Results, theme: str) -> ViewPlan:
    """Return what a view shows of the ticked sources."""
    entries: dict[str, Any] = {}
    remarks, waits = [], False
    for source in view.chosen(ticked):
        try:
            entry = view.entry(source, results.known)
            if entry is None:
                remarks.append(f"{source.name} is left out, because it does not fit this view.")
            elif not results.has(entry):
                waits = True
            else:
                results.known(entry)
                entries[source.name] = entry
        except Missing:
            waits = True
        except WorkbenchError as error:
            remarks.append(str(error))
        except Exception as error:  # noqa: BLE001  (a bug, or a damaged file: the other sources are shown)
            remarks.append(f"{source.name} is left out ({type(error).__name__}: {error}).")
    if waits:
        return ViewPlan(None, "", True)
    if not entries:
        return ViewPlan(None, " ".join([*remarks, view.wanted]), False)
    call = view.call(entries, ticked)
    if theme != "page":
        call = LibraryCall(call.function, call.args, (*call.options, ("theme", theme)), variable=call.variable)
    return ViewPlan(call, " ".join(remarks), False)


def compute(view: View, ticked: Sequence[Source], results: Results, tell: Callable[[str], None]) -> None:
    """Compute what a view needs of the ticked sources; failures are kept in the results."""
    for source in view.chosen(ticked):
        while True:
            try:
                entry = view.entry(source, results.known)
            except Missing as missing:
                results.compute(missing.node, tell)
                continue
            except Exception:  # noqa: BLE001  (shown in the view, see `plan_of`)
                break
            if entry is not None:
                results.compute(entry, tell)
            break


def made_widget(call: LibraryCall, results: Results) -> Any:
    """Return a new widget from the call of a plan, whose parts have been computed."""
    for part in call.parts:
        results.compute(part, lambda words: None)
    if call.function == "show":
        figure, *theme = (results.known(part) for part in call.parts)
        return FigureView(figure, **({"theme": theme[0]} if theme else {}))
    return call.run([results.known(part) for part in call.parts], lambda words: None)


class FigureView(WorkbenchWidget):
    """A figure, as `workbench.widgets.show` displays it."""

    def __init__(self, figure: Any, *, theme: str = "page") -> None:
        super().__init__(theme=theme)
        self._figure = figure
        stage = FigureStage(theme)
        stage.draw(figure)
        self._fill([stage])

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the figure."""
        return for_backend(self._figure, backend)

    def page(self) -> str:
        """Return the figure as a page that needs no kernel."""
        with tempfile.TemporaryDirectory() as folder:
            return save(self.figure(), Path(folder) / "page.html").read_text(encoding="utf-8")
