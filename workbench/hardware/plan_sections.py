"""The sections of a plan: their keys, and the validation of the values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

import torch

from workbench.errors import OptionError, require_known
from workbench.option_checks import NonNegativeInt, PositiveFloat, PositiveInt, checked, one_of
from workbench.sweeps.run_settings import TASKS
from workbench.training.training_plan import PRECISIONS, SCHEDULES

#: Floating-point formats of a plan.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDERS = ("ring", "tree")
_OTHER_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
OPTIMIZERS = tuple(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
DtypeName = Annotated[str, one_of(DTYPES)]


class PlanSection:
    """A section of a plan: keys with their values, None if not given."""

    title: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that have a value, with values for TOML and JSON."""
        return {name: value for name in keys_of(self.title) if (value := getattr(self, name)) is not None}


@checked
@dataclass(frozen=True, kw_only=True)
class TrainingSection(PlanSection):
    """The fields of `workbench.TrainingPlan` as TOML values, and the size of the data.

    Attributes:
        batch_size: Examples in the global batch, over all ranks and micro-batches; None uses the smallest multiple of
            ``data_parallel * accumulation`` that is at least 32.
        sequence_length: Tokens in a sequence; None uses 64, or the longest sequence of the model if that is shorter.
    """

    title: ClassVar[str] = "training"
    n_steps: PositiveInt = 1000
    learning_rate: PositiveFloat | None = None
    warmup: NonNegativeInt = 0
    schedule: Annotated[str, one_of(SCHEDULES)] = "constant"
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "AdamW"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: PositiveFloat | None = None
    precision: Annotated[str, one_of(PRECISIONS)] = "float32"
    seed: NonNegativeInt = 0
    batch_size: PositiveInt | None = None
    sequence_length: PositiveInt | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class TaskSection(PlanSection):
    """The task.

    Attributes:
        name: One of the workbench's tasks; None uses tokens that fit the model, or digits if it reads images.
        options: Options of the task; in a plan file they are keys next to the name.
    """

    title: ClassVar[str] = "task"
    name: Annotated[str, one_of(TASKS)] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys as in a plan file."""
        return ({} if self.name is None else {"name": self.name}) | dict(self.options)


@checked
@dataclass(frozen=True, kw_only=True)
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
    data_parallel: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    accumulation: PositiveInt = 1
    gradient_dtype: DtypeName = "float32"
    accumulation_dtype: DtypeName = "float32"
    weight_dtype: DtypeName = "float32"
    master_weights: bool = True
    bucket_mb: PositiveFloat = 25.0
    reduction: Literal["synchronous", "overlapped", "stale"] = "synchronous"
    staleness: NonNegativeInt | None = None
    loss_scale: Literal["dynamic"] | PositiveFloat = "dynamic"
    reduction_order: Annotated[str, one_of(ORDERS)] = "ring"

    def __post_init__(self) -> None:
        if self.reduction == "synchronous" and self.staleness:
            remedy = "set staleness = 0 or reduction = 'stale'"
            raise OptionError.of("staleness", self.staleness, "0 with reduction = 'synchronous'", remedy=remedy)
        if self.reduction == "stale" and self.staleness == 0:
            remedy = "set staleness = 1 or reduction = 'synchronous'"
            raise OptionError.of("staleness", 0, "at least 1 with reduction = 'stale'", remedy=remedy)

    @property
    def delay(self) -> int:
        """Number of updates by which gradients are late."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.reduction == "stale" else 0


@checked
@dataclass(frozen=True, kw_only=True)
class TargetSection(PlanSection):
    """The target size; None uses that of the design."""

    title: ClassVar[str] = "target"
    width: PositiveInt | None = None
    depth: PositiveInt | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class BudgetSection(PlanSection):
    """The budget: tokens and floating-point operations; None if unlimited."""

    title: ClassVar[str] = "budget"
    tokens: PositiveFloat | None = None
    flops: PositiveFloat | None = None


#: Title of a section -> its class.
SECTIONS: dict[str, Any] = {
    cls.title: cls for cls in (TrainingSection, TaskSection, HardwareSection, TargetSection, BudgetSection)
}


def keys_of(title: str) -> list[str]:
    """Return the keys of a section."""
    return [each.name for each in fields(SECTIONS[title])]


def read_section(title: str, keys: Any) -> Any:
    """Create a section from its keys."""
    if not isinstance(keys, Mapping):
        raise OptionError.of(title, keys, "a section with keys")
    values = {str(name): _standard(name, value) for name, value in keys.items()}
    options = {name: value for name, value in values.items() if name != "name"}
    if title == "task":
        values = {"name": values.get("name"), "options": options}
    for name in values:
        if name not in keys_of(title):
            raise unknown_key(name, title)
    try:
        section = SECTIONS[title](**values)
    except OptionError as error:
        raise error.within(f"[{title}]") from None
    if title == "task":
        if options and section.name is None:
            raise OptionError(f"[task] has '{next(iter(options))}' but no name; add name = one of {', '.join(TASKS)}.")
        require_known(f"[task]: {section.name}", options, task_options(section.name) if section.name else ())
    return section


def _standard(name: str, value: Any) -> Any:
    """Return a value with the standard spelling of number formats and optimizers, and lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
    if not isinstance(value, str):
        return value
    known = {each.lower(): each for each in OPTIMIZERS} if name == "optimizer" else _OTHER_NAMES
    return known.get(value.lower(), value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name with the most similar spelling."""
    return difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.0)[0]


def unknown_key(name: str, title: str) -> OptionError:
    """Create the exception for an unknown key, which states the section of that key or the nearest key."""
    for other in SECTIONS:
        if other not in (title, "task") and name in keys_of(other):
            problem = f"[{title}] has no key '{name}'" if title else f"The key '{name}' is outside of a section"
            return OptionError(f"{problem}; it belongs to [{other}].")
    known = keys_of(title)
    return OptionError(
        f"[{title}] has no key '{name}'; the nearest is '{nearest(name, known)}', of {', '.join(known)}."
    )


def task_options(name: str) -> tuple[str, ...]:
    """Return the options of a task, except the seed."""
    import inspect

    from workbench import tasks

    return tuple(item for item in inspect.signature(getattr(tasks, name)).parameters if item != "seed")
