"""Make from the user's subject a model small enough to measure, and the design that it represents."""

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

#: A design is measured at full size up to this number of parameters; larger ones as a thin model.
MOST_WEIGHTS = 4_000_000
#: Width and vocabulary of a thin model, and the most blocks of the one that trains on trial.
THIN_WIDTH, THIN_VOCABULARY, THIN_DEPTH = 64, 256, 4
#: Batches of an assessment: tokens of a sequence and number of examples, as in the recorded runs.
LENGTH, N_ROWS = 64, 16
#: Tokens of a sequence for models that scan it token by token, as transformers' state-space layers do without their own
#: kernels: the time of a backward pass through such a scan is quadratic in the length.
LENGTH_OF_SCANS = 16
#: Modules that scan, by their names in transformers; others have an attribute with the size of their state.
_SCANS = re.compile(r"Rwkv\w*Attention|RgLru|Rglru|DeltaNet|DeltaAttention|[mx]LSTM")
#: Smallest number of images in a batch, which otherwise has as many patches as a batch of sequences has tokens.
_FEWEST_IMAGES = 4


@dataclass(frozen=True)
class MeasuredModel:
    """The model that an assessment runs, and the subject that it represents.

    Attributes:
        name: Name of the subject.
        model: The model that is trained on trial: the subject itself, or a model of the same design.
        design: The design of the subject; None: it cannot be built at another size.
        is_own: Whether ``model`` has the subject's own parameters.
        width, depth: Those of ``model``; None for a model whose design is not known.
        seed: Seed of the parameters of ``model``, where it was built here.
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
        """Whether the measured model is as large as the subject."""
        return self.is_own or (self.width, self.depth) == (self.target_width, self.target_depth)

    @property
    def n_weights(self) -> int:
        """Number of parameters of the subject; for images with the number of classes of the trials."""
        if self.is_own or self.design is None or (self.is_target_size and self.design.n_classes):
            return sum(weight.numel() for weight in self.model.parameters())
        return self.design.n_weights()

    def fresh(self, seed: int = 0, depth: int | None = None) -> nn.Module:
        """A model to measure before training, whose gains are those of the target's width.

        The subject itself, if it has its own parameters or no known design; ``model``, or another seed of it, if that
        is as large as the subject; otherwise thin with matched variances, see `workbench.scaling.width_matching`.

        Args:
            seed: Added to the seed of ``model``.
            depth: Number of blocks; None: that of ``model``.
        """
        if self.is_own or self.design is None or (self.is_target_size and not seed and depth is None):
            return self.model
        assert self.width is not None  # because its design is known
        if self.is_target_size:
            choices = Digits.n_classes if self.design.n_classes else None
            return self.design.build(self.width, depth or self.depth, self.seed + seed, vocabulary=choices)
        return matched_width(
            self.design, self.width, depth or self.depth, self.seed + seed, vocabulary=_thin_choices(self.design)
        )

    def siblings(self, n: int) -> Iterator[nn.Module]:
        """Fresh models that differ in their seed; only the subject, if it has its own parameters."""
        for seed in range(n if self.design is not None and not self.is_own else 1):
            yield self.fresh(seed)


def measured_model(subject: Any, *, seed: int = 0, width: int | None = None, depth: int | None = None) -> MeasuredModel:
    """Make the model that an assessment of a subject runs.

    Args:
        subject: A model or an opened checkpoint, which is measured with its own parameters; or any source that
            `workbench.design` takes, which is built with fresh ones: at full size if that is small, otherwise thin.
        seed: Seed of fresh parameters.
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
        except WorkbenchError:  # a custom module, which cannot be built at other sizes
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
    """The task of a plan in the form of an assessment: short sequences and small batches, for the start of training.

    Args:
        model: The model that has to read it.
        plan: Plan with the task; its batch size and length are not used.
        seed: Added to the plan's.

    Raises:
        OptionError: If there is no task for what the model reads, or the task does not fit it.
    """
    sizes = model_sizes(model)
    if getattr(unwrap(model), "main_input_name", None) == "pixel_values":
        sizes = replace(sizes, vocabulary=None)  # it counts visual tokens, which some image models predict
    if plan.task.name is None:
        _require_readable(model, sizes)
    longest: int | None = min(sizes.max_length or LENGTH, LENGTH_OF_SCANS if _scans(model) else LENGTH)
    if "length" in plan.task.options:  # an option of the task itself: its cost is the user's choice
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
    """Check that a model runs on a task: a forward pass on two examples of the first batch.

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
    except Exception as error:  # of any kind, as the model's code is unknown
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
    """Refuse a model whose inputs no default task provides."""
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
    """Number of examples with as many token states in total as in the recorded runs."""
    if getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False):
        return N_ROWS // 2  # encoder and decoder read sequences each
    if sizes.vocabulary is not None or not sizes.image_size or not sizes.patch_size:
        return N_ROWS
    n_patches = max(1, sizes.image_size // sizes.patch_size) ** 2
    return min(N_ROWS, max(_FEWEST_IMAGES, LENGTH * N_ROWS // n_patches))


def _scans(model: nn.Module) -> bool:
    return any(hasattr(part, "ssm_state_size") or _SCANS.search(type(part).__name__) for part in model.modules())


def _thin_choices(whole: Design) -> int | None:
    """Vocabulary of a thin model, or number of classes of images."""
    if whole.n_classes:
        return Digits.n_classes
    return None if whole.vocabulary is None else min(THIN_VOCABULARY, whole.vocabulary)
