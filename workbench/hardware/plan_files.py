"""Plans of runs for an assessment before training: read from TOML, and validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import OptionError, WorkbenchError
from workbench.hardware.plan_sections import (
    DTYPES,
    SECTIONS,
    BudgetSection,
    HardwareSection,
    TargetSection,
    TaskSection,
    TrainingSection,
    keys_of,
    nearest,
    read_section,
    task_options,
    unknown_key,
)
from workbench.io.files import FileKind, as_path
from workbench.models.model_sizes import model_sizes, nearest_size
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from workbench.tasks import Task

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
        values = {
            item.name: getattr(self.training, item.name)
            for item in fields(TrainingPlan)
            if hasattr(self.training, item.name)
        }
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

        Args:
            vocab_size: Vocabulary of the model; None if it reads no tokens.
            max_length: Longest sequence that the model reads; None if there is no limit.
            image_size: Side length of the images that the model reads, in pixels.
            n_channels: Number of channels of the images.
            n_classes: Maximum number of classes of the images.
            seed: Seed of the data; None uses that of the plan.
            n_rows: Number of examples in a batch, instead of the limit above.
        """
        from workbench import tasks

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
            raise OptionError(
                f"[task]: {name} has {n_tokens} tokens, but the vocabulary of the model has {vocab_size}; {remedy}."
            )
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
        sections = {title: getattr(self, title).as_dict() for title in SECTIONS}
        return {title: keys for title, keys in sections.items() if keys}


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
