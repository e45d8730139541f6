"""Controls of RiskExplorer for model, task and plan, and the measurements of what they describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ipywidgets
import xarray as xr
from torch import Tensor, nn

from workbench import tasks, zoo
from workbench.errors import OptionError, require_listed
from workbench.models.checkpoint import open_checkpoint
from workbench.models.losses import token_loss
from workbench.models.subject import Subject
from workbench.rates.find_rate import FoundRates, find_rate
from workbench.risk.edge_model import EdgeModel
from workbench.sweeps import measure_case, replan
from workbench.tasks import Task
from workbench.training.training_plan import SCHEDULES

#: Vocabulary size of the recorded runs.
_VOCABULARY = 64
#: Name -> function that returns a task of a length, batch size, vocabulary size and seed.
_TASKS: dict[str, Callable[..., Task]] = {
    "associative recall": lambda length, batch_size, vocab_size, seed: tasks.associative_recall(
        length=length, batch_size=batch_size, vocab_size=vocab_size, n_pairs=3, seed=seed
    ),
    "synthetic language": lambda length, batch_size, vocab_size, seed: tasks.synthetic_lm(
        length=length, batch_size=batch_size, vocab_size=vocab_size, seed=seed
    ),
    "random tokens": lambda length, batch_size, vocab_size, seed: tasks.random_tokens(
        length=length, batch_size=batch_size, vocab_size=vocab_size, seed=seed
    ),
    "bytes of English": lambda length, batch_size, vocab_size, seed: tasks.text_bytes(
        length=length, batch_size=batch_size, seed=seed
    ),
}
_DIGITS, _BYTES, _RANDOM, _ENGLISH = "digits", "bytes of English", "random tokens", "English, model's tokenizer"
#: Tasks for a model with a vocabulary of its own.
_OWN_TASKS = (_RANDOM, _BYTES, _ENGLISH)
#: Characters of text per token, chosen so that passages are long enough.
_LETTERS_PER_TOKEN = 10
_FAMILIES = {
    "transformer": "transformer", "mixture of experts": "moe", "Mamba": "mamba", "KAN": "kan",
    "vision transformer": "vit",
}  # fmt: skip
_NORMS = {
    "Pre-LN": "pre_ln", "Post-LN": "post_ln", "RMSNorm": "rms_norm", "DeepNorm": "deep_norm",
    "DeepNorm, DeepNet's": "deep_norm_post", "SubLN": "sub_ln", "No-Norm": "none",
}  # fmt: skip
_DEFAULT = zoo.ArchitectureConfig(d_model=64, n_layers=4)
ZOO, CHECKPOINT, GIVEN = "zoo", "checkpoint", "given"


@dataclass(frozen=True)
class Choice:
    """The values of the controls at one moment, for a thread that must not read the controls."""

    source: zoo.ArchitectureConfig | str | nn.Module | Subject
    task: str | Task
    length: int
    batch_size: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the model, where available before it is opened."""
        if isinstance(self.source, zoo.ArchitectureConfig):
            return title(self.source)
        return self.source if isinstance(self.source, str) else _name_of(self.source)

    def make(self) -> tuple[nn.Module | Subject, Task, str]:
        """Return the model, its task, and its name in tables."""
        if isinstance(self.source, zoo.ArchitectureConfig):
            task = self._named_task(_VOCABULARY) if isinstance(self.task, str) else self.task
            return zoo.build(fitted(self.source, task)), task, self.name
        subject = self.source if isinstance(self.source, Subject) else open_checkpoint(self.source)
        task = self._fitting_task(subject) if isinstance(self.task, str) else self.task
        return subject, task, subject.name

    def _named_task(self, vocab_size: int, length: int | None = None) -> Task:
        if self.task == _DIGITS:
            return tasks.digits(batch_size=self.batch_size, seed=self.seed)
        return _TASKS[str(self.task)](
            length=length or self.length, batch_size=self.batch_size, vocab_size=vocab_size, seed=self.seed
        )

    def _fitting_task(self, subject: Subject) -> Task:
        """Return the task in the model's vocabulary, with examples no longer than the model accepts."""
        vocab_size, longest = vocabulary_of(subject.model), longest_of(subject.model)
        length = min(self.length, longest or self.length)
        if vocab_size is None:
            raise OptionError(f"The vocabulary size of {subject.name} is unknown; pass its data as task=.")
        if self.task == _ENGLISH:
            n_rows = max(4 * self.batch_size, 2048 // length)
            passages = tasks.reference_passages(n_rows, n_characters=_LETTERS_PER_TOKEN * length)
            rows = subject.tokenize(passages, max_length=length)["input_ids"]
            return tasks.as_task(rows, batch_size=self.batch_size, seed=self.seed)
        if self.task == _BYTES and vocab_size < 256:
            raise OptionError(f"{subject.name} has {vocab_size} tokens, bytes need 256; choose random ones or task=.")
        return self._named_task(vocab_size, length)


class ModelChoice:
    """Controls for model and task; the arguments are those of `RiskExplorer`."""

    def __init__(self, model: Any, task: Any) -> None:
        if model is not None and not isinstance(
            model, zoo.ArchitectureConfig | nn.Module | Subject | str | os.PathLike
        ):
            raise OptionError(
                f"The model is a {type(model).__name__}, expected a configuration, a path, a checkpoint or a module."
            )
        known = (*_TASKS, _DIGITS, _ENGLISH)
        if isinstance(task, str):
            require_listed("task", [task], known, remedy="choose one of these names or pass a task")
        self._config = model if isinstance(model, zoo.ArchitectureConfig) else _DEFAULT
        self._given = model if isinstance(model, nn.Module | Subject) else None
        self._task = None if task is None or isinstance(task, str) else tasks.as_task(task)
        self._make_controls("" if not isinstance(model, str | os.PathLike) else os.fspath(model))
        if isinstance(model, str | os.PathLike):
            self.source.value = CHECKPOINT
        elif self._given is not None:
            self.source.value = GIVEN
        self.adapt()
        if isinstance(task, str):
            require_listed("task", [task], self.task.options, remedy="choose a task that fits the model")
            self.task.value = task

    @property
    def is_automatic(self) -> bool:
        """Whether the model is small enough to be measured automatically after a change."""
        return self.source.value == ZOO

    def adapt(self) -> None:
        """Make the controls consistent, and hide those that do not apply."""
        is_zoo, family = self.source.value == ZOO, self.family.value
        for control in self.of_zoo:
            control.layout.display = None if is_zoo else "none"
        self.path.layout.display = None if self.source.value == CHECKPOINT else "none"
        norms = ("RMSNorm",) if family == "mamba" else tuple(_NORMS)
        offer(self.norm, [(name, _NORMS[name]) for name in norms])
        starts = zoo.INITIALIZATIONS if self.norm.value == "none" else ("normal", "xavier")
        offer(self.initialization, ("normal",) if family == "mamba" else starts)
        offer(self.task, ((_DIGITS,) if family == "vit" else tuple(_TASKS)) if is_zoo else _OWN_TASKS)
        self.length.disabled = self.task.value == _DIGITS

    def choice(self) -> Choice:
        """Return the values of the controls."""
        task = self.task.value if self._task is None else self._task
        rest = (task, self.length.value, self.batch_size.value, self.seed.value)
        if self.source.value == ZOO:
            return Choice(self._configured(), *rest)
        if self.source.value != CHECKPOINT:
            if self._given is None:
                raise OptionError("No model was passed; choose another source.")
            return Choice(self._given, *rest)
        path = self.path.value.strip()
        if not path:
            raise OptionError("The path is empty; enter the path or hub name of a checkpoint.")
        return Choice(path, *rest)

    def _configured(self) -> zoo.ArchitectureConfig:
        family = self.family.value
        options = {
            "norm": self.norm.value, "d_model": self.d_model.value, "n_layers": self.n_layers.value,
            "init_std": self.init_std.value, "seed": self.seed.value,
        }  # fmt: skip
        if family != "mamba":
            options["initialization"] = self.initialization.value
        config = self._config if family == self._config.family else zoo.ArchitectureConfig(family=family)
        return replace(config, **options)

    def _make_controls(self, path: str) -> None:
        config, label = self._config, {"description_width": "initial"}

        def integer(value: int, name: str, lowest: int, highest: int, width: int, tip: str = "") -> Any:
            return ipywidgets.BoundedIntText(
                value,
                min=lowest,
                max=highest,
                description=name,
                style=label,
                tooltip=tip,
                layout={"width": f"{width}px"},
            )

        def choose(options: Any, value: Any, name: str, width: int) -> Any:
            return ipywidgets.Dropdown(
                options=options, value=value, description=name, style=label, layout={"width": f"{width}px"}
            )

        given = [] if self._given is None else [(f"given: {_name_of(self._given)}", GIVEN)]
        self.source = choose([("model zoo", ZOO), ("checkpoint", CHECKPOINT), *given], ZOO, "model", 220)
        self.path = ipywidgets.Text(
            path, description="path", placeholder="folder, file or hub name", continuous_update=False, style=label,
            layout={"width": "340px"},
        )  # fmt: skip
        self.family = choose(tuple(_FAMILIES.items()), config.family, "family", 215)
        self.norm = choose(tuple(_NORMS.items()), config.norm, "norm", 190)
        start = config.initialization or "normal"
        self.initialization = choose(zoo.INITIALIZATIONS, start, "init", 125)
        self.init_std = ipywidgets.BoundedFloatText(
            config.init_std, min=1e-4, max=10.0, step=0.01, description="init scale", style=label,
            layout={"width": "140px"}, tooltip="Standard deviation of the initial parameters",
        )  # fmt: skip
        self.d_model = integer(config.d_model or 64, "width", 1, 1024, 115)
        self.n_layers = integer(config.n_layers or 4, "layers", 1, 64, 105)
        self.seed = integer(config.seed or 0, "seed", 0, 2**31, 100, "Seed of parameters, data and training")
        self.task = choose(tuple(_TASKS), next(iter(_TASKS)), "task", 215)
        self.length = integer(16, "length", 1, 4096, 112, "Tokens per example")
        self.batch_size = integer(16, "batch", 1, 4096, 110, "Examples per batch")
        self.of_zoo = [self.family, self.norm, self.initialization, self.init_std, self.d_model, self.n_layers]
        data = [self.task, self.length, self.batch_size]
        self.controls = [self.source, self.path, *self.of_zoo, *data, self.seed]
        shown = data if self._task is None else [ipywidgets.Label(f"task: {self._task.describe()['task']}")]
        self.shown = [self.source, self.path, *self.of_zoo, *shown, self.seed]


def title(config: zoo.ArchitectureConfig) -> str:
    """Return the title of an architecture of the zoo, such as "No-Norm, rezero"."""
    norm = next(name for name, value in _NORMS.items() if value == config.norm)
    family = next(name for name, value in _FAMILIES.items() if value == config.family)
    parts = [] if config.family == "transformer" else [family]
    parts += [norm] if config.family != "mamba" else []
    parts += [config.initialization] if config.initialization not in (None, "normal") else []
    return ", ".join(parts)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary size of a model; None if unknown."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(place, "vocab_size", None), int):
            return size
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return embeddings[0] if embeddings else None


def longest_of(model: nn.Module) -> int | None:
    """Return the maximum number of tokens that a model accepts; None if unknown."""
    config = getattr(model, "config", None)
    # A `max_length` in a configuration of transformers applies to generation.
    names = (
        ("max_length",) if isinstance(config, zoo.ArchitectureConfig) else ("max_position_embeddings", "n_positions")
    )
    lengths = [getattr(config, name, None) for name in names]
    return next((length for length in lengths if isinstance(length, int)), None)


def fitted(config: zoo.ArchitectureConfig, task: Any) -> zoo.ArchitectureConfig:
    """Return the configuration with the vocabulary or the image size of a task."""
    if config.family == "vit":
        if not hasattr(task, "image_size"):
            return config
        sizes = {"image_size": task.image_size, "n_channels": 1, "n_classes": task.n_classes, "patch_size": 2}
        return replace(config, **sizes)
    if hasattr(task, "vocab_size") and hasattr(task, "length"):
        return replace(config, vocab_size=task.vocab_size, max_length=task.length)
    return config


def _name_of(model: nn.Module | Subject) -> str:
    return model.name if isinstance(model, Subject) else type(model).__name__


def offer(control: ipywidgets.Dropdown, options: Sequence[Any]) -> None:
    """Change the options of a control; the current choice is kept if it is still available."""
    if list(control.options) == list(options):
        return
    value, offered = control.value, [option[1] if isinstance(option, tuple) else option for option in options]
    control.options = options
    control.value = value if value in offered else offered[0]


#: Name -> optimizer and its options: those of the recorded study, and SGD without momentum.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, β₂ 0.95, decay 0.1": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    "AdamW": ("AdamW", {}),
    "Muon, decay 0.1": ("Muon", {"weight_decay": 0.1}),
    "SGD, momentum 0.9": ("SGD", {"momentum": 0.9}),
    "SGD": ("SGD", {}),
}
#: Clip norms; the slider needs a number for "none".
_CLIPPING = (("none", 0.0), *((f"{norm:g}", norm) for norm in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)))


class PlanControls:
    """Controls for the settings of a planned run."""

    def __init__(self) -> None:
        wide = {"style": {"description_width": "92px"}, "layout": {"width": "auto"}}
        self.learning_rate = ipywidgets.FloatLogSlider(
            3e-3, min=-5, max=1, step=0.02, description="learning rate", readout_format=".3g", **wide
        )
        self.warmup = ipywidgets.IntSlider(30, min=0, max=200, step=5, description="warm-up", **wide)
        self.n_steps = ipywidgets.IntSlider(480, min=40, max=4000, step=40, description="steps", **wide)
        self.schedule = ipywidgets.Dropdown(options=SCHEDULES, description="schedule", **wide)
        self.clip_norm = ipywidgets.SelectionSlider(options=_CLIPPING, value=1.0, description="clip norm", **wide)
        self.optimizer = ipywidgets.Dropdown(options=tuple(OPTIMIZERS), description="optimizer", **wide)
        self.controls = [self.learning_rate, self.warmup, self.n_steps, self.clip_norm, self.schedule, self.optimizer]
        self.box = ipywidgets.GridBox(self.controls)
        self.box.add_class("workbench-plan")

    def settings(self) -> dict[str, Any]:
        """Return the values of the controls as fields of `workbench.training.training_plan.TrainingPlan`."""
        optimizer, options = OPTIMIZERS[self.optimizer.value]
        return {
            "learning_rate": float(self.learning_rate.value),
            "warmup": self.warmup.value,
            "n_steps": self.n_steps.value,
            "schedule": self.schedule.value,
            "clip_norm": self.clip_norm.value or None,
            "optimizer": optimizer,
            "optimizer_options": dict(options),
        }


#: Features that a backward pass and trial updates measure.
_OF_GRADIENTS = ("initial_grad_norm", "overshoot_rate", "breaking_rate", "unit_change_rate")
_OF_TRIALS = ("rehearsed_rate",)
#: Snapshots of the spectra, of which the widget shows only a summary.
_N_SNAPSHOTS = 512


class Measured(NamedTuple):
    """A case, its choice of model and task, and the settings that it was measured with."""

    case: xr.Dataset
    choice: Choice
    settings: dict[str, Any]

    def planned(self, settings: dict[str, Any]) -> xr.Dataset:
        """Return the case with the settings of another plan."""
        changes = {name: value for name, value in settings.items() if value != self.settings[name]}
        return replan(self.case, **changes) if changes else self.case


def measure(choice: Choice, settings: dict[str, Any], model: EdgeModel, check: Callable[[], None]) -> Measured:
    """Build or open the chosen model, and measure the features of the risk model."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        check()
        return token_loss(logits, targets)

    module, task, name = choice.make()
    check()
    runs_pilot = any(name in model.features for name in _OF_TRIALS)
    takes_gradients = runs_pilot or any(name in model.features for name in _OF_GRADIENTS)
    case = measure_case(
        module, task, architecture=name, seed=choice.seed, loss=loss, n_snapshots=_N_SNAPSHOTS,
        takes_gradients=takes_gradients, runs_pilot=runs_pilot, **settings,
    )  # fmt: skip
    return Measured(case, choice, settings)


def run_pilot(
    choice: Choice, settings: dict[str, Any], budget: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], FoundRates]:
    """Run the pilot of a plan, and return the settings of the plan (all but the learning rate) with the result."""
    model, task, _ = choice.make()
    plan = {name: value for name, value in settings.items() if name != "learning_rate"}
    return plan, find_rate(model, task, budget=budget, progress=tell, **plan)
