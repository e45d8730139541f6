"""Plans of runs for an assessment before training: their sections, read from TOML, and validated."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import torch
from torch import nn

from workbench import tasks
from workbench.errors import OptionError, WorkbenchError, require_known
from workbench.io.files import FileKind, as_path
from workbench.models.model_sizes import model_sizes, nearest_size
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveFloat, PositiveInt, one_of
from workbench.sweeps.run_settings import TASKS
from workbench.tasks import Task
from workbench.training.training_plan import SCHEDULES, TrainingPlan

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


@checked
@dataclass(frozen=True, kw_only=True)
class TrainingSection(TrainingPlan):
    """A `workbench.TrainingPlan` of TOML values, with its usual limits, and the size of the data.

    Attributes:
        batch_size: Examples in the global batch, over all ranks and micro-batches; None uses the smallest multiple of
            ``data_parallel * accumulation`` that is at least 32.
        sequence_length: Tokens in a sequence; None uses 64, or the longest sequence of the model if that is shorter.
    """

    n_steps: PositiveInt = 1000
    schedule: Annotated[str, one_of(SCHEDULES)] = "constant"
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "AdamW"
    batch_size: PositiveInt | None = None
    sequence_length: PositiveInt | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """The task.

    Attributes:
        name: One of the workbench's tasks; None uses tokens that fit the model, or digits if it reads images.
        options: Options of the task; in a plan file they are keys next to the name.
    """

    name: Annotated[str, one_of(TASKS)] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@checked
@dataclass(frozen=True, kw_only=True)
class HardwareSection:
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
class TargetSection:
    """The target size; None uses that of the design."""

    width: PositiveInt | None = None
    depth: PositiveInt | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class BudgetSection:
    """The budget: tokens and floating-point operations; None if unlimited."""

    tokens: PositiveFloat | None = None
    flops: PositiveFloat | None = None


#: Title of a section -> its class.
SECTIONS: dict[str, Any] = {
    "training": TrainingSection, "task": TaskSection, "hardware": HardwareSection, "target": TargetSection,
    "budget": BudgetSection,
}  # fmt: skip
_NOT_IN_FILES = ("loss_limit", "grad_norm_limit", "stops_at_divergence")


def keys_of(title: str) -> list[str]:
    """Return the keys of a section."""
    return [each.name for each in fields(SECTIONS[title]) if each.name not in _NOT_IN_FILES]


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
    return OptionError(f"[{title}] has no key '{name}'; the nearest is '{nearest(name, known)}' of {', '.join(known)}.")


def task_options(name: str) -> tuple[str, ...]:
    """Return the options of a task, except the seed."""
    return tuple(item for item in inspect.signature(getattr(tasks, name)).parameters if item != "seed")


_MIN_BATCH = 32
_DEFAULT_LENGTH = 64
_FILE = FileKind("a plan", "pass the path of a TOML file, or correct it there", OptionError, "plan", 1 << 24)
#: Maximum numbers of examples and of tokens in a batch for measurements.
MEASURED_ROWS = 32
MEASURED_TOKENS = 4096
#: The smallest vocabulary of `workbench.tasks.synthetic_lm`.
_SYNTHETIC_VOCABULARY = 25


@dataclass(frozen=True, kw_only=True)
class AssessmentPlan:
    """The plan of a run: training, task, hardware, target size and budget; created by `read_plan`.

    Attributes:
        training: Settings of the run.
        task: The task.
        hardware: Devices and number formats.
        target: The target size.
        budget: Maximum number of tokens or operations.
    """

    training: TrainingSection = field(default_factory=TrainingSection)
    task: TaskSection = field(default_factory=TaskSection)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    target: TargetSection = field(default_factory=TargetSection)
    budget: BudgetSection = field(default_factory=BudgetSection)

    def __post_init__(self) -> None:
        # Optimizers that reject their options or dense gradients are found before the run begins.
        if self.training.optimizer == "AdamW" and not self.training.optimizer_options:
            return
        parameter = nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        try:
            optimizer = self.training_plan().optimizer_for(nn.ParameterList([parameter]))
            optimizer.step(lambda: 0.0)
        except OptionError as error:
            raise error.within("[training]") from error
        except RuntimeError as error:
            raise OptionError(f"[training]: optimizer '{self.training.optimizer}' cannot be used: {error}.") from error

    @property
    def batch_size(self) -> int:
        """Examples in the global batch."""
        if self.training.batch_size is not None:
            return self.training.batch_size
        return -(-_MIN_BATCH // self.n_shares) * self.n_shares

    @property
    def n_shares(self) -> int:
        """Micro-batches of one update, over all ranks."""
        return self.hardware.data_parallel * self.hardware.accumulation

    @property
    def rows_per_share(self) -> int:
        """Examples in a micro-batch of one rank; at least 1."""
        return max(1, self.batch_size // self.n_shares)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Format of activations, also in communication.

        It is that of the parameters if these are in low precision, and the precision of training otherwise.
        """
        name = self.hardware.weight_dtype if self.hardware.weight_dtype != "float32" else self.training.precision
        return DTYPES[name]

    def training_plan(self) -> TrainingPlan:
        """Return the settings of the run as a `TrainingPlan`."""
        values = {item.name: getattr(self.training, item.name) for item in fields(TrainingPlan)}
        options = self.training.optimizer_options
        values["optimizer_options"] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return TrainingPlan(**values)

    def make_task(
        self,
        vocab_size: int | None = None,
        *,
        max_length: int | None = None,
        image_size: int | None = None,
        n_channels: int | None = None,
        n_classes: int | None = None,
        seed: int | None = None,
        n_rows: int | None = None,
    ) -> Task:
        """Create the task of the plan, with batches that are small enough for measurements.

        A batch is a small sample of the plan's global batch, with at most 32 examples and 4,096 tokens. Effects that
        depend on the size of the global batch, its sampling noise or the number of added terms are scaled or resampled
        from such samples; see `workbench.hardware.assess_hardware`.
        """
        name = self.task.name
        if name is None:
            name = "digits" if vocab_size is None and image_size is not None else "synthetic_lm"
            if name == "synthetic_lm" and vocab_size is not None and vocab_size < _SYNTHETIC_VOCABULARY:
                name = "random_tokens"
        length = min(self.training.sequence_length or _DEFAULT_LENGTH, max_length or MEASURED_TOKENS, MEASURED_TOKENS)
        n_limit = min(self.batch_size, MEASURED_ROWS, max(1, MEASURED_TOKENS // length))
        sizes = {"length": length, "batch_size": n_limit if n_rows is None else n_rows, "vocab_size": vocab_size}
        sizes |= {"image_size": image_size, "n_channels": n_channels, "n_classes": n_classes}
        known = task_options(name)
        options = {key: value for key, value in sizes.items() if key in known and value is not None}
        seed = self.training.seed if seed is None else seed
        try:
            task = getattr(tasks, name)(**{**options, **self.task.options}, seed=seed)
        except WorkbenchError as error:
            raise OptionError(f"[task]: {name}: {error}") from error
        except (TypeError, ValueError) as error:  # Values of a wrong type.
            raise OptionError(f"[task]: {name} does not accept the options {self.task.options}: {error}.") from error
        n_tokens = getattr(task, "vocab_size", None)
        if vocab_size is not None and n_tokens is not None and n_tokens > vocab_size:
            remedy = f"set vocab_size = {vocab_size}" if "vocab_size" in known else "choose a task with fewer tokens"
            raise OptionError(f"[task]: {name} has {n_tokens} tokens, but the vocabulary has {vocab_size}; {remedy}.")
        if max_length is not None and getattr(task, "length", 0) > max_length:
            raise OptionError(
                f"[task]: {name} has sequences of {task.length} tokens, but the model reads at most {max_length}; set "
                f"length = {max_length}."
            )
        return task

    def check_against(self, source: Any = None) -> None:
        """Check whether the sizes of the plan are possible, by themselves and for a model.

        Args:
            source: A design, which is checked at the target size of the plan; or a model, a subject or a configuration.
                None checks only the plan. Sizes that the source does not specify are not checked.
        """
        n = self.n_shares
        if self.batch_size % n:
            near = max(n, round(self.batch_size / n) * n)
            ranks, micro_batches = self.hardware.data_parallel, self.hardware.accumulation
            expected = f"a multiple of {n} (data_parallel = {ranks} times accumulation = {micro_batches})"
            error = OptionError.of("batch_size", self.batch_size, expected, remedy=f"the nearest is {near}")
            raise error.within("[training]")
        if source is None:
            return
        if callable(resized := getattr(source, "resized", None)):
            source = resized(self.target.width, self.target.depth)
        sizes, hardware, depth = model_sizes(source), self.hardware, self.target.depth
        depth = sizes.depth if depth is None else depth
        if not sizes.supports_tensor_parallel(hardware.tensor_parallel):
            highest = max(size for size in (sizes.n_heads, sizes.width, sizes.inner_width) if size is not None)
            near = nearest_size(hardware.tensor_parallel, sizes.supports_tensor_parallel, highest=highest)
            expected = f"a divisor of {_undivided(sizes, hardware.tensor_parallel)}"
            raise OptionError.of(
                "tensor_parallel", hardware.tensor_parallel, expected, remedy=f"the nearest is {near}"
            ).within("[hardware]")
        if depth is not None and hardware.pipeline_parallel > depth:
            raise OptionError.of(
                "pipeline_parallel", hardware.pipeline_parallel, f"at most {depth}, the number of blocks"
            ).within("[hardware]")
        length = self.training.sequence_length
        if length is not None and sizes.max_length is not None and length > sizes.max_length:
            raise OptionError.of(
                "sequence_length", length, f"at most {sizes.max_length}, the longest sequence that the model reads"
            ).within("[training]")
        if self.task.name is not None:
            self.make_task(
                sizes.vocabulary, max_length=sizes.max_length, image_size=sizes.image_size, n_channels=sizes.n_channels
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as values for TOML or JSON, from which `read_plan` creates an equal plan."""
        sections = {title: {name: getattr(getattr(self, title), name) for name in keys_of(title)} for title in SECTIONS}
        sections["task"] = {"name": self.task.name, **self.task.options}
        given = {title: {k: v for k, v in keys.items() if v is not None} for title, keys in sections.items()}
        return {title: keys for title, keys in given.items() if keys}


def read_plan(source: str | os.PathLike[str] | Mapping[str, Any] | AssessmentPlan | None = None) -> AssessmentPlan:
    """Read a plan from a TOML file or a mapping of sections; all sections and keys are optional.

    Args:
        source: Path of the file, or its sections as mappings, or an existing plan, which is returned unchanged; None
            returns the default plan.

    Raises:
        OptionError: If the file cannot be read (with the line that is not valid TOML), or a section, key or value is
            unknown or invalid; the message states the key and the nearest possible one.

    Example:
        >>> import workbench as wb
        >>> plan = wb.hardware.read_plan({"training": {"learning_rate": 3e-4}, "hardware": {"data_parallel": 64}})
        >>> plan.training.learning_rate, plan.batch_size
        (0.0003, 64)

    See Also:
        `workbench.assess`: Assesses a plan.
    """
    if isinstance(source, AssessmentPlan):
        return source
    if source is None or isinstance(source, Mapping):
        return _from_mapping(source or {})
    if not isinstance(source, str | os.PathLike):
        raise OptionError.of("plan", source, "the path of a TOML file, a mapping or a plan")
    path = as_path(source, "plan").expanduser()
    sections = _FILE.toml(path)
    try:
        return _from_mapping(sections)
    except OptionError as error:
        raise error.within(path.name) from error


def _from_mapping(sections: Mapping[str, Any]) -> AssessmentPlan:
    """Create a plan from its sections."""
    found: dict[str, Any] = {}
    for title, keys in sections.items():
        if title not in SECTIONS:
            if not isinstance(keys, Mapping) and any(title in keys_of(other) for other in SECTIONS if other != "task"):
                raise unknown_key(title, "")
            raise OptionError(
                f"The plan has no section '{title}'; the nearest is '{nearest(str(title), SECTIONS)}', of "
                f"{', '.join(SECTIONS)}."
            )
        found[title] = read_section(title, keys)
    return AssessmentPlan(**found)


def _undivided(sizes: Any, n: int) -> str:
    """Return the size that cannot be divided equally over ``n`` devices."""
    if sizes.n_heads is not None and sizes.n_heads % n:
        return f"the {sizes.n_heads} attention heads"
    if sizes.n_kv_heads is not None and sizes.n_kv_heads % n and n % sizes.n_kv_heads:
        return f"the {sizes.n_kv_heads} key-value heads"
    if sizes.n_heads is None and sizes.width is not None and sizes.width % n:
        return f"the width of {sizes.width}"
    return f"the inner width of {sizes.inner_width}"
