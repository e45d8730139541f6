"""From what a user has at hand to a model small enough to measure, and the design that it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import OptionError, WorkbenchError
from workbench.models.batches import take_rows
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import token_loss
from workbench.models.model_sizes import ModelSizes, model_sizes
from workbench.models.probing import undisturbed
from workbench.models.subject import Subject
from workbench.models.wrapping import unwrap
from workbench.scaling.designs import Design, design
from workbench.scaling.transformers_source import cause_of
from workbench.scaling.width_matching import matched_width
from workbench.tasks import Digits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workbench.hardware import AssessmentPlan
    from workbench.tasks import Task

#: A design is measured at full size up to so many weights; larger ones as a thin model.
MOST_WEIGHTS = 4_000_000
#: Width and vocabulary of a thin model, and the most blocks of the one that trains on trial.
THIN_WIDTH, THIN_VOCABULARY, THIN_DEPTH = 64, 256, 4
#: Batches that an assessment measures on: tokens of a sequence and rows, as many as the recorded runs had.
LENGTH, N_ROWS = 64, 16
#: Tokens of a sequence for what scans it token by token, as transformers' state-space layers do without their own
#: kernels: a backward pass through such a scan takes time by the square of the length.
LENGTH_OF_SCANS = 16
#: Modules that scan, by what transformers calls them; others say the size of their state.
_SCANS = re.compile(r"Rwkv\w*Attention|RgLru|Rglru|DeltaNet|DeltaAttention|[mx]LSTM")
#: Rows of images: as many patches as a batch of sequences has tokens, but at least so many.
_FEWEST_IMAGES = 4


@dataclass(frozen=True)
class MeasuredModel:
    """The model that an assessment runs, and what it stands for.

    Attributes:
        name: Of the subject.
        model: What is trained on trial: the subject itself, or a model of the same design.
        design: What the subject is one size of; None: it cannot be built at another size.
        is_own: Whether ``model`` has the subject's own weights.
        width, depth: Of ``model``; None for a model whose design is not known.
        seed: Of the weights of ``model``, where they were made here.
    """

    name: str
    model: nn.Module
    design: Design | None
    is_own: bool
    width: int | None
    depth: int | None
    seed: int

    @property
    def target_width(self) -> int | None:
        """Width of the subject."""
        return None if self.design is None else self.design.width

    @property
    def target_depth(self) -> int | None:
        """Blocks of the subject."""
        return None if self.design is None else self.design.depth

    @property
    def is_target_size(self) -> bool:
        """Whether what is measured is as large as the subject."""
        return self.is_own or (self.width, self.depth) == (self.target_width, self.target_depth)

    @property
    def n_weights(self) -> int:
        """Of the subject; of images with as many classes as are tried."""
        if self.is_own or self.design is None or (self.is_target_size and self.design.n_classes):
            return sum(weight.numel() for weight in self.model.parameters())
        return self.design.n_weights()

    def fresh(self, seed: int = 0, depth: int | None = None) -> nn.Module:
        """A model to look at before training, whose signals are those of the target's width.

        The subject itself, if it has weights of its own or no known design; ``model``, or another seed of it, if that
        is as large as the subject; otherwise thin with matched variances, see `workbench.scaling.width_matching`.

        Args:
            seed: Added to the seed of ``model``.
            depth: Blocks; None: as many as ``model``.
        """
        if self.is_own or self.design is None or (self.is_target_size and not seed and depth is None):
            return self.model
        assert self.width is not None  # as its design is known
        if self.is_target_size:
            choices = Digits.n_classes if self.design.n_classes else None
            return self.design.build(self.width, depth or self.depth, self.seed + seed, vocabulary=choices)
        return matched_width(
            self.design, self.width, depth or self.depth, self.seed + seed, vocabulary=_thin_choices(self.design)
        )

    def siblings(self, n: int) -> Iterator[nn.Module]:
        """So many fresh models that differ in their seed; the subject alone, if it has weights of its own."""
        for seed in range(n if self.design is not None and not self.is_own else 1):
            yield self.fresh(seed)


def measured_model(subject: Any, *, seed: int = 0, width: int | None = None, depth: int | None = None) -> MeasuredModel:
    """What an assessment of a subject runs.

    Args:
        subject: A model or an opened checkpoint, which is measured with its own weights; or anything that
            `workbench.design` takes, which is built with fresh ones: whole, if that is small, otherwise thin.
        seed: Of fresh weights.
        width: Target width; None: the subject's own.
        depth: Target depth; likewise.

    Raises:
        OptionError: If nothing can be built from the subject, or not at this size.
        CheckpointError: If there is no such name or file.
    """
    if isinstance(subject, nn.Module | Subject):
        module = subject.model if isinstance(subject, Subject) else subject
        try:
            found = design(subject, width=width, depth=depth)
        except WorkbenchError:  # a module of one's own, which says nothing of other sizes
            found = None
        name = subject.name if isinstance(subject, Subject) else type(module).__name__
        own = None if found is None else design(subject)
        if own is None:
            return MeasuredModel(name, module, found, True, None, None, seed)
        return MeasuredModel(name, module, found, True, own.width, own.depth, seed)
    found = design(subject, width=width, depth=depth)
    if found.n_weights() <= MOST_WEIGHTS:
        model = found.build(seed=seed, vocabulary=Digits.n_classes if found.n_classes else None)
        return MeasuredModel(found.name, model, found, False, found.width, found.depth, seed)
    thin = found.nearest_width(min(THIN_WIDTH, found.width))
    blocks = min(THIN_DEPTH, found.depth)
    model = found.build(thin, blocks, seed, vocabulary=_thin_choices(found))
    return MeasuredModel(found.name, model, found, False, thin, blocks, seed)


def planned_task(model: nn.Module, plan: AssessmentPlan, *, seed: int) -> Task:
    """The task of a plan as an assessment measures on it: short sequences and few rows, for the start of training.

    Args:
        model: That has to read it.
        plan: Says the task; its batch and length are not those that are measured on.
        seed: Added to the plan's.

    Raises:
        OptionError: If there is no task for what the model reads, or the task does not fit it.
    """
    sizes = model_sizes(model)
    if getattr(unwrap(model), "main_input_name", None) == "pixel_values":
        sizes = replace(sizes, vocabulary=None)  # of visual tokens, which some models of images predict
    if plan.task.name is None:
        _require_readable(model, sizes)
    longest: int | None = min(sizes.max_length or LENGTH, LENGTH_OF_SCANS if _scans(model) else LENGTH)
    if "length" in plan.task.options:  # said for the task itself: it is the user's choice what that costs
        longest = sizes.max_length
    task = plan.make_task(
        sizes.vocabulary,
        max_length=longest,
        image_size=sizes.image_size,
        n_channels=sizes.n_channels,
        seed=plan.training.seed + seed,
        n_rows=_n_rows(model, sizes),
    )
    require_loss(model, task)
    return task


def require_loss(model: nn.Module, task: Task) -> None:
    """Try a task on a model: two rows of the first batch, forward.

    Raises:
        OptionError: If the model does not run on them, returns no logits, or its logits do not fit the targets.
    """
    name, task_name = type(unwrap(model)).__name__, task.describe().get("task", "the task")
    inputs, targets = (on_device_of(model, take_rows(part, slice(0, 2))) for part in next(iter(task.stream(0))))
    try:
        with undisturbed(model):
            output = call_model(model, inputs)
    except WorkbenchError:
        raise
    except Exception as error:  # of whatever kind: nothing is known of the model's code
        raise OptionError(
            f"{name} does not run on batches of {task_name} ({cause_of(error)}); pass task= with batches that it reads."
        ) from error
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise OptionError(f"{name} returns no logits, so it has no loss; pass the model with its head.")
    n_choices = logits.shape[-1] if logits.ndim else 0
    if logits.shape[:-1].numel() != targets.numel() or int(targets.max()) >= n_choices:
        raise OptionError(
            f"{name} returns logits of shape {tuple(logits.shape)} for targets of shape {tuple(targets.shape)} below "
            f"{int(targets.max()) + 1} in {task_name}, expected logits for each target; pass task= with what the model "
            "predicts, or the model with another head."
        )
    token_loss(logits, targets)


def _require_readable(model: nn.Module, sizes: ModelSizes) -> None:
    """Refuse a model for whose inputs there is no task of its own."""
    reads = getattr(unwrap(model), "main_input_name", None)
    name = type(unwrap(model)).__name__
    if reads == "pixel_values":
        side = Digits.image_size
        if sizes.image_size is None or sizes.image_size % side or sizes.n_channels is None:
            raise OptionError(
                f"{name} reads images of {sizes.image_size or 'unknown'} pixels and {sizes.n_channels or 'unknown'} "
                f"channels, expected a square with a side that is a multiple of {side}; pass task= with batches of "
                "images and their classes."
            )
    elif reads not in (None, "input_ids"):
        raise OptionError(
            f"{name} reads {reads}, for which there is no task, expected token ids or images; pass task= with batches "
            "of what it reads."
        )


def _n_rows(model: nn.Module, sizes: ModelSizes) -> int:
    """Rows that have as many token states in all as the recorded runs had."""
    if getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False):
        return N_ROWS // 2  # encoder and decoder read each
    if sizes.vocabulary is not None or not sizes.image_size or not sizes.patch_size:
        return N_ROWS
    n_patches = max(1, sizes.image_size // sizes.patch_size) ** 2
    return min(N_ROWS, max(_FEWEST_IMAGES, LENGTH * N_ROWS // n_patches))


def _scans(model: nn.Module) -> bool:
    return any(hasattr(part, "ssm_state_size") or _SCANS.search(type(part).__name__) for part in model.modules())


def _thin_choices(whole: Design) -> int | None:
    """Tokens of a thin model, or classes of images."""
    if whole.n_classes:
        return Digits.n_classes
    return None if whole.vocabulary is None else min(THIN_VOCABULARY, whole.vocabulary)
