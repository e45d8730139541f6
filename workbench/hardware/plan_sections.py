"""The sections of a plan: their keys, and the validation of the values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from workbench.errors import OptionError, require_known
from workbench.sweeps.run_settings import TASKS
from workbench.training.training_plan import PRECISIONS, SCHEDULES

#: Floating-point formats of a plan.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REDUCTIONS = ("synchronous", "overlapped", "stale")
ORDERS = ("ring", "tree")
_OTHER_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
OPTIMIZERS = tuple(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


class _InvalidValueError(ValueError):
    """A value of a key that is not allowed."""

    def __init__(
        self, expected: str | tuple[str, ...], *, remedy: str = "", name: str = "", value: object = None
    ) -> None:
        super().__init__(str(expected))
        self.expected, self.remedy, self.name, self.value = expected, remedy, name, value


def _number(value: Any) -> Any:
    """Convert a number of any library to an int or a float."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _one_of(*choices: str, spelling: Callable[[str], str] = str) -> BeforeValidator:
    """Return a validator that accepts one of several words, and converts it to its standard spelling."""

    def check(value: Any) -> str:
        word = spelling(value) if isinstance(value, str) else value
        if word in choices:
            return word
        remedy = f"the nearest is '{nearest(word, choices)}'" if isinstance(word, str) else ""
        raise _InvalidValueError(choices, remedy=remedy)

    return BeforeValidator(check)


def _dtype(name: str) -> str:
    """Return the standard name of a number format."""
    return _OTHER_NAMES.get(name, name)


def _optimizer(name: str) -> str:
    """Return the name of an optimizer with its standard capitalization."""
    return next((known for known in OPTIMIZERS if known.lower() == name.lower()), name)


def _table(value: Any) -> dict[str, Any]:
    """Validate a table of options."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _InvalidValueError("a table of options")
    return {name: list(item) if isinstance(item, tuple) else item for name, item in value.items()}


def _loss_scale(value: Any) -> str | float:
    """Validate a loss scale."""
    if value == "dynamic":
        return "dynamic"
    if not isinstance(value := _number(value), int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _InvalidValueError("'dynamic' or a positive number")
    return float(value)


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
DtypeName = Annotated[str, _one_of(*DTYPES, spelling=_dtype)]
Options = Annotated[Mapping[str, Any], BeforeValidator(_table)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name with the most similar spelling."""
    return difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.0)[0]


class PlanSection(BaseModel):
    """A section of a plan: keys with their values, None if not given."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    title: ClassVar[str]

    def __init__(self, **keys: Any) -> None:
        for name in keys:
            if name not in type(self).model_fields:
                raise unknown_key(name, self.title)
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise _option_error(error).within(f"[{self.title}]") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that have a value, with values for TOML and JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self if value is not None}


def _option_error(error: ValidationError) -> OptionError:
    """Convert the first error of a validation."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, _InvalidValueError) and cause.name:  # Several keys contradict each other.
        return OptionError.of(cause.name, cause.value, cause.expected, remedy=cause.remedy)
    key, value, kind = str(first["loc"][0]), first["input"], first["type"]
    if isinstance(cause, _InvalidValueError):
        return OptionError.of(key, value, cause.expected, remedy=cause.remedy)
    if kind == "greater_than_equal":
        return OptionError.of(key, value, f"at least {context['ge']}")
    if kind == "int_type" and isinstance(value, float):
        is_near = math.isfinite(value) and round(value) >= 1
        return OptionError.of(key, value, "an integer", remedy=f"the nearest is {round(value)}" if is_near else "")
    expected = {"int_type": "an integer", "bool_type": "true or false"}.get(kind, "a positive number")
    return OptionError.of(key, value, expected)


class TrainingSection(PlanSection):
    """The fields of `workbench.TrainingPlan` as TOML values, and the size of the data.

    Attributes:
        batch_size: Examples in the global batch, over all ranks and micro-batches; None uses the smallest multiple of
            ``data_parallel * accumulation`` that is at least 32.
        sequence_length: Tokens in a sequence; None uses 64, or the longest sequence of the model if that is shorter.
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
        name: One of the workbench's tasks; None uses tokens that fit the model, or digits if it reads images.
        options: Options of the task; in a plan file they are keys next to the name.
    """

    title: ClassVar[str] = "task"
    name: Annotated[str, _one_of(*TASKS)] | None = None
    options: Options = Field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys as in a plan file."""
        return ({} if self.name is None else {"name": self.name}) | dict(self.options)


class HardwareSection(PlanSection):
    """The distribution of the run over devices, and the number formats of their communication.

    Attributes:
        data_parallel: Number of ranks, each with the complete model and a share of the batch.
        tensor_parallel: Number of devices over which every matrix is split; the partial sums of a block are added
            between them.
        pipeline_parallel: Number of stages, each with some of the blocks; states are sent from stage to stage.
        accumulation: Number of micro-batches whose gradients each rank adds before the reduction.
        gradient_dtype: Format of the gradients that ranks exchange, and of their partial sums.
        accumulation_dtype: Format of the buffer in which the gradients of micro-batches are added.
        weight_dtype: Format of the parameters on the devices.
        master_weights: Whether the optimizer keeps float32 parameters in addition to those in ``weight_dtype``.
        bucket_mb: Size of the gradients that are reduced together, in MiB.
        reduction: ``"synchronous"`` reduces after the backward pass; ``"overlapped"`` reduces bucket by bucket during
            the backward pass, and the last bucket may be ``staleness`` updates late; with ``"stale"`` every update uses
            the gradients of ``staleness`` updates before.
        staleness: Delay in updates; None uses 1 if the reduction is stale, and 0 (the update waits) otherwise.
        loss_scale: Loss scale of float16: ``"dynamic"``, or the factor by which the loss is multiplied.
        reduction_order: Order in which the gradients of ranks are added: along a ``"ring"`` or in a ``"tree"``.
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
    def _check_staleness(self) -> Self:
        if self.reduction == "synchronous" and self.staleness:
            raise _InvalidValueError(
                "0 with reduction = 'synchronous'",
                remedy="set staleness = 0 or reduction = 'stale'",
                name="staleness",
                value=self.staleness,
            )
        if self.reduction == "stale" and self.staleness == 0:
            raise _InvalidValueError(
                "at least 1 with reduction = 'stale'",
                remedy="set staleness = 1 or reduction = 'synchronous'",
                name="staleness",
                value=0,
            )
        return self

    @property
    def delay(self) -> int:
        """Number of updates by which gradients are late."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.reduction == "stale" else 0


class TargetSection(PlanSection):
    """The target size; None uses that of the design."""

    title: ClassVar[str] = "target"
    width: Count | None = None
    depth: Count | None = None


class BudgetSection(PlanSection):
    """The budget: tokens and floating-point operations; None if unlimited."""

    title: ClassVar[str] = "budget"
    tokens: Positive | None = None
    flops: Positive | None = None


#: Title of a section -> its class.
SECTIONS: dict[str, type[PlanSection]] = {
    cls.title: cls for cls in (TrainingSection, TaskSection, HardwareSection, TargetSection, BudgetSection)
}


def read_section(title: str, keys: Any) -> PlanSection:
    """Create a section from its keys."""
    cls = SECTIONS[title]
    if not isinstance(keys, Mapping):
        raise OptionError.of(title, keys, "a section with keys")
    if cls is TaskSection:
        options = {name: value for name, value in keys.items() if name != "name"}
        section = TaskSection(name=keys.get("name"), options=options)
        if options and section.name is None:
            raise OptionError(f"[task] has '{next(iter(options))}' but no name; add name = one of {', '.join(TASKS)}.")
        require_known(f"[task]: {section.name}", options, task_options(section.name) if section.name else ())
        return section
    return cls(**{str(name): value for name, value in keys.items()})


def unknown_key(name: str, title: str) -> OptionError:
    """Create the exception for an unknown key, which states the section of that key or the nearest key."""
    for other, cls in SECTIONS.items():
        if other != title and name in cls.model_fields and cls is not TaskSection:
            problem = f"[{title}] has no key '{name}'" if title else f"The key '{name}' is outside of a section"
            return OptionError(f"{problem}; it belongs to [{other}].")
    known = tuple(SECTIONS[title].model_fields)
    return OptionError(
        f"[{title}] has no key '{name}'; the nearest is '{nearest(name, known)}', of {', '.join(known)}."
    )


def task_options(name: str) -> tuple[str, ...]:
    """Return the options of a task, except the seed."""
    import inspect

    from workbench import tasks

    return tuple(item for item in inspect.signature(getattr(tasks, name)).parameters if item != "seed")
