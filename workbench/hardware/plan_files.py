"""The plan of a run before compute is committed: read from TOML, and checked."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
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
    nearest,
    read_section,
    task_options,
    unknown_key,
)
from workbench.models.model_sizes import model_sizes, nearest_size
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from workbench.tasks import Task

_SMALLEST_BATCH = 32
_DEFAULT_LENGTH = 64
#: Largest numbers of examples and of tokens in a batch for measurements.
MEASURED_ROWS = 32
MEASURED_TOKENS = 4096
#: The narrowest vocabulary of `workbench.tasks.synthetic_lm`.
_SYNTHETIC_VOCABULARY = 25


@dataclass(frozen=True, kw_only=True)
class AssessmentPlan:
    """The plan of a run: training, task, hardware and budget; made by `read_plan`.

    Attributes:
        training: Settings of the run.
        task: The task.
        hardware: Devices and number formats.
        target: The target size.
        budget: Largest number of tokens or operations.

    Example:
        >>> import workbench as wb
        >>> plan = wb.hardware.AssessmentPlan()
        >>> plan.training.n_steps, plan.batch_size, plan.compute_dtype
        (1000, 32, torch.float32)
    """

    training: TrainingSection = field(default_factory=TrainingSection)
    task: TaskSection = field(default_factory=TaskSection)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    target: TargetSection = field(default_factory=TargetSection)
    budget: BudgetSection = field(default_factory=BudgetSection)

    def __post_init__(self) -> None:
        # An optimizer that does not accept its options, or full matrices, is refused now, not when the run begins.
        if self.training.optimizer == "AdamW" and not self.training.optimizer_options:
            return
        weight = nn.Parameter(torch.zeros(1, 1))
        weight.grad = torch.zeros(1, 1)
        try:
            optimizer = self.training_plan().optimizer_for(nn.ParameterList([weight]))
            optimizer.step(lambda: 0.0)
        except OptionError as error:
            raise OptionError(f"[training] {error}") from error
        except RuntimeError as error:
            raise OptionError(f"[training] optimizer is '{self.training.optimizer}', but {error}.") from error

    @property
    def batch_size(self) -> int:
        """Sequences in the global batch."""
        if self.training.batch_size is not None:
            return self.training.batch_size
        return -(-_SMALLEST_BATCH // self.n_shares) * self.n_shares

    @property
    def n_shares(self) -> int:
        """Micro-batches of one update, those of all ranks together."""
        return self.hardware.data_parallel * self.hardware.accumulation

    @property
    def rows_per_share(self) -> int:
        """Sequences in a micro-batch of one rank; at least 1."""
        return max(1, self.batch_size // self.n_shares)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The format of activations, also in communication.

        It is that of the weights where these are in low precision, else the precision of training.
        """
        name = self.hardware.weight_dtype if self.hardware.weight_dtype != "float32" else self.training.precision
        return DTYPES[name]

    def training_plan(self) -> TrainingPlan:
        """The settings of the run as a `TrainingPlan`.

        Raises:
            OptionError: If they contradict each other or there is no such optimizer.
        """
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
        """The task of the plan, sized for a model and small enough to measure on.

        A batch of it is a small sample of the plan's global batch, not that batch: at most 32 examples, and no more
        than 4,096 tokens. Effects that depend on the size of the global batch, its sampling noise and the number of
        added terms, are scaled or resampled from such samples; see `workbench.hardware.assess_hardware`.

        Args:
            vocab_size: Vocabulary of the model; None: it reads no tokens.
            max_length: Longest sequence that the model reads; None: any.
            image_size: Pixels along a side of the images that the model reads.
            n_channels: Channels of the images.
            n_classes: Largest number of classes of the images.
            seed: Seed of the data; None: that of the plan.
            n_rows: Examples of a batch, instead of the limit above.

        Raises:
            OptionError: If the task does not fit the model.
        """
        from workbench import tasks

        name = self.task.name
        if name is None:
            name = "digits" if vocab_size is None and image_size is not None else "synthetic_lm"
            if name == "synthetic_lm" and vocab_size is not None and vocab_size < _SYNTHETIC_VOCABULARY:
                name = "random_tokens"
        length = min(self.training.sequence_length or _DEFAULT_LENGTH, max_length or MEASURED_TOKENS, MEASURED_TOKENS)
        rows = min(self.batch_size, MEASURED_ROWS, max(1, MEASURED_TOKENS // length)) if n_rows is None else n_rows
        sized = {"length": length, "batch_size": rows, "vocab_size": vocab_size}
        sized |= {"image_size": image_size, "n_channels": n_channels, "n_classes": n_classes}
        known = task_options(name)
        options = {key: value for key, value in sized.items() if key in known and value is not None}
        seed = self.training.seed if seed is None else seed
        try:
            task = getattr(tasks, name)(**{**options, **self.task.options}, seed=seed)
        except WorkbenchError as error:
            raise OptionError(f"[task] {name}: {error}") from error
        except (TypeError, ValueError) as error:  # values of another kind than the task's
            raise OptionError(f"[task] {name} does not take {self.task.options}: {error}.") from error
        reads = getattr(task, "vocab_size", None)
        if vocab_size is not None and reads is not None and reads > vocab_size:
            remedy = f"vocab_size = {vocab_size}" if "vocab_size" in known else "a task with fewer tokens"
            raise OptionError(
                f"[task] {name} has {reads} tokens, but the model knows only {vocab_size}; the nearest is {remedy}."
            )
        if max_length is not None and getattr(task, "length", 0) > max_length:
            raise OptionError(
                f"[task] {name} has sequences of {task.length} tokens, but the model reads at most {max_length}; the "
                f"nearest is length = {max_length}."
            )
        return task

    def check_against(self, source: Any = None) -> None:
        """Refuse sizes that are impossible in themselves, or for a model.

        Args:
            source: A design, which is checked at the target size of the plan; or a model, a subject or a configuration;
                None: check the plan alone. Sizes that it does not specify are not checked.

        Raises:
            OptionError: If a size is impossible; the message names the key and the nearest possible value.
        """
        n = self.n_shares
        if self.batch_size % n:
            near = max(n, round(self.batch_size / n) * n)
            raise OptionError(
                f"[training] batch_size is {self.batch_size}, which {self._shares()} do not divide; the nearest is "
                f"{near}."
            )
        if source is None:
            return
        if callable(resized := getattr(source, "resized", None)):
            source = resized(self.target.width, self.target.depth)
        sizes, hardware, depth = model_sizes(source), self.hardware, self.target.depth
        depth = sizes.depth if depth is None else depth
        if not sizes.bears_tensor_parallel(hardware.tensor_parallel):
            highest = max(size for size in (sizes.n_heads, sizes.width, sizes.inner_width) if size is not None)
            near = nearest_size(hardware.tensor_parallel, sizes.bears_tensor_parallel, highest=highest)
            raise OptionError(
                f"[hardware] tensor_parallel is {hardware.tensor_parallel}, which does not divide "
                f"{_what_is_cut(sizes, hardware.tensor_parallel)}; the nearest is {near}."
            )
        if depth is not None and hardware.pipeline_parallel > depth:
            raise OptionError(
                f"[hardware] pipeline_parallel is {hardware.pipeline_parallel}, but the model has {depth} blocks; the "
                f"nearest is {depth}."
            )
        length = self.training.sequence_length
        if length is not None and sizes.max_length is not None and length > sizes.max_length:
            raise OptionError(
                f"[training] sequence_length is {length}, but the model reads at most {sizes.max_length} tokens; the "
                f"nearest is {sizes.max_length}."
            )
        if self.task.name is not None:
            self.make_task(
                sizes.vocabulary,
                max_length=sizes.max_length,
                image_size=sizes.image_size,
                n_channels=sizes.n_channels,
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The sections as plain values, for TOML or JSON, from which `read_plan` makes an equal plan."""
        sections = {title: getattr(self, title).as_dict() for title in SECTIONS}
        return {title: keys for title, keys in sections.items() if keys}

    def _shares(self) -> str:
        hardware = self.hardware
        return f"data_parallel = {hardware.data_parallel} ranks of accumulation = {hardware.accumulation} micro-batches"


def read_plan(source: str | os.PathLike[str] | Mapping[str, Any] | AssessmentPlan | None = None) -> AssessmentPlan:
    """Read a plan from a TOML file or a mapping of sections; every section and key may be left out.

    Args:
        source: Path of the file, or its sections as mappings, or an existing plan, which is returned; None: the plan
            of defaults.

    Raises:
        OptionError: If the file cannot be read (with the line that is no TOML), or a section, key or value is
            unknown or impossible; the message names the key and the nearest one.

    Example:
        >>> import workbench as wb
        >>> plan = wb.hardware.read_plan({"training": {"learning_rate": 3e-4}, "hardware": {"data_parallel": 64}})
        >>> plan.training.learning_rate, plan.batch_size
        (0.0003, 64)
    """
    if isinstance(source, AssessmentPlan):
        return source
    if source is None or isinstance(source, Mapping):
        return _from_mapping(source or {})
    if not isinstance(source, str | os.PathLike):
        raise OptionError(
            f"The plan is a {type(source).__name__}, expected the path of a TOML file, a mapping or a plan."
        )
    path = Path(source).expanduser()
    if not path.is_file():
        raise OptionError(f"There is no plan at {path}; pass the path of a TOML file.")
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise OptionError(f"{path.name} is no valid TOML: {error}; correct it there.") from error
    try:
        return _from_mapping(sections)
    except OptionError as error:
        raise OptionError(f"{path.name}: {error}") from error


def _from_mapping(sections: Mapping[str, Any]) -> AssessmentPlan:
    found: dict[str, Any] = {}
    for title, keys in sections.items():
        if title not in SECTIONS:
            if not isinstance(keys, Mapping) and any(title in _keys(other) for other in SECTIONS):
                raise OptionError(unknown_key(title, ""))
            raise OptionError(
                f"The plan knows no section '{title}'; the nearest is '{nearest(str(title), SECTIONS)}', of "
                f"{', '.join(SECTIONS)}."
            )
        found[title] = read_section(title, keys)
    return AssessmentPlan(**found)


def _keys(title: str) -> set[str]:
    return set() if title == "task" else set(SECTIONS[title].model_fields)


def _what_is_cut(sizes: Any, n: int) -> str:
    """The size that ``n`` devices cannot divide equally."""
    if sizes.n_heads is not None and sizes.n_heads % n:
        return f"the {sizes.n_heads} attention heads"
    if sizes.n_kv_heads is not None and sizes.n_kv_heads % n and n % sizes.n_kv_heads:
        return f"the {sizes.n_kv_heads} key-value heads"
    if sizes.n_heads is None and sizes.width is not None and sizes.width % n:
        return f"the width of {sizes.width}"
    return f"the inner width of {sizes.inner_width}"
