"""The sections of a plan: the meaning of each key, and its possible values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from workbench.errors import OptionError
from workbench.sweeps.run_settings import TASKS
from workbench.training.training_plan import PRECISIONS, SCHEDULES

#: The floating-point formats of a plan.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REDUCTIONS = ("synchronous", "overlapped", "stale")
ORDERS = ("ring", "tree")
_OTHER_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
OPTIMIZERS = tuple(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def _plain(value: Any) -> Any:
    """Convert a number of any library to one of Python's."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _one_of(*choices: str, spelling: Callable[[str], str] = str) -> BeforeValidator:
    """Accept one of several words, and return it in its standard spelling."""

    def check(value: Any) -> str:
        meant = spelling(value) if isinstance(value, str) else value
        if meant in choices:
            return meant
        near = f"; the nearest is '{nearest(meant, choices)}'" if isinstance(meant, str) else ""
        raise ValueError(f"expected one of {', '.join(choices)}{near}")

    return BeforeValidator(check)


def _dtype(name: str) -> str:
    return _OTHER_NAMES.get(name, name)


def _optimizer(name: str) -> str:
    return next((known for known in OPTIMIZERS if known.lower() == name.lower()), name)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a table of options")
    return {name: list(item) if isinstance(item, tuple) else item for name, item in value.items()}


def _loss_scale(value: Any) -> str | float:
    if value == "dynamic":
        return "dynamic"
    if not isinstance(value := _plain(value), int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("expected 'dynamic' or a number above 0")
    return float(value)


Count = Annotated[int, BeforeValidator(_plain), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_plain), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_plain), Field(gt=0, allow_inf_nan=False)]
DtypeName = Annotated[str, _one_of(*DTYPES, spelling=_dtype)]
Options = Annotated[Mapping[str, Any], BeforeValidator(_table)]


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most alike."""
    return difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.0)[0]


class PlanSection(BaseModel):
    """Keys of a plan and their values; None: not given.

    Raises:
        OptionError: If a value is impossible; the message names the key, and the nearest value where there is one.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    title: ClassVar[str]

    def __init__(self, **keys: Any) -> None:
        for name in keys:
            if name not in type(self).model_fields:
                raise OptionError(unknown_key(name, self.title))
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise OptionError(f"[{self.title}] {_in_words(error)}.") from None

    def as_dict(self) -> dict[str, Any]:
        """The keys that have a value, as plain values for TOML and JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self if value is not None}


def _in_words(error: ValidationError) -> str:
    """Describe the first error: the key, its value, the expected one, and the nearest where there is one."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    if not first["loc"]:  # of several keys together
        return str(context["error"])
    key, value, kind = first["loc"][0], first["input"], first["type"]
    if kind == "value_error":
        return f"{key} is {value!r}, {context['error']}"
    if kind == "greater_than_equal":
        return f"{key} is {value}, expected at least {context['ge']}"
    if kind == "int_type" and isinstance(value, float):
        near = f"; the nearest is {round(value)}" if math.isfinite(value) and round(value) >= 1 else ""
        return f"{key} is {value}, expected a whole number{near}"
    wanted = {"int_type": "a whole number", "bool_type": "true or false"}.get(kind, "a number above 0")
    return f"{key} is {value!r}, expected {wanted}"


class TrainingSection(PlanSection):
    """The fields of `workbench.TrainingPlan` as plain values, and the size of the data.

    Attributes:
        batch_size: Sequences in the global batch, all ranks and micro-batches together; None: the smallest multiple of
            ``data_parallel * accumulation`` that is at least 32.
        sequence_length: Tokens in a sequence; None: 64, or fewer where the model reads fewer.
    """

    title: ClassVar[str] = "training"
    n_steps: Count = 1000
    learning_rate: Positive | None = None
    warmup: CountOrZero = 0
    schedule: Annotated[str, _one_of(*SCHEDULES)] = "constant"
    optimizer: Annotated[str, _one_of(*OPTIMIZERS, spelling=_optimizer)] = "AdamW"
    optimizer_options: Options = Field(default_factory=dict)
    clip_norm: Positive | None = None
    precision: Annotated[str, _one_of(*PRECISIONS, spelling=_dtype)] = "float32"
    seed: CountOrZero = 0
    batch_size: Count | None = None
    sequence_length: Count | None = None


class TaskSection(PlanSection):
    """The task.

    Attributes:
        name: One of the workbench's tasks; None: tokens that fit the model, or digits where it reads images.
        options: Options of the task, as its function takes them; in a plan file they are keys next to the name.
    """

    title: ClassVar[str] = "task"
    name: Annotated[str, _one_of(*TASKS)] | None = None
    options: Options = Field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The keys as written in a plan file."""
        return ({} if self.name is None else {"name": self.name}) | dict(self.options)


class HardwareSection(PlanSection):
    """How the run is distributed over devices, and the number formats of their communication.

    Attributes:
        data_parallel: Ranks that each hold the complete model and a share of the batch.
        tensor_parallel: Devices that each hold a part of every matrix; the partial sums of a block are added up
            between them.
        pipeline_parallel: Stages that each hold some of the blocks; states are sent from stage to stage.
        accumulation: Micro-batches whose gradients each rank adds up before the reduction.
        gradient_dtype: Format of the gradients that ranks exchange, and of their partial sums.
        accumulation_dtype: Format of the buffer in which micro-batches are added up.
        weight_dtype: Format of the weights on the devices.
        master_weights: Whether the optimizer keeps float32 weights in addition to those in ``weight_dtype``.
        bucket_mb: Size of the gradients that are reduced together, in MiB.
        reduction: ``"synchronous"``: after the backward pass. ``"overlapped"``: bucket by bucket during it, and the
            last bucket may be ``staleness`` updates late. ``"stale"``: every update uses gradients of ``staleness``
            updates before.
        staleness: Delay in updates; None: 1 where the reduction is stale, else 0, which means that the update waits.
        loss_scale: Loss scale of float16: ``"dynamic"``, or the number that the loss is multiplied by.
        reduction_order: Order of the partial sums of ranks: along a ``"ring"`` or up a ``"tree"``.
    """

    title: ClassVar[str] = "hardware"
    data_parallel: Count = 1
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    accumulation: Count = 1
    gradient_dtype: DtypeName = "float32"
    accumulation_dtype: DtypeName = "float32"
    weight_dtype: DtypeName = "float32"
    master_weights: bool = True
    bucket_mb: Positive = 25.0
    reduction: Annotated[str, _one_of(*REDUCTIONS)] = "synchronous"
    staleness: CountOrZero | None = None
    loss_scale: Annotated[str | float, BeforeValidator(_loss_scale)] = "dynamic"
    reduction_order: Annotated[str, _one_of(*ORDERS)] = "ring"

    @model_validator(mode="after")
    def _waits_or_is_late(self) -> Self:
        if self.reduction == "synchronous" and self.staleness:
            raise ValueError(
                f"staleness is {self.staleness}, but reduction is 'synchronous', which waits for every "
                "gradient; the nearest is staleness = 0, or reduction = 'stale'"
            )
        if self.reduction == "stale" and self.staleness == 0:
            raise ValueError(
                "staleness is 0, but reduction is 'stale'; the nearest is staleness = 1, or reduction = 'synchronous'"
            )
        return self

    @property
    def delay(self) -> int:
        """Updates by which gradients are late."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.reduction == "stale" else 0


class TargetSection(PlanSection):
    """The target size; None: the design's own."""

    title: ClassVar[str] = "target"
    width: Count | None = None
    depth: Count | None = None


class BudgetSection(PlanSection):
    """The budget: tokens, floating-point operations; None: not limited."""

    title: ClassVar[str] = "budget"
    tokens: Positive | None = None
    flops: Positive | None = None


#: Title -> its class.
SECTIONS: dict[str, type[PlanSection]] = {
    cls.title: cls for cls in (TrainingSection, TaskSection, HardwareSection, TargetSection, BudgetSection)
}


def read_section(title: str, keys: Any) -> PlanSection:
    """Make a section from its keys.

    Raises:
        OptionError: If it is no table, or a key is unknown or has an impossible value.
    """
    cls = SECTIONS[title]
    if not isinstance(keys, Mapping):
        raise OptionError(f"[{title}] is {keys!r}, expected a section with keys.")
    if cls is TaskSection:
        return _read_task(keys)
    return cls(**{str(name): value for name, value in keys.items()})


def unknown_key(name: str, title: str) -> str:
    """The sentence that refuses a key, with the nearest existing one."""
    for other, cls in SECTIONS.items():
        if other != title and name in cls.model_fields and cls is not TaskSection:
            where = f"[{title}] knows no key '{name}'" if title else f"The key '{name}' stands outside of a section"
            return f"{where}; it belongs to [{other}]."
    known = list(SECTIONS[title].model_fields)
    return f"[{title}] knows no key '{name}'; the nearest is '{nearest(name, known)}', of {', '.join(known)}."


def _read_task(keys: Mapping[str, Any]) -> TaskSection:
    """The task and its options, which its own function decides."""
    options = {name: value for name, value in keys.items() if name != "name"}
    section = TaskSection(name=keys.get("name"), options=options)
    if options and section.name is None:
        raise OptionError(f"[task] has '{next(iter(options))}' but no name; add name = one of {', '.join(TASKS)}.")
    known = task_options(section.name) if section.name else ()
    for name in options:
        if name not in known:
            raise OptionError(
                f"[task] {section.name} knows no key '{name}'; the nearest is '{nearest(name, known)}', of "
                f"{', '.join(known)}."
            )
    return section


def task_options(name: str) -> tuple[str, ...]:
    """The options of a task's function, except the seed."""
    import inspect

    from workbench import tasks

    return tuple(item for item in inspect.signature(getattr(tasks, name)).parameters if item != "seed")
