"""The controls that say what is trained: architectures, task, learning rate, seed, length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench import tasks, zoo
from workbench.errors import OptionError
from workbench.tasks.user_data import OneShotTask
from workbench.widgets.live.architecture_controls import LABEL, NATURAL, ROW, ArchitectureControls, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from workbench.tasks import Task

#: Batches are small, so that two runs and their spectra fit into a tenth of a second on a laptop.
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
#: What a run may be compared with, besides its control.
NOTHING, ARCHITECTURE = "nothing", "another architecture"


class Setup:
    """Controls for a start, and the models and the task that they stand for.

    Args:
        architecture: A configuration of the zoo, which the controls then change; a model, which is copied for each run
            and never touched; or None: a small transformer without normalization.
        task: Name of one of the choices, a task, or any data that `wb.train` takes; None: associative recall.
        versus: Another architecture, to train next to the first; None: none, but one may be chosen on the page.
        learning_rate: Peak rate.
        seed: Seed of fresh parameters, of the data of a task chosen by name, and of training.
        n_steps: Updates of a run.
        spectra_every: Steps between two spectra.
        compare: Whether a second run trains in parallel to the first.
        control: Name of the control.

    Attributes:
        first: Controls of the architecture.
        second: Controls of the other architecture.
        compare: What the run is compared with: the name of the control, ``NOTHING`` or ``ARCHITECTURE``.
        controls: Every control, to be watched or disabled.
        box: All of them.

    Raises:
        OptionError: If there is no such task, or a number is out of range, or the two architectures cannot learn the
            same task.
    """

    def __init__(
        self,
        architecture: zoo.ArchitectureConfig | nn.Module | None,
        task: Any,
        *,
        versus: zoo.ArchitectureConfig | nn.Module | None = None,
        learning_rate: float,
        seed: int,
        n_steps: int,
        spectra_every: int,
        compare: bool = True,
        control: str = "without KSS",
    ) -> None:
        self.first = ArchitectureControls(_DEFAULT if architecture is None else architecture)
        if isinstance(task, str) and task not in _TASKS:
            raise OptionError(f"There is no task '{task}'; choose from {', '.join(_TASKS)}, or pass a task.")
        if not learning_rate > 0:
            raise OptionError(f"learning_rate is {learning_rate}, expected a positive number.")
        for name, value, lowest in (("n_steps", n_steps, 1), ("spectra_every", spectra_every, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or value < lowest:
                raise OptionError(f"{name} is {value!r}, expected a whole number of at least {lowest}.")
        if versus is not None and not compare:
            raise OptionError("versus= names a second architecture, but compare=False asks for one run; leave out one.")
        self.second = ArchitectureControls(
            _alternative(architecture) if versus is None else versus, title="second architecture"
        )
        visions = {self.first.is_vision, self.second.is_vision} - {None}
        if len(visions) > 1:
            raise OptionError("Both architectures learn the same task, but only one of them reads images; choose two.")
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
        """Whether the second run is the first one with nothing switched on."""
        return self.compare.value == self._control

    @property
    def has_second(self) -> bool:
        """Whether the second run is of another architecture."""
        return self.compare.value == ARCHITECTURE

    @property
    def architecture_names(self) -> tuple[str, str]:
        """Names of the two architectures, as names of their runs."""
        return names_of(self.first, self.second)

    def adapt(self) -> None:
        """Make the controls consistent: norms of the family, images for vision transformers, text for the others."""
        for controls in (self.first, self.second):
            controls.adapt()
        if self.first.is_vision is not None:
            if self.first.is_vision != (self.task.value in _IMAGE_TASKS):
                self.task.value = "digits" if self.first.is_vision else next(iter(_TASKS))
            families = tuple(family for family in zoo.FAMILIES if (family == "vit") == self.first.is_vision)
            if self.second.model is None and self.second.family.options != families:
                family = self.second.family.value
                self.second.family.options = families
                self.second.family.value = family if family in families else families[0]
                self.second.adapt()
        self.second.box.layout.display = "" if self.has_second else "none"

    def build_task(self) -> Task:
        """The task that the controls stand for.

        Raises:
            OptionError: If its data can be read only once: they cannot be sent to the process that trains.
        """
        if self._task is None:
            return _TASKS[self.task.value](self.seed.value)
        if isinstance(self._task, OneShotTask):
            raise OptionError(
                "The data can be read only once, and cannot be sent to the process that trains; pass a DataLoader, a "
                "dataset or a list of batches."
            )
        return self._task

    def build_models(self, task: Task, names: list[str]) -> dict[str, nn.Module]:
        """A fresh model for each run, the same each time.

        Args:
            task: What they learn.
            names: Names of the runs, the first one first.

        Raises:
            OptionError: If an architecture is impossible.
        """
        of_second = self.second if self.has_second else self.first
        return {
            name: controls.build(task, self.seed.value)
            for name, controls in zip(names, (self.first, of_second), strict=False)
        }

    def _make_controls(self, task: str) -> None:
        whole = {"style": LABEL, "layout": NATURAL}
        self.task = ipywidgets.Dropdown(
            options=list(_TASKS), value=task, description="task", style=LABEL, layout=NATURAL
        )
        self.learning_rate = ipywidgets.FloatLogSlider(
            1e-2, min=-5, max=1, step=0.05, description="learning rate", readout_format=".2g", style=LABEL,
            layout={"width": "22em"},
        )  # fmt: skip
        self.seed = ipywidgets.BoundedIntText(0, min=0, max=2**31, description="seed", **whole)
        self.n_steps = ipywidgets.BoundedIntText(1, min=1, max=10**6, description="steps", style=LABEL, layout=NATURAL)
        self.spectra_every = ipywidgets.BoundedIntText(
            1, min=1, max=10**6, description="spectra every", style=LABEL, layout=NATURAL,
            tooltip="Steps between two pictures of the eigenvalues; each costs time, about two steps' for small models",
        )  # fmt: skip
        self.compare = ipywidgets.Dropdown(
            options=[(f"itself, {self._control}", self._control), (ARCHITECTURE, ARCHITECTURE), (NOTHING, NOTHING)],
            description="compare with",
            style=LABEL,
            layout=NATURAL,
            tooltip="Also train a second run, with the same data and seed",
        )
        task_part = [self.task] if self._task is None else []
        label = [] if self._task is None else [ipywidgets.Label(f"task: {self._task.describe()['task']}")]
        numbers = [self.learning_rate, self.seed, self.n_steps, self.spectra_every]
        self.controls = [*self.first.controls, *task_part, *numbers, self.compare, *self.second.controls]
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HBox([self.first.box, *task_part, *label], layout=ROW),
                ipywidgets.HBox([*numbers, self.compare], layout=ROW),
                self.second.box,
            ]
        )
        self.box.add_class("workbench-live-setup")


def _alternative(architecture: Any) -> zoo.ArchitectureConfig:
    """What the second architecture is at first: the first one with another norm."""
    config = architecture if isinstance(architecture, zoo.ArchitectureConfig) else _DEFAULT
    if config.family == "mamba":
        return _DEFAULT
    return replace(config, norm="none" if config.norm == "pre_ln" else "pre_ln")
