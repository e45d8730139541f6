"""Make from the user's subject a model small enough to measure, and the design that it represents."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import OptionError, WorkbenchError
from workbench.models.batches import take_rows
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.model_sizes import ModelSizes, model_sizes
from workbench.models.probing import undisturbed
from workbench.models.subject import Subject
from workbench.models.wrapping import unwrap
from workbench.scaling.designs import Design, design, transformers_config
from workbench.scaling.transformers_source import built_whole, cause_of
from workbench.scaling.width_matching import matched_width
from workbench.tasks import Digits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from workbench.hardware import AssessmentPlan
    from workbench.tasks import Task

#: A design is measured at full size up to this number of parameters; larger ones as a thin model.
MOST_WEIGHTS = 4_000_000
#: A configuration of stages or of several parts, which cannot be built thin, is measured at full size up to this.
MOST_OF_STAGES = 100_000_000
#: Width and vocabulary of a thin model, and the most blocks of the one that trains on trial.
THIN_WIDTH, THIN_VOCABULARY, THIN_DEPTH = 64, 256, 4
#: Batches of an assessment: tokens of a sequence and number of examples, as in the recorded runs.
LENGTH, N_ROWS = 64, 16
#: Tokens of a sequence for models that scan it token by token, as transformers' state-space layers do without their own
#: kernels: the time of a backward pass through such a scan is quadratic in the length.
LENGTH_OF_SCANS = 16
#: Images for a model whose configuration does not say their size.
IMAGE_SIZE, N_CHANNELS = 32, 3
#: Modules that scan, by their names in transformers; others have an attribute with the size of their state.
_SCANS = re.compile(r"Rwkv\w*Attention|RgLru|Rglru|DeltaNet|DeltaAttention|[mx]LSTM")
#: Smallest number of patches along a side of the images of a stand-in.
_FEWEST_PATCHES = 4
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
        n_design_weights: Number of parameters of the design at its own size, with its own images.
    """

    name: str
    model: nn.Module
    design: Design | None
    is_own: bool
    width: int | None
    depth: int | None
    seed: int
    n_design_weights: int = 0

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
        return self.n_design_weights or self.design.n_weights()

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

    def siblings(self, n: int, depth: int | None = None) -> Iterator[nn.Module]:
        """Fresh models that differ in their seed; only the subject, if it has its own parameters."""
        for seed in range(n if self.design is not None and not self.is_own else 1):
            yield self.fresh(seed, depth)


def measured_model(subject: Any, *, seed: int = 0, width: int | None = None, depth: int | None = None) -> MeasuredModel:
    """Make the model that an assessment of a subject runs.

    Args:
        subject: A model or an opened checkpoint, which is measured with its own parameters; or any source that
            `workbench.design` takes, which is built with fresh ones: at full size if that is small, otherwise thin; or
            a small configuration of transformers of blocks of several widths, or of several parts.
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
            own = design(subject)
        except WorkbenchError:  # a custom module, which cannot be built at other sizes
            own = None
        name = subject.name if isinstance(subject, Subject) else type(module).__name__
        if own is None:
            return MeasuredModel(name, module, None, True, None, None, seed)
        return MeasuredModel(name, module, _at_target(own, width, depth), True, own.width, own.depth, seed)
    if not callable(subject):
        try:
            own = design(subject)
        except OptionError:
            config = None if width or depth else transformers_config(subject)
            model = None if config is None else built_whole(config, seed=seed, most_weights=MOST_OF_STAGES)
            if config is None or model is None:
                raise
            return MeasuredModel(config.model_type, model, None, False, None, None, seed)
        found = _at_target(own, width, depth)
    elif width is None or depth is None:
        raise OptionError("A function has no size of its own; add [target] with width and depth to the plan.")
    else:
        found = design(subject, width=width, depth=depth)
    if found.n_weights() <= MOST_WEIGHTS:
        model = found.build(seed=seed, vocabulary=Digits.n_classes if found.n_classes else None)
        return MeasuredModel(found.name, model, found, False, found.width, found.depth, seed)
    n_weights, found = found.n_weights(), with_few_patches(found)
    thin = found.nearest_width(min(THIN_WIDTH, found.width))
    blocks = min(THIN_DEPTH, found.depth)
    model = found.build(thin, blocks, seed, vocabulary=_thin_choices(found))
    return MeasuredModel(found.name, model, found, False, thin, blocks, seed, n_weights)


def _at_target(found: Design, width: int | None, depth: int | None) -> Design:
    """The design at the target size of a plan, whose section an error names."""
    try:
        return found.resized(width, depth)
    except OptionError as error:
        raise OptionError(f"[target] {error}") from error


def with_few_patches(found: Design) -> Design:
    """A design that reads large images, for smaller ones: the number of patches hardly matters, but takes the time."""
    sizes = model_sizes(found)
    if not (found.n_classes and sizes.image_size and sizes.patch_size):
        return found
    side = math.lcm(sizes.patch_size * _FEWEST_PATCHES, Digits.image_size)
    if side >= sizes.image_size:
        return found
    return Design(found.name, found.source.with_images(side), found.width, found.depth)


def planned_task(
    model: nn.Module, plan: AssessmentPlan, *, seed: int, loss: Callable[[Tensor, Tensor], Tensor] = token_loss
) -> Task:
    """The task of a plan in the form of an assessment: short sequences and small batches, for the start of training.

    Args:
        model: The model that has to read it.
        plan: Plan with the task; its batch size and length are not used.
        seed: Added to the plan's.
        loss: Function of logits and targets.

    Raises:
        OptionError: If there is no task for what the model reads, or the task does not fit it.
    """
    sizes = model_sizes(model)
    n_classes = None
    if getattr(unwrap(model), "main_input_name", None) == "pixel_values":
        # A vocabulary counts visual tokens, which some image models predict; others read images of any size.
        side, n_channels = sizes.image_size or IMAGE_SIZE, sizes.n_channels or N_CHANNELS
        sizes = replace(sizes, vocabulary=None, image_size=side, n_channels=n_channels)
        n_classes = getattr(getattr(unwrap(model), "config", None), "num_labels", None)
        n_classes = n_classes if n_classes and 1 < n_classes < Digits.n_classes else None
    if plan.task.name is None:
        _require_readable(model, sizes)
    longest: int | None = min(sizes.max_length or LENGTH, LENGTH_OF_SCANS if _scans(model) else LENGTH)
    if "length" in plan.task.options:  # an option of the task itself: its cost is the user's choice
        longest = sizes.max_length

    def make(length: int | None) -> Task:
        task = plan.make_task(
            sizes.vocabulary,
            max_length=length,
            image_size=sizes.image_size,
            n_channels=sizes.n_channels,
            n_classes=n_classes,
            seed=plan.training.seed + seed,
            n_rows=_n_rows(model, sizes),
        )
        try:
            require_loss(model, task, loss)
        except OptionError as error:
            raise error if plan.task.name is None else OptionError(f"[task] {error}") from error
        return task

    try:
        return make(longest)
    except OptionError:
        if longest is None or longest != sizes.max_length or longest < 2 or "length" in plan.task.options:
            raise
        with suppress(OptionError):  # some models count the positions from that of padding on, and read fewer tokens
            return make(longest // 2)
        raise


def require_loss(model: nn.Module, task: Task, loss: Callable[[Tensor, Tensor], Tensor] = token_loss) -> None:
    """Check that a model runs on a task: a forward pass on two examples of the first batch.

    Raises:
        OptionError: If the model does not run on them, or the loss cannot be computed from its output and the targets.
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
    found = prediction_of(output)
    if loss is not token_loss:
        _require_number(loss, found, targets, f"{name} in {task_name}")
        return
    if not isinstance(found, torch.Tensor):
        raise OptionError(
            f"{name} returns {_named(found)} without logits, so its loss is not known; pass loss= with a function of "
            "this output and the targets, or the model with its head."
        )
    n_choices = found.shape[-1] if found.ndim else 0
    are_classes = not targets.is_floating_point()
    if not are_classes or found.shape[:-1].numel() != targets.numel() or int(targets.max()) >= n_choices:
        below = f" below {int(targets.max()) + 1}" if are_classes else ""
        raise OptionError(
            f"{name} returns logits of shape {tuple(found.shape)} for targets of shape {tuple(targets.shape)}{below} "
            f"in {task_name}, expected logits for each target; pass task= with what the model predicts, the model with "
            "another head, or loss= with a function of its output and the targets."
        )
    token_loss(found, targets)


def _require_number(loss: Callable[[Tensor, Tensor], Tensor], found: Any, targets: Tensor, what: str) -> None:
    """Check that a loss is a single number."""
    try:
        value = loss(found, targets)
    except Exception as error:  # of any kind, as any code may compute it
        raise OptionError(
            f"loss= fails on the output of {what} ({cause_of(error)}); expected a function of {_named(found)} and "
            f"targets of shape {tuple(targets.shape)}."
        ) from error
    if not isinstance(value, torch.Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        raise OptionError(f"loss= returned {got} for {what}, expected a 0-dim tensor; return the mean.")


def _named(found: Any) -> str:
    """What a model returned, in words."""
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return f"{'an' if type(found).__name__[0] in 'AEIOUaeiou' else 'a'} {type(found).__name__}"


def _require_readable(model: nn.Module, sizes: ModelSizes) -> None:
    """Refuse a model whose inputs no default task provides."""
    reads = getattr(unwrap(model), "main_input_name", None)
    name = type(unwrap(model)).__name__
    if reads == "pixel_values":
        side = Digits.image_size
        if sizes.image_size is not None and sizes.image_size % side:
            raise OptionError(
                f"{name} reads images of {sizes.image_size} pixels and {sizes.n_channels} channels, expected a square "
                f"with a side that is a multiple of {side}; pass task= with batches of images and their classes."
            )
    elif reads not in (None, "input_ids", "inputs"):  # the latter are either; a trial says
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
