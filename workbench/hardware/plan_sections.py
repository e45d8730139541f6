"""The sections of a plan: what each key means, and which values it takes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

import torch

from workbench.errors import ThresholdError
from workbench.sweeps.run_settings import TASKS
from workbench.training.training_plan import PRECISIONS, SCHEDULES

#: The floating-point formats of a plan.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REDUCTIONS = ("synchronous", "overlapped", "stale")
ORDERS = ("ring", "tree")
THOROUGHNESS = ("quick", "full")
_OTHER_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
#: From the key's name and a value to the value that is kept.
Check = Callable[[str, Any], Any]


def whole(lowest: int) -> Check:
    """Accept whole numbers from a lowest one on."""

    def check(key: str, value: Any) -> int:
        if not _is_number(value):
            raise ThresholdError(f"{key} is {value!r}, expected a whole number of at least {lowest}.")
        if value != value or value < lowest:
            raise ThresholdError(f"{key} is {value}, expected at least {lowest}.")
        if not isinstance(value, Integral):
            nearest = f"; the nearest is {max(lowest, round(value))}" if math.isfinite(value) else ""
            raise ThresholdError(f"{key} is {value}, expected a whole number{nearest}.")
        return int(value)

    return check


def number(*, above: float = 0.0) -> Check:
    """Accept finite numbers above a limit."""

    def check(key: str, value: Any) -> float:
        if not _is_number(value) or not (math.isfinite(value) and value > above):
            raise ThresholdError(f"{key} is {value!r}, expected a number above {above:g}.")
        return float(value)

    return check


def choice(choices: Iterable[str]) -> Check:
    """Accept one of some words."""
    choices = tuple(choices)

    def check(key: str, value: Any) -> str:
        if value not in choices:
            near = f"; the nearest is '{nearest(value, choices)}'" if isinstance(value, str) else ""
            raise ThresholdError(f"{key} is {value!r}, expected one of {', '.join(choices)}{near}.")
        return value

    return check


def dtype(key: str, value: Any) -> str:
    """Accept a floating-point format; ``bf16`` and the like are spelled out."""
    return choice(DTYPES)(key, _OTHER_NAMES.get(value, value) if isinstance(value, str) else value)


def precision(key: str, value: Any) -> str:
    """Accept what a training plan calls a precision."""
    return choice(PRECISIONS)(key, _OTHER_NAMES.get(value, value) if isinstance(value, str) else value)


def flag(key: str, value: Any) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise ThresholdError(f"{key} is {value!r}, expected true or false.")
    return value


def optimizer(key: str, value: Any) -> str:
    """Accept the name of a class in ``torch.optim``, in any spelling of case."""
    kind = torch.optim.Optimizer
    known = [n for n, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, kind) and v is not kind]
    if not isinstance(value, str):
        raise ThresholdError(f"{key} is {value!r}, expected one of {', '.join(known)}.")
    return choice(known)(key, next((name for name in known if name.lower() == value.lower()), value))


def table(key: str, value: Any) -> dict[str, Any]:
    """Accept options by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ThresholdError(f"{key} is {value!r}, expected a table of options.")
    return {name: list(item) if isinstance(item, tuple) else item for name, item in value.items()}


def whole_numbers(lowest: int) -> Check:
    """Accept several whole numbers, none twice."""
    each = whole(lowest)

    def check(key: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise ThresholdError(f"{key} is {value!r}, expected a list of whole numbers.")
        found = tuple(each(key, item) for item in value)
        if not found or len(set(found)) < len(found):
            raise ThresholdError(f"{key} is {list(found)}, expected one number or more, none of them twice.")
        return found

    return check


def loss_scale(key: str, value: Any) -> str | float:
    """Accept ``"dynamic"`` or a positive number."""
    if value == "dynamic":
        return value
    if isinstance(value, str):
        raise ThresholdError(f"{key} is '{value}', expected 'dynamic' or a number above 0.")
    return number()(key, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most alike."""
    return difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.0)[0]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Keys of a plan and their values; None: not given."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                object.__setattr__(self, item.name, item.metadata["check"](f"[{self.title}] {item.name}", value))

    def as_dict(self) -> dict[str, Any]:
        """The keys that have a value, as plain values that TOML and JSON know."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value is not None
        }


def _key(default: Any, check: Check) -> Any:
    """A field of a section."""
    if default is dict:
        return field(default_factory=dict, metadata={"check": check})
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class TrainingSection(Section):
    """How it is to be trained: the fields of `workbench.TrainingPlan` as plain values, and the size of the data.

    Attributes:
        batch_size: Sequences in the global batch, all ranks and micro-batches together; None: the smallest multiple of
            ``data_parallel * accumulation`` that is at least 32.
        sequence_length: Tokens in a sequence; None: 64, or fewer where the model reads fewer.
    """

    title: ClassVar[str] = "training"
    n_steps: int = _key(1000, whole(1))
    learning_rate: float | None = _key(None, number())
    warmup: int = _key(0, whole(0))
    schedule: str = _key("constant", choice(SCHEDULES))
    optimizer: str = _key("AdamW", optimizer)
    optimizer_options: Mapping[str, Any] = _key(dict, table)
    clip_norm: float | None = _key(None, number())
    precision: str = _key("float32", precision)
    seed: int = _key(0, whole(0))
    batch_size: int | None = _key(None, whole(1))
    sequence_length: int | None = _key(None, whole(1))


@dataclass(frozen=True, kw_only=True)
class TaskSection(Section):
    """What is learned.

    Attributes:
        name: One of the workbench's tasks; None: tokens that fit the model, or digits where it reads images.
        options: Of the task, as its function takes them; in a plan file they stand beside the name.
    """

    title: ClassVar[str] = "task"
    name: str | None = _key(None, choice(TASKS))
    options: Mapping[str, Any] = _key(dict, table)

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a plan file."""
        return ({} if self.name is None else {"name": self.name}) | dict(self.options)


@dataclass(frozen=True, kw_only=True)
class HardwareSection(Section):
    """How the run is spread over devices, and in which numbers they talk.

    Attributes:
        data_parallel: Ranks that each hold the whole model and a share of the batch.
        tensor_parallel: Devices that each hold a part of every matrix; the partial sums of a block are added up
            between them.
        pipeline_parallel: Stages that each hold some of the blocks; states are sent from stage to stage.
        accumulation: Micro-batches whose gradients each rank adds up before the reduction.
        gradient_dtype: Of the gradients that ranks send each other, and of the sums on the way.
        accumulation_dtype: Of the buffer in which micro-batches are added up.
        weight_dtype: Of the weights that the devices hold.
        master_weights: Whether the optimizer keeps float32 weights beside those in ``weight_dtype``.
        bucket_mb: Gradients that are reduced in one go, in MiB.
        reduction: ``"synchronous"``: after the backward pass. ``"overlapped"``: bucket by bucket while it goes on, and
            the bucket that is finished last may come ``staleness`` updates late. ``"stale"``: every update uses
            gradients of ``staleness`` updates before.
        staleness: In updates; None: 1 where the reduction is stale, else 0, which means that the update waits.
        loss_scale: Of float16: ``"dynamic"``, or the number that the loss is multiplied by.
        reduction_order: In which partial sums of ranks are made: along a ``"ring"`` or up a ``"tree"``.
    """

    title: ClassVar[str] = "hardware"
    data_parallel: int = _key(1, whole(1))
    tensor_parallel: int = _key(1, whole(1))
    pipeline_parallel: int = _key(1, whole(1))
    accumulation: int = _key(1, whole(1))
    gradient_dtype: str = _key("float32", dtype)
    accumulation_dtype: str = _key("float32", dtype)
    weight_dtype: str = _key("float32", dtype)
    master_weights: bool = _key(True, flag)
    bucket_mb: float = _key(25.0, number())
    reduction: str = _key("synchronous", choice(REDUCTIONS))
    staleness: int | None = _key(None, whole(0))
    loss_scale: str | float = _key("dynamic", loss_scale)
    reduction_order: str = _key("ring", choice(ORDERS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction == "synchronous" and self.staleness:
            raise ThresholdError(
                f"[hardware] staleness is {self.staleness}, but reduction is 'synchronous', which waits for every "
                "gradient; the nearest is staleness = 0, or reduction = 'stale'."
            )
        if self.reduction == "stale" and self.staleness == 0:
            raise ThresholdError(
                "[hardware] staleness is 0, but reduction is 'stale'; the nearest is staleness = 1, or reduction = "
                "'synchronous'."
            )

    @property
    def delay(self) -> int:
        """Updates by which gradients are late."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.reduction == "stale" else 0


@dataclass(frozen=True, kw_only=True)
class TargetSection(Section):
    """The size that the plan is for; None: the design's own."""

    title: ClassVar[str] = "target"
    width: int | None = _key(None, whole(1))
    depth: int | None = _key(None, whole(1))


@dataclass(frozen=True, kw_only=True)
class BudgetSection(Section):
    """What may be spent: tokens, floating-point operations; None: not said."""

    title: ClassVar[str] = "budget"
    tokens: float | None = _key(None, number())
    flops: float | None = _key(None, number())


@dataclass(frozen=True, kw_only=True)
class AssessmentSection(Section):
    """How thoroughly to look: sizes and seeds of the models that are measured; None: chosen by who measures."""

    title: ClassVar[str] = "assessment"
    widths: tuple[int, ...] | None = _key(None, whole_numbers(1))
    depths: tuple[int, ...] | None = _key(None, whole_numbers(1))
    seeds: tuple[int, ...] | None = _key(None, whole_numbers(0))
    thoroughness: str = _key("quick", choice(THOROUGHNESS))


#: Title -> its class.
SECTIONS: dict[str, type[Section]] = {
    cls.title: cls
    for cls in (TrainingSection, TaskSection, HardwareSection, TargetSection, BudgetSection, AssessmentSection)
}


def read_section(title: str, keys: Any) -> Section:
    """A section from its keys.

    Raises:
        ThresholdError: If it is no table, or a key is unknown or has an impossible value.
    """
    cls = SECTIONS[title]
    if not isinstance(keys, Mapping):
        raise ThresholdError(f"[{title}] is {keys!r}, expected a section with keys.")
    if cls is TaskSection:
        return _read_task(keys)
    known = [item.name for item in fields(cls)]
    for name in keys:
        if name not in known:
            raise ThresholdError(unknown_key(str(name), title))
    return cls(**keys)


def unknown_key(name: str, title: str) -> str:
    """The sentence that refuses a key, with the nearest one that there is."""
    for other, cls in SECTIONS.items():
        if other != title and name in {item.name for item in fields(cls)} and cls is not TaskSection:
            where = f"[{title}] knows no key '{name}'" if title else f"The key '{name}' stands outside of a section"
            return f"{where}; it belongs to [{other}]."
    known = [item.name for item in fields(SECTIONS[title])]
    return f"[{title}] knows no key '{name}'; the nearest is '{nearest(name, known)}', of {', '.join(known)}."


def _read_task(keys: Mapping[str, Any]) -> TaskSection:
    """The task and its options, which its own function decides."""
    options = {name: value for name, value in keys.items() if name != "name"}
    section = TaskSection(name=keys.get("name"), options=options)
    if options and section.name is None:
        raise ThresholdError(f"[task] has '{next(iter(options))}' but no name; add name = one of {', '.join(TASKS)}.")
    known = task_options(section.name) if section.name else ()
    for name in options:
        if name not in known:
            raise ThresholdError(
                f"[task] {section.name} knows no key '{name}'; the nearest is '{nearest(name, known)}', of "
                f"{', '.join(known)}."
            )
    return section


def task_options(name: str) -> tuple[str, ...]:
    """What the function of a task takes, but the seed."""
    import inspect

    from workbench import tasks

    return tuple(item for item in inspect.signature(getattr(tasks, name)).parameters if item != "seed")
