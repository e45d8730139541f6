"""Settings of one run of a sweep, as JSON values that are validated before any run is trained."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Unpack

import numpy as np
import torch
import xarray as xr
from torch import nn

from workbench.callbacks.kss import KSS
from workbench.errors import OptionError, require_known, require_listed
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveInt, Range, Seed, one_of
from workbench.schema.sweeps import SETTINGS, dtype_of
from workbench.tasks.task import SeededTask
from workbench.training.training_plan import DEFAULT_RATE, SCHEDULES, TrainingOptions, TrainingPlan, takes_settings
from workbench.zoo import ArchitectureConfig, build

#: Settings of a case that cannot be changed without measuring it again.
_KEPT = ("precision", "seed", "loss_limit", "grad_norm_limit", "stops_at_divergence")


def plan_of(training: Mapping[str, Any]) -> TrainingPlan:
    """Create a training plan from its settings."""
    known = tuple(item.name for item in fields(TrainingPlan))
    require_known("A training run", training, known, word="setting")
    if "n_steps" not in training:
        raise OptionError("A planned run needs n_steps, the number of updates; add it to its training plan.")
    return TrainingPlan(**training)


def describe_plan(plan: TrainingPlan, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that plan and configuration determine, with the names of ``schema.sweeps.SETTINGS``."""
    optimizer = plan.optimizer if isinstance(plan.optimizer, str) else ""
    if isinstance(plan.optimizer, torch.optim.Optimizer):
        optimizer = type(plan.optimizer).__name__
        defaults = dict(plan.optimizer.defaults)
    elif optimizer:
        any_model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        created = replace(plan, learning_rate=plan.learning_rate or DEFAULT_RATE).optimizer_for(any_model)
        optimizer, defaults = type(created).__name__, dict(created.defaults)
    else:
        defaults = {}
    betas = defaults.get("betas")
    rate = defaults.get("lr", DEFAULT_RATE) if plan.learning_rate is None else plan.learning_rate
    return {
        "family": config.get("family", ""),
        "norm": config.get("norm", ""),
        "initialization": config.get("initialization") or ("normal" if config.get("family") else ""),
        "init_std": float(config.get("init_std", math.nan)),
        "learning_rate": float(rate),
        "warmup": plan.warmup,
        "schedule": plan.schedule if isinstance(plan.schedule, str) else "custom",
        "mean_rate_share": float(np.mean([plan.rate_factor(step) for step in range(plan.n_steps)])),
        "optimizer": optimizer,
        "momentum": float(betas[0]) if betas else float(defaults.get("momentum", 0.0)),
        "weight_decay": float(defaults.get("weight_decay", 0.0) or 0.0),
        "clip_norm": math.nan if plan.clip_norm is None else float(plan.clip_norm),
        "n_steps": plan.n_steps,
        "seed": plan.seed,
    }


@takes_settings(without=_KEPT, default="unchanged")
def replan(case: xr.Dataset, *, n_steps: int | None = None, **settings: Unpack[TrainingOptions]) -> xr.Dataset:
    """Change the settings of cases without measuring them again; omitted settings keep their values.

    Args:
        case: Cases from `measure_case`, or rows of a sweep.
        n_steps: Number of updates.
        **settings: Settings of the training, as in `workbench.train`. Another optimizer without ``optimizer_options``
            has its default options. None leaves a setting unchanged, but disables clipping.

    Returns:
        The same cases with changed settings. With another optimizer or clipping ``overshoot_rate``,
        ``breaking_rate``, ``unit_change_rate`` and ``rehearsed_rate`` are NaN, because they were measured with the
        old one.

    Raises:
        OptionError: If a setting is invalid, or if the schedule of a case is a function or its optimizer is not from
            ``torch.optim``, because these cannot be restored from the record.

    Example:
        >>> import workbench as wb
        >>> cases = wb.samples.open("divergence_sweep", "held out").isel(run=slice(0, 2))
        >>> wb.sweeps.replan(cases, learning_rate=0.02)["learning_rate"].values
        array([0.02, 0.02])

    See Also:
        `workbench.sweeps.measure_case`: Measures a case.
        `workbench.risk.over_rates`: Predicts the risk of a case over a range of learning rates.
    """
    changes: dict[str, Any] = {
        name: value
        for name, value in {"n_steps": n_steps, **settings}.items()
        if value != "unchanged" and (value is not None or name == "clip_norm")
    }
    rows = []
    for i in range(case.sizes["run"]):
        one = case.isel(run=[i])
        text = json.loads(str(one["settings"].values[0]))
        before: dict[str, Any] = dict(text.get("training", text))
        before.pop("seed", None)
        if "optimizer" in changes and "optimizer_options" not in changes:
            before.pop("optimizer_options", None)
        for name, default, known in (
            ("schedule", SCHEDULES[0], set(SCHEDULES)),
            ("optimizer", "AdamW", set(vars(torch.optim))),
        ):
            value = before.get(name, default)
            if name not in changes and value not in known:
                raise OptionError(
                    f"The {name} of the case is '{value}', which cannot be restored from the record; pass {name}=."
                )
        plan = plan_of({**before, **changes})
        of_model = ("family", "norm", "initialization", "init_std", "seed")
        described = {name: value for name, value in describe_plan(plan, {}).items() if name not in of_model}
        one = one.assign_coords(
            {
                name: (("run",), np.array([value], dtype=dtype_of(name, SETTINGS[name].kind)), SETTINGS[name].attrs)
                for name, value in described.items()
            }
        )
        inner = {**before, **{name: getattr(plan, name) for name in changes}}
        outer = json.dumps({**text, "training": inner} if "training" in text else inner, default=str, sort_keys=True)
        one = one.assign_coords(settings=("run", np.array([outer]), SETTINGS["settings"].attrs))
        if {"optimizer", "optimizer_options", "clip_norm"} & set(changes):
            stale = {"overshoot_rate", "breaking_rate", "unit_change_rate", "rehearsed_rate"} & set(one.data_vars)
            one = one.assign({name: one[name] * np.nan for name in stale})
        rows.append(one)
    return xr.concat(rows, "run", combine_attrs="override") if len(rows) > 1 else rows[0]


TASKS = ("associative_recall", "synthetic_lm", "random_tokens", "text_bytes", "digits")
KINDS_OF_KSS = ("published", "recommended")
_N_HEX = 12

NSnapshots = Annotated[int, Range("of 0 or at least 3", lambda n: n == 0 or n >= 3)]
KindOfKSS = Annotated[str, one_of((*KINDS_OF_KSS, ""))]


@checked
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings that determine the results of one run of a sweep.

    Attributes:
        architecture: Name of the model in tables and figures.
        model: Options of `ArchitectureConfig` except the seed; or ``{"make": "package.module:function", ...}`` for a
            custom model. The function receives the other options and ``seed``, and returns a module; the workers must
            be able to import it.
        task: ``{"name": "associative_recall", ...}``: one of ``TASKS`` and its options except the seed.
        training: Fields of `TrainingPlan` as JSON values, except the seed: ``n_steps``, ``learning_rate``, ...
        seed: Seed of the parameters, the data and all other randomness in training.
        study: A label by which runs can be selected; it does not change the results.
        n_snapshots: Number of token states from which the spectra of the untrained model are computed; 0 omits the
            spectra and the trial updates.
        n_evaluations: Number of evaluations of the loss on held-out examples, evenly spread over the run; must divide
            the number of updates.
        kss: Koopman Spectral Shaping during training, ``"published"`` or ``"recommended"``; empty if there is none.

    Raises:
        OptionError: If the settings of the model, the task or the training are invalid.

    Example:
        >>> import workbench as wb
        >>> settings = wb.sweeps.RunSettings(
        ...     architecture="tiny",
        ...     model={"d_model": 16, "n_layers": 2},
        ...     task={"name": "associative_recall"},
        ...     training={"n_steps": 10, "learning_rate": 0.001},
        ... )
        >>> settings.plan().n_steps, settings.make_model().config.d_model
        (10, 16)

    See Also:
        `workbench.sweeps.grid`: Creates all combinations of settings.
        `workbench.TrainingPlan`: Describes the options of training.
    """

    architecture: str
    model: Mapping[str, Any]
    task: Mapping[str, Any]
    training: Mapping[str, Any]
    seed: Seed = 0
    study: str = ""
    n_snapshots: NSnapshots = 1024
    n_evaluations: NonNegativeInt = 0
    kss: KindOfKSS = ""
    _plain: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for part in ("model", "task", "training"):
            if "seed" in getattr(self, part):
                raise OptionError(f"The {part} of '{self.architecture}' must have no own seed; pass seed= for all.")
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        for name in ("n_evaluations", "kss"):  # Older sweeps do not record these options.
            if not plain[name]:
                del plain[name]
        try:
            text = json.dumps(plain, sort_keys=True, allow_nan=False, default=_as_plain)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"The settings of '{self.architecture}' are not JSON values ({error}); use numbers, strings and lists."
            ) from error
        object.__setattr__(self, "_plain", json.loads(text))
        self.make_task()
        n_steps = self.plan().n_steps
        if self.n_evaluations and n_steps % self.n_evaluations:
            raise OptionError.of(
                "n_evaluations", self.n_evaluations, f"a divisor of the {n_steps} updates of '{self.architecture}'"
            )
        if "make" in self.model:
            _function(self.model["make"])
        else:
            self._config()

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunSettings:
        """Create settings from the values that `as_dict` returned."""
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return json.loads(json.dumps(self._plain))

    @property
    def identity(self) -> str:
        """12 hexadecimal digits that identify all settings that determine the results of the run."""
        return _digest({name: value for name, value in self._plain.items() if name not in ("study", "architecture")})

    @property
    def configuration(self) -> str:
        """12 hexadecimal digits that identify the model without its seed."""
        return _digest(
            self._config().as_dict() if "make" not in self.model else self._plain["model"], without=("seed",)
        )

    @property
    def cell(self) -> str:
        """12 hexadecimal digits that identify all settings except the learning rate and the seed."""
        training = {name: value for name, value in self._plain["training"].items() if name != "learning_rate"}
        parts = {"model": self.configuration, "task": self._plain["task"], "training": training}
        return _digest(parts | ({"kss": self.kss} if self.kss else {}))

    def describe(self) -> dict[str, Any]:
        """Return the columns of the row that the settings determine, with the names of ``schema.sweeps.SETTINGS``."""
        config = {} if "make" in self.model else self._config().as_dict()
        names = {name: getattr(self, name) for name in ("study", "architecture", "configuration", "cell")}
        return {
            **describe_plan(self.plan(), config),
            **names,
            "task": str(self.make_task().describe()["task"]),
            "settings": json.dumps(self._plain, sort_keys=True),
        }

    def make_model(self) -> nn.Module:
        """Create the model with its initial parameters."""
        if "make" in self.model:
            options = {name: value for name, value in self._plain["model"].items() if name != "make"}
            return _function(self.model["make"])(**options, seed=self.seed)
        return build(self._config())

    def make_task(self) -> SeededTask:
        """Create the task.

        Raises:
            OptionError: If there is no task of that name, or an option is unknown.
        """
        from workbench import tasks

        options = dict(self._plain["task"])
        name = options.pop("name", None)
        require_listed("task", [name], TASKS)
        make = getattr(tasks, name)
        known = tuple(item for item in inspect.signature(make).parameters if item != "seed")
        require_known(f"The task {name}", options, known)
        return make(**options, seed=self.seed)

    def make_kss(self) -> KSS | None:
        """Create the callback for Koopman Spectral Shaping, or return None if there is none."""
        return getattr(KSS, self.kss)() if self.kss else None

    def plan(self) -> TrainingPlan:
        """Return the training plan.

        Raises:
            OptionError: If a setting is unknown or invalid.
        """
        training = self._plain["training"]
        if "learning_rate" not in training:
            raise OptionError(f"The training of '{self.architecture}' has no learning_rate, which a sweep needs.")
        options = training.get("optimizer_options", {})
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return plan_of({**training, "optimizer_options": options, "seed": self.seed})

    def _config(self) -> ArchitectureConfig:
        return ArchitectureConfig.from_dict({**self._plain["model"], "seed": self.seed})


def grid(
    architectures: Mapping[str, Mapping[str, Any]],
    *,
    learning_rate: Iterable[float],
    n_steps: PositiveInt,
    task: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    seed: Iterable[int] = (0,),
    study: str = "",
    n_snapshots: NSnapshots = 1024,
    n_evaluations: NonNegativeInt = 0,
    kss: KindOfKSS = "",
    **axes: Any,
) -> list[RunSettings]:
    """Create the planned runs of a sweep: every combination of architectures and settings.

    Args:
        architectures: Name -> options of the model, as in `RunSettings`.
        learning_rate: The learning rates.
        n_steps: Updates of each run.
        task: One task or several, as in `RunSettings`.
        seed: The seeds.
        study: A label for all runs.
        n_snapshots: As in `RunSettings`.
        n_evaluations: As in `RunSettings`.
        kss: As in `RunSettings`.
        **axes: Any option of the models (``norm``, ``init_std``, ``d_model``, ...) or field of `TrainingPlan`
            (``warmup``, ``schedule``, ``optimizer``, ...): one value, or a list of values.

    Returns:
        The planned runs. The architecture varies slowest, then the axes in the order given, the task, the learning
        rate and the seed.

    Raises:
        OptionError: If an axis is unknown or empty, an architecture sets it too, or a combination is invalid.

    Example:
        >>> import workbench as wb
        >>> norms = {"Pre-LN": {"norm": "pre_ln"}, "No-Norm": {"norm": "none"}}
        >>> task = {"name": "associative_recall"}
        >>> rates, seeds = [1e-3, 1e-2], [0, 1, 2]
        >>> runs = wb.sweeps.grid(norms, learning_rate=rates, n_steps=10, task=task, seed=seeds, warmup=[0, 5])
        >>> len(runs), runs[0].architecture
        (24, 'Pre-LN')

    See Also:
        `workbench.sweeps.run`: Executes the planned runs.
    """
    of_training = [item.name for item in fields(TrainingPlan)]
    of_model = [item.name for item in fields(ArchitectureConfig)]
    values = {name: value if isinstance(value, list | tuple | range) else [value] for name, value in axes.items()}
    for name in values:
        if name not in of_training and name not in of_model:
            raise OptionError(f"'{name}' is neither an option of a model nor a setting of a training run.")
        for title, model in architectures.items():
            if name in model:
                raise OptionError(f"'{title}' already sets {name}; omit the axis {name} or that option.")
    last = {
        "task": [task] if isinstance(task, Mapping) else list(task),
        "rate": list(learning_rate),
        "seed": list(seed),
    }
    for name, choices in {"architectures": architectures, **values, **last}.items():
        if not len(choices):
            raise OptionError(f"The sweep has no {name}; pass at least one.")
    runs = []
    for title, *chosen in itertools.product(architectures, *values.values(), *last.values()):
        *chosen, each_task, rate, each_seed = chosen
        options = dict(zip(values, chosen, strict=True))
        runs.append(
            RunSettings(
                architecture=title,
                model={**architectures[title], **{k: v for k, v in options.items() if k in of_model}},
                task=each_task,
                training={
                    "n_steps": n_steps,
                    "learning_rate": rate,
                    **{k: v for k, v in options.items() if k in of_training},
                },
                seed=each_seed,
                study=study,
                n_snapshots=n_snapshots,
                n_evaluations=n_evaluations,
                kss=kss,
            )
        )
    return runs


def _digest(values: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> str:
    kept = {name: value for name, value in values.items() if name not in without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:_N_HEX]


def _as_plain(value: Any) -> Any:
    """Convert NumPy scalars and read-only mappings, which JSON does not support."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _function(place: Any) -> Callable[..., nn.Module]:
    """Import a function named ``"package.module:function"``."""
    module, _, name = str(place).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"There is no function at '{place}' ({error}); write package.module:function, importable by the workers."
        ) from error
    if not callable(function):
        raise OptionError(f"'{place}' must be a function that returns a module, got {type(function).__name__}.")
    return function
