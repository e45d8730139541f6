"""Views of the workbench: the sources of each, the call that makes its widget, and the state of its controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from workbench.errors import CheckpointError
from workbench.models.subject import Subject
from workbench.widgets.risk.model_choice import longest_of, vocabulary_of
from workbench.widgets.workbench_parts.calls import Derived, LibraryCall, Named, as_code
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
    """A view: one of the widgets, created from sources.

    Attributes:
        name: Name on its button.
        tip: Tooltip of its button.
        widget: Name of the widget.
        variable: Name of its variable in the code.
        kinds: Kinds of the sources that it may show.
        most: Maximum number of sources, of which the last ones ticked are shown; None for no limit.
        wanted: What to tick.
        stays: Whether a busy widget stays visible when other sources are ticked.
        controls: Attributes of the widget that are part of the code once they have changed.
    """

    name: str
    tip: str
    widget: str
    variable: str
    kinds: frozenset[Kind]
    most: int | None = None
    wanted: str
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
        raise NotImplementedError

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
    widget, variable = "SpectrumExplorer", "explorer"
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

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget."""
        return LibraryCall(self.widget, (Named(tuple(entries.items()), "spectra"),), variable=self.variable)


class Compare(View):
    """Runs and models side by side, at one step of training."""

    name, tip = "compare", "Runs and checkpoints at one step: eigenvalues, layers, losses, table, radar"
    widget, variable = "ArchitectureComparison", "comparison"
    kinds = _MODELS | {Kind.RUN}
    wanted = "Tick at least one run with spectra, checkpoint or design; two or more are compared."
    controls = ("view", "models", "step", "layers", "highlight", "measures")

    def entry(self, source: Source, known: Known) -> Any:
        """Return a run, or the spectra of a model."""
        return profile_of(source, known) if source.kind in _MODELS else _run_with_spectra(source, known)

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget."""
        return LibraryCall(self.widget, (Named(tuple(entries.items()), "compared"),), variable=self.variable)


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
    widget, variable = "Timeline", "timeline"
    kinds = frozenset({Kind.RUN, Kind.LOG})
    wanted = "Tick a run or a log; a run that is still being written is followed."
    controls = ("signals", "shown", "reduce", "view")

    def entry(self, source: Source, known: Known) -> Any:
        """Return the path of a store, which the widget follows, or a run or log."""
        is_store = source.kind == Kind.RUN and source.path is not None and source.path.is_dir()
        if is_store and isinstance(source.value, LibraryCall):
            return source.value.args[0]
        return source.value

    def call(self, entries: dict[str, Any], ticked: Sequence[Source]) -> LibraryCall:
        """Return the call of the widget."""
        return LibraryCall(self.widget, (Named(tuple(entries.items()), "runs"),), variable=self.variable)


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
