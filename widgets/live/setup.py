"""Controls of what is trained: architectures, task, learning rate, seed, number of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets
from torch import nn

from workbench import tasks, zoo
from workbench.errors import OptionError, require_listed
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveFloat, PositiveInt
from workbench.tasks import Task
from workbench.tasks.user_data import OneShotTask
from workbench.widgets.risk.controls import fitted, offer

#: Batches are small, so that a step of two runs with spectra takes about 0.1 s on a laptop.
_LENGTH, _BATCH_SIZE = 24, 16
_TASKS: dict[str, Callable[[int], Task]] = {
    "associative recall": lambda seed: tasks.associative_recall(length=_LENGTH, batch_size=_BATCH_SIZE, seed=seed),
    "synthetic language": lambda seed: tasks.synthetic_lm(
        length=_LENGTH, batch_size=_BATCH_SIZE, vocab_size=256, n_sequences=4096, n_validation_sequences=256, seed=seed
    ),
    "bytes of English": lambda seed: tasks.text_bytes(length=_LENGTH, batch_size=_BATCH_SIZE, seed=seed),
    "random tokens": lambda seed: tasks.random_tokens(length=_LENGTH, batch_size=_BATCH_SIZE, seed=seed),
    "digits": lambda seed: tasks.digits(batch_size=_BATCH_SIZE, seed=seed),
}
_IMAGE_TASKS = ("digits",)
_DEFAULT = zoo.ArchitectureConfig(family="transformer", norm="none", d_model=64, n_layers=4)
#: Alternatives to the control for comparison.
NOTHING, ARCHITECTURE = "nothing", "another architecture"


class Setup:
    """Controls for a start, with the arguments of `LiveTraining`; ``compare`` is the one for the second run."""

    @checked
    def __init__(
        self,
        architecture: zoo.ArchitectureConfig | nn.Module | None,
        task: Any,
        *,
        versus: zoo.ArchitectureConfig | nn.Module | None = None,
        learning_rate: PositiveFloat,
        seed: NonNegativeInt,
        n_steps: PositiveInt,
        spectra_every: PositiveInt,
        compare: bool = True,
        control: str = "without KSS",
    ) -> None:
        self.first = ArchitectureControls(_DEFAULT if architecture is None else architecture)
        if isinstance(task, str):
            require_listed("task", [task], _TASKS, remedy="choose one of these names or pass a task")
        if versus is not None and not compare:
            raise OptionError("versus= adds a second run, but compare=False requests one run only; omit one of them.")
        self.second = ArchitectureControls(
            _alternative(architecture) if versus is None else versus, title="second architecture"
        )
        visions = {self.first.is_vision, self.second.is_vision} - {None}
        if len(visions) > 1:
            raise OptionError("Both architectures train on one task, but only one reads images; choose two alike.")
        self._task = None if task is None or isinstance(task, str) else tasks.as_task(task)
        name = task if isinstance(task, str) else "digits" if self.first.is_vision else next(iter(_TASKS))
        self._control = control
        self._make_controls(name)
        self.learning_rate.value = learning_rate
        self.seed.value, self.n_steps.value = seed, n_steps
        self.spectra_every.value = spectra_every
        self.compare.value = ARCHITECTURE if versus is not None else control if compare else NOTHING
        self.adapt()

    @property
    def has_control(self) -> bool:
        """Whether the second run is the control of the first."""
        return self.compare.value == self._control

    @property
    def has_second(self) -> bool:
        """Whether the second run trains another architecture."""
        return self.compare.value == ARCHITECTURE

    @property
    def architecture_names(self) -> tuple[str, str]:
        """Names of the two architectures, which are the names of their runs."""
        return names_of(self.first, self.second)

    def adapt(self) -> None:
        """Make the controls consistent: norms of the family, images for vision transformers, tokens for the others."""
        for controls in (self.first, self.second):
            controls.adapt()
        if self.first.is_vision is not None:
            if self.first.is_vision != (self.task.value in _IMAGE_TASKS):
                self.task.value = "digits" if self.first.is_vision else next(iter(_TASKS))
            if self.second.model is None:
                is_vision = self.first.is_vision
                offer(self.second.family, tuple(one for one in zoo.FAMILIES if (one == "vit") == is_vision))
                self.second.adapt()
        self.second.box.layout.display = "" if self.has_second else "none"

    def build_task(self) -> Task:
        """Return the task of the controls."""
        if self._task is None:
            return _TASKS[self.task.value](self.seed.value)
        if isinstance(self._task, OneShotTask):
            raise OptionError("The data can be read only once; pass a DataLoader, a dataset or a list of batches.")
        return self._task

    def build_models(self, task: Task, names: list[str]) -> dict[str, nn.Module]:
        """Return a new model for each run, with the same initial parameters on each call."""
        of_second = self.second if self.has_second else self.first
        return {
            name: controls.build(task, self.seed.value)
            for name, controls in zip(names, (self.first, of_second), strict=False)
        }

    def _make_controls(self, task: str) -> None:
        look = {"style": LABEL, "layout": NARROW}
        self.task = ipywidgets.Dropdown(
            options=list(_TASKS), value=task, description="task", style=LABEL, layout=NATURAL
        )
        self.learning_rate = ipywidgets.FloatLogSlider(
            1e-2, min=-5, max=1, step=0.05, description="learning rate", readout_format=".2g", style=LABEL,
            layout={"width": "19em"},
        )  # fmt: skip
        self.seed = ipywidgets.BoundedIntText(0, min=0, max=2**31, description="seed", **look)
        self.n_steps = ipywidgets.BoundedIntText(1, min=1, max=10**6, description="steps", **look)
        self.spectra_every = ipywidgets.BoundedIntText(
            1, min=1, max=10**6, description="spectra every", style=LABEL, layout=NARROW | {"width": "188px"},
            tooltip="Steps between measurements of the eigenvalues; each takes as long as two steps of a small model",
        )  # fmt: skip
        self.compare = ipywidgets.Dropdown(
            options=[(f"control, {self._control}", self._control), (ARCHITECTURE, ARCHITECTURE), (NOTHING, NOTHING)],
            description="compare with",
            style=LABEL,
            layout=NATURAL,
            tooltip="Train a second run with the same data and seed",
        )
        task_part = [self.task] if self._task is None else []
        label = [] if self._task is None else [ipywidgets.Label(f"task: {self._task.describe()['task']}")]
        numbers = [self.learning_rate, self.seed, self.n_steps, self.spectra_every]
        self.controls = [*self.first.controls, *task_part, *numbers, self.compare, *self.second.controls]
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HBox([*self.first.box.children, *task_part, *label, *numbers, self.compare], layout=ROW),
                self.second.box,
            ]
        )
        self.box.add_class("workbench-live-setup")


def _alternative(architecture: Any) -> zoo.ArchitectureConfig:
    """Return the default second architecture: the first one with another norm."""
    config = architecture if isinstance(architecture, zoo.ArchitectureConfig) else _DEFAULT
    if config.family == "mamba":
        return _DEFAULT
    return replace(config, norm="none" if config.norm == "pre_ln" else "pre_ln")


#: Layout of every row of controls.
ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 10px"}
LABEL = {"description_width": "initial"}
NATURAL = {"width": "max-content", "max_width": "98%"}
#: Layout of a field for a number, so that a row has room for several.
NARROW = {"width": "134px", "max_width": "98%"}


class ArchitectureControls:
    """Controls of family, norm, width and depth; or the name of a given model."""

    def __init__(self, architecture: zoo.ArchitectureConfig | nn.Module, *, title: str = "architecture") -> None:
        if not isinstance(architecture, zoo.ArchitectureConfig | nn.Module):
            raise OptionError.of(title, architecture, "a wb.zoo.ArchitectureConfig or a model")
        self.model = architecture if isinstance(architecture, nn.Module) else None
        self._config = architecture if isinstance(architecture, zoo.ArchitectureConfig) else zoo.ArchitectureConfig()
        config = self._config
        self.family = ipywidgets.Dropdown(
            options=zoo.FAMILIES, value=config.family, description=title, style=LABEL, layout=NATURAL
        )
        norms = ("rms_norm",) if config.family == "mamba" else zoo.NORMS
        look, small = {"style": LABEL, "layout": NATURAL}, {"style": LABEL, "layout": NARROW}
        self.norm = ipywidgets.Dropdown(options=norms, value=config.norm, description="norm", **look)
        self.d_model = ipywidgets.BoundedIntText(config.d_model, min=1, max=1 << 14, description="width", **small)
        self.n_layers = ipywidgets.BoundedIntText(config.n_layers, min=1, max=256, description="layers", **small)
        self.controls = [] if self.model is not None else [self.family, self.norm, self.d_model, self.n_layers]
        label = ipywidgets.Label(f"{title}: {type(self.model).__name__}")
        self.box = ipywidgets.HBox(self.controls or [label], layout=ROW)

    @property
    def is_vision(self) -> bool | None:
        """Whether it reads images; None if unknown, as for a given model."""
        return None if self.model is not None else self.family.value == "vit"

    @property
    def names(self) -> tuple[str, str]:
        """A short and a longer name of the architecture; either is used as the name of a run and of its files."""
        if self.model is not None:
            n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
            return type(self.model).__name__, f"{type(self.model).__name__}, {n_parameters:,} weights"
        norm = "no norm" if self.norm.value == "none" else self.norm.value.replace("_", " ")
        short = f"{self.family.value}, {norm}"
        return short, f"{short}, {self.d_model.value} wide, {self.n_layers.value} layers"

    def adapt(self) -> None:
        """Offer the norms of the family."""
        offer(self.norm, ("rms_norm",) if self.family.value == "mamba" else zoo.NORMS)

    def build(self, task: Task, seed: int) -> nn.Module:
        """Return a new model for a task, with the same initial parameters on each call."""
        if self.model is not None:
            return copy.deepcopy(self.model)
        options = {"seed": seed, "d_model": self.d_model.value, "n_layers": self.n_layers.value}
        options["norm"] = self.norm.value
        is_same = self.family.value == self._config.family
        config = self._config if is_same else zoo.ArchitectureConfig(family=self.family.value)
        return zoo.build(fitted(replace(config, **options), task))


def names_of(first: ArchitectureControls, second: ArchitectureControls) -> tuple[str, str]:
    """Return different names of two architectures, which are also used as file names."""
    for one, other in zip(first.names, second.names, strict=True):
        if one != other:
            return one, other
    return f"{first.names[0]}, first", f"{second.names[0]}, second"
