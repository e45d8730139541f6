"""The controls that say what is trained: architecture, task, learning rate, seed, length."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ipywidgets
from torch import nn

from workbench import tasks, zoo
from workbench.errors import OptionError
from workbench.tasks.user_data import OneShotTask

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Setup:
    """Controls for a run, and the model and task that they stand for.

    Args:
        architecture: A configuration of the zoo, which the controls then change; a model, which is copied for each run
            and never touched; or None: a small transformer without normalization.
        task: Name of one of the choices, a task, or any data that `wb.train` takes; None: associative recall.
        learning_rate: Peak rate.
        seed: Seed of fresh parameters, of the data of a task chosen by name, and of training.
        n_steps: Updates of a run.
        spectra_every: Steps between two spectra.
        compare: Whether a second run trains in parallel to the first.
        control: Name of the second run.

    Attributes:
        controls: Every control, to be watched or disabled.
        box: All of them.

    Raises:
        OptionError: If there is no such task, or a number is out of range.
    """

    def __init__(
        self,
        architecture: zoo.ArchitectureConfig | nn.Module | None,
        task: Any,
        *,
        learning_rate: float,
        seed: int,
        n_steps: int,
        spectra_every: int,
        compare: bool,
        control: str = "without KSS",
    ) -> None:
        if architecture is not None and not isinstance(architecture, zoo.ArchitectureConfig | nn.Module):
            raise OptionError(
                f"The architecture is a {type(architecture).__name__}, expected a wb.zoo.ArchitectureConfig or a model."
            )
        if isinstance(task, str) and task not in _TASKS:
            raise OptionError(f"There is no task '{task}'; choose from {', '.join(_TASKS)}, or pass a task.")
        if not learning_rate > 0:
            raise OptionError(f"learning_rate is {learning_rate}, expected a positive number.")
        for name, value, lowest in (("n_steps", n_steps, 1), ("spectra_every", spectra_every, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or value < lowest:
                raise OptionError(f"{name} is {value!r}, expected a whole number of at least {lowest}.")
        self._config = architecture if isinstance(architecture, zoo.ArchitectureConfig) else _DEFAULT
        self._model = architecture if isinstance(architecture, nn.Module) else None
        self._task = None if task is None or isinstance(task, str) else tasks.as_task(task)
        is_vit = self._config.family == "vit"
        self._make_controls(task if isinstance(task, str) else "digits" if is_vit else next(iter(_TASKS)), control)
        self.learning_rate.value = learning_rate
        self.seed.value, self.n_steps.value = seed, n_steps
        self.spectra_every.value, self.compare.value = spectra_every, compare

    def adapt(self) -> None:
        """Make the controls consistent: norms of the family, images for a vision transformer, text for the others."""
        norms = ("rms_norm",) if self.family.value == "mamba" else zoo.NORMS
        if self.norm.options != norms:
            norm = self.norm.value
            self.norm.options = norms
            self.norm.value = norm if norm in norms else norms[0]
        if (self.family.value == "vit") != (self.task.value in _IMAGE_TASKS):
            self.task.value = "digits" if self.family.value == "vit" else next(iter(_TASKS))

    def build_task(self) -> Task:
        """The task that the controls stand for.

        Raises:
            OptionError: If its data can be read only once, and two runs need them.
        """
        if self._task is None:
            return _TASKS[self.task.value](self.seed.value)
        if self.compare.value and isinstance(self._task, OneShotTask):
            raise OptionError(
                "The data can be read only once, but two runs need them; pass a DataLoader or a list, or compare=False."
            )
        return self._task

    def build_model(self, task: Task) -> nn.Module:
        """A fresh model for a task, the same each time.

        Raises:
            OptionError: If the architecture is impossible.
        """
        if self._model is not None:
            return copy.deepcopy(self._model)
        kind: Any = task  # of images or of tokens, which have fields of their own
        options = {"seed": self.seed.value, "d_model": self.d_model.value, "n_layers": self.n_layers.value}
        options["norm"] = self.norm.value
        if self.family.value == "vit":
            options |= {"image_size": kind.image_size, "n_channels": 1, "n_classes": kind.n_classes, "patch_size": 2}
        elif hasattr(task, "vocab_size"):
            options |= {"vocab_size": kind.vocab_size, "max_length": kind.length}
        if self.family.value == self._config.family:
            return zoo.build(replace(self._config, **options))
        return zoo.build(zoo.ArchitectureConfig(family=self.family.value, **options))

    def _make_controls(self, task: str, control: str) -> None:
        config, label = self._config, {"description_width": "initial"}
        narrow, wide = {"width": "98px"}, {"width": "208px"}
        self.family = ipywidgets.Dropdown(
            options=zoo.FAMILIES, value=config.family, description="architecture", style=label, layout=wide
        )
        norms = ("rms_norm",) if config.family == "mamba" else zoo.NORMS
        self.norm = ipywidgets.Dropdown(
            options=norms, value=config.norm, description="norm", style=label, layout={"width": "150px"}
        )
        whole = {"style": label, "layout": narrow}
        self.d_model = ipywidgets.BoundedIntText(config.d_model, min=1, max=1 << 14, description="width", **whole)
        self.n_layers = ipywidgets.BoundedIntText(config.n_layers, min=1, max=256, description="layers", **whole)
        self.task = ipywidgets.Dropdown(
            options=list(_TASKS), value=task, description="task", style=label, layout={"width": "205px"}
        )
        self.learning_rate = ipywidgets.FloatLogSlider(
            1e-2, min=-5, max=1, step=0.05, description="learning rate", readout_format=".2g", style=label,
            layout={"width": "290px"},
        )  # fmt: skip
        self.seed = ipywidgets.BoundedIntText(0, min=0, max=2**31, description="seed", **whole)
        self.n_steps = ipywidgets.BoundedIntText(1, min=1, max=10**6, description="steps", **whole)
        self.spectra_every = ipywidgets.BoundedIntText(
            1, min=1, max=10**6, description="spectra every", style=label, layout={"width": "134px"},
            tooltip="Steps between two pictures of the eigenvalues; each costs time, about two steps' for small models",
        )  # fmt: skip
        self.compare = ipywidgets.Checkbox(
            True,
            description=f"compare: {control}",
            indent=False,
            layout={"width": "auto"},
            tooltip=f"Also train the same run {control}: same parameters, data and seed",
        )
        row = ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 10px")
        model = [self.family, self.norm, self.d_model, self.n_layers]
        if self._model is not None:
            model = [ipywidgets.Label(f"model: {type(self._model).__name__}")]
        task_part = [self.task] if self._task is None else [ipywidgets.Label(f"task: {self._task.describe()['task']}")]
        numbers = [self.learning_rate, self.seed, self.n_steps, self.spectra_every, self.compare]
        self.controls = [c for c in (*model, *task_part, *numbers) if not isinstance(c, ipywidgets.Label)]
        self.box = ipywidgets.VBox(
            [ipywidgets.HBox([*model, *task_part], layout=row), ipywidgets.HBox(numbers, layout=row)]
        )
