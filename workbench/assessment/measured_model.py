"""Build a model of the user's subject that is small enough to measure, together with the design it represents."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import OptionError, WorkbenchError
from workbench.hardware.plan import AssessmentPlan
from workbench.models.batches import take_examples
from workbench.models.calling import call_model, on_device_of, unwrap
from workbench.models.losses import prediction_of, token_loss
from workbench.models.model_sizes import ModelSizes, model_sizes
from workbench.models.probing import undisturbed
from workbench.models.subject import Subject
from workbench.scaling.designs import Design, design, matched_width, transformers_config
from workbench.scaling.transformers_source import build_full_size, cause_of
from workbench.tasks import Task
from workbench.tasks.images import Digits

#: Designs with at most this number of parameters are measured at full size, larger ones as a proxy model.
MAX_PARAMETERS = 4_000_000
#: Configurations with several stages or parts cannot be built at a smaller width; they are measured at full size up to
#: this number of parameters.
MAX_PARAMETERS_OF_STAGES = 100_000_000
#: Width and vocabulary of a proxy model, and the maximum number of blocks of a proxy model for pilot and trials.
PROXY_WIDTH, PROXY_VOCABULARY, PROXY_DEPTH = 64, 256, 4
#: Length of a sequence and number of examples in the batches of an assessment, as in the recorded runs.
LENGTH, N_EXAMPLES = 64, 16
#: Length of a sequence for models that scan it token by token, as state-space layers of transformers do without fused
#: kernels: the time of a backward pass through such a scan is quadratic in the length.
LENGTH_OF_SCANS = 16
#: Side and channels of images for a model whose configuration does not state them.
IMAGE_SIZE, N_CHANNELS = 32, 3
#: Class names in transformers of modules that scan; others have an attribute with the size of their state.
_SCANS = re.compile(r"Rwkv\w*Attention|RgLru|Rglru|DeltaNet|DeltaAttention|[mx]LSTM")
#: Smallest number of patches along a side of the images of a proxy model.
_FEWEST_PATCHES = 4
#: Smallest number of images in a batch; otherwise a batch has as many patches as a batch of sequences has tokens.
_FEWEST_IMAGES = 4


@dataclass(frozen=True)
class MeasuredModel:
    """The model that an assessment runs, and the subject that it represents.

    ``design`` is None if the subject has no other size, ``is_own`` whether the parameters are its own, ``seed`` that of
    parameters drawn here, and ``n_design_weights`` the number of parameters of the design at its own size.
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
        """Number of blocks of the subject."""
        return None if self.design is None else self.design.depth

    @property
    def is_target_size(self) -> bool:
        """Whether the measured model is as large as the subject."""
        return self.is_own or (self.width, self.depth) == (self.target_width, self.target_depth)

    @property
    def n_weights(self) -> int:
        """Number of parameters of the subject; for an image model with the number of classes of the trials."""
        if self.is_own or self.design is None or (self.is_target_size and self.design.n_classes):
            return sum(weight.numel() for weight in self.model.parameters())
        return self.n_design_weights or self.design.n_weights()

    def fresh(self, seed: int = 0, depth: int | None = None) -> nn.Module:
        """Return a model at initialization whose signal and gradient gains are those of the target width.

        It is the subject itself where possible, otherwise a narrow model with matched variances
        (`workbench.scaling.matched_width`).
        """
        if self.is_own or self.design is None or (self.is_target_size and not seed and depth is None):
            return self.model
        assert self.width is not None  # because its design is known
        if self.is_target_size:
            choices = Digits.n_classes if self.design.n_classes else None
            return self.design.build(self.width, depth or self.depth, self.seed + seed, vocabulary=choices)
        return matched_width(
            self.design, self.width, depth or self.depth, self.seed + seed, vocabulary=_n_proxy_choices(self.design)
        )

    def siblings(self, n: int, depth: int | None = None) -> Iterator[nn.Module]:
        """Yield ``n`` models at initialization with different seeds; only the subject if it has its own parameters."""
        for seed in range(n if self.design is not None and not self.is_own else 1):
            yield self.fresh(seed, depth)


def measured_model(subject: Any, *, seed: int = 0, width: int | None = None, depth: int | None = None) -> MeasuredModel:
    """Return the model that an assessment of a subject runs."""
    if isinstance(subject, nn.Module | Subject):
        module = subject.model if isinstance(subject, Subject) else subject
        try:
            own = design(subject)
        except WorkbenchError:  # a custom module cannot be built at other sizes
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
            model = (
                None if config is None else build_full_size(config, seed=seed, max_parameters=MAX_PARAMETERS_OF_STAGES)
            )
            if config is None or model is None:
                raise
            return MeasuredModel(config.model_type, model, None, False, None, None, seed)
        found = _at_target(own, width, depth)
    elif width is None or depth is None:
        raise OptionError("The size of a design given as a function is unknown; add [target] with both to the plan.")
    else:
        found = design(subject, width=width, depth=depth)
    if found.n_weights() <= MAX_PARAMETERS:
        model = found.build(seed=seed, vocabulary=Digits.n_classes if found.n_classes else None)
        return MeasuredModel(found.name, model, found, False, found.width, found.depth, seed)
    n_weights, found = found.n_weights(), with_few_patches(found)
    proxy_width = found.nearest_width(min(PROXY_WIDTH, found.width))
    blocks = min(PROXY_DEPTH, found.depth)
    model = found.build(proxy_width, blocks, seed, vocabulary=_n_proxy_choices(found))
    return MeasuredModel(found.name, model, found, False, proxy_width, blocks, seed, n_weights)


def _at_target(found: Design, width: int | None, depth: int | None) -> Design:
    """Return the design at the target size of a plan; an error names the section of the plan."""
    try:
        return found.resized(width, depth)
    except OptionError as error:
        raise error.within("[target]") from error


def with_few_patches(found: Design) -> Design:
    """Return an image design for smaller images, because many patches cost time but hardly affect the result."""
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
    """Return the task of a plan with the short sequences and small batches of an assessment."""
    sizes = model_sizes(model)
    n_classes = None
    if getattr(unwrap(model), "main_input_name", None) == "pixel_values":
        # The vocabulary of some image models counts the visual tokens that they predict; others read any image size.
        side, n_channels = sizes.image_size or IMAGE_SIZE, sizes.n_channels or N_CHANNELS
        sizes = replace(sizes, vocabulary=None, image_size=side, n_channels=n_channels)
        n_classes = getattr(getattr(unwrap(model), "config", None), "num_labels", None)
        n_classes = n_classes if n_classes and 1 < n_classes < Digits.n_classes else None
    if plan.task.name is None:
        _require_readable(model, sizes)
    scans = any(hasattr(part, "ssm_state_size") or _SCANS.search(type(part).__name__) for part in model.modules())
    longest: int | None = min(sizes.max_length or LENGTH, LENGTH_OF_SCANS if scans else LENGTH)
    if "length" in plan.task.options:  # the user chose the length, and so its cost
        longest = sizes.max_length

    def task_of(length: int | None) -> Task:
        task = plan.make_task(
            sizes.vocabulary,
            max_length=length,
            image_size=sizes.image_size,
            n_channels=sizes.n_channels,
            n_classes=n_classes,
            seed=plan.training.seed + seed,
            n_rows=_n_examples(model, sizes),
        )
        try:
            require_loss(model, task, loss)
        except OptionError as error:
            raise error if plan.task.name is None else error.within("[task]") from error
        return task

    try:
        return task_of(longest)
    except OptionError:
        if longest is None or longest != sizes.max_length or longest < 2 or "length" in plan.task.options:
            raise
        # Some models number the positions from that of the padding token on, so they read fewer tokens.
        with suppress(OptionError):
            return task_of(longest // 2)
        raise


def require_loss(model: nn.Module, task: Task, loss: Callable[[Tensor, Tensor], Tensor] = token_loss) -> None:
    """Check with two examples of the first batch that a model runs on a task and that its loss can be computed."""
    name, task_name = type(unwrap(model)).__name__, task.describe().get("task", "the task")
    inputs, targets = (on_device_of(model, take_examples(part, slice(0, 2))) for part in next(iter(task.stream(0))))
    try:
        with undisturbed(model):
            output = call_model(model, inputs)
    except WorkbenchError:
        raise
    except Exception as error:  # the code of the model is unknown
        raise OptionError(
            f"{name} does not run on batches of {task_name} ({cause_of(error)}); pass task= with batches that it reads."
        ) from error
    found = prediction_of(output)
    if loss is not token_loss:
        try:
            value = loss(found, targets)
        except Exception as error:  # the code of the loss is unknown
            raise OptionError(
                f"loss= fails on the output of {name} in {task_name} ({cause_of(error)}); expected a function of "
                f"{_described(found)} and targets of shape {tuple(targets.shape)}."
            ) from error
        if not isinstance(value, torch.Tensor) or value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise OptionError(f"loss= returned {got} for {name} in {task_name}, expected a scalar; return the mean.")
        return
    if not isinstance(found, torch.Tensor):
        raise OptionError(
            f"{name} returns {_described(found)} without logits, so its loss is unknown; pass loss= with a function of "
            "this output and the targets, or the model with its head."
        )
    n_choices = found.shape[-1] if found.ndim else 0
    are_classes = not targets.is_floating_point()
    if not are_classes or found.shape[:-1].numel() != targets.numel() or int(targets.max()) >= n_choices:
        below = f" below {int(targets.max()) + 1}" if are_classes else ""
        raise OptionError(
            f"{name} returns logits of shape {tuple(found.shape)} for targets of shape {tuple(targets.shape)}{below} "
            f"in {task_name}, expected logits for each target; pass task= with targets that the model predicts, the "
            "model with another head, or loss= with a function of its output and the targets."
        )
    token_loss(found, targets)


def _described(found: Any) -> str:
    """Describe the output of a model."""
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return f"{'an' if type(found).__name__[0] in 'AEIOUaeiou' else 'a'} {type(found).__name__}"


def _require_readable(model: nn.Module, sizes: ModelSizes) -> None:
    """Raise an error if no default task provides the inputs of the model."""
    reads = getattr(unwrap(model), "main_input_name", None)
    name = type(unwrap(model)).__name__
    if reads == "pixel_values":
        side = Digits.image_size
        if sizes.image_size is not None and sizes.image_size % side:
            raise OptionError(
                f"{name} reads images of {sizes.image_size} pixels and {sizes.n_channels} channels, expected a square "
                f"with a side that is a multiple of {side}; pass task= with batches of images and their classes."
            )
    elif reads not in (None, "input_ids", "inputs"):  # "inputs" may be token ids; the forward pass decides
        raise OptionError(
            f"{name} reads {reads}, for which there is no default task, expected token ids or images; pass task= with "
            "batches of these inputs."
        )


def _n_examples(model: nn.Module, sizes: ModelSizes) -> int:
    """Return the number of examples that have as many token states in total as a batch of the recorded runs."""
    if getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False):
        return N_EXAMPLES // 2  # encoder and decoder each read sequences
    if sizes.vocabulary is not None or not sizes.image_size or not sizes.patch_size:
        return N_EXAMPLES
    n_patches = max(1, sizes.image_size // sizes.patch_size) ** 2
    return min(N_EXAMPLES, max(_FEWEST_IMAGES, LENGTH * N_EXAMPLES // n_patches))


def _n_proxy_choices(full: Design) -> int | None:
    """Return the vocabulary of a proxy model, or the number of classes of an image model."""
    if full.n_classes:
        return Digits.n_classes
    return None if full.vocabulary is None else min(PROXY_VOCABULARY, full.vocabulary)


def flops_per_token(measured: MeasuredModel, plan: AssessmentPlan) -> float:
    """Return the compute cost of one token, forward and backward, in floating-point operations.

    The usual count: 6 operations for each parameter that a token uses, and 12 x blocks x width x length for the
    attention scores (PaLM, arXiv:2204.02311, Appendix B). Only those experts are counted to which a token is routed.
    """
    sizes, model = model_sizes(measured.design or measured.model), measured.model
    n_weights, config = measured.n_weights, getattr(model, "config", None)
    top_k = next((getattr(config, n) for n in ("top_k", "num_experts_per_tok") if getattr(config, n, None)), None)
    if sizes.n_experts and top_k:  # the fraction of expert parameters is that of the measured model
        n_of_experts = sum(
            weight.numel()
            for name, weight in model.named_parameters()
            if "expert" in name and weight.numel() >= sizes.n_experts
        )
        n_all = sum(weight.numel() for weight in model.parameters())
        n_weights -= int(measured.n_weights * n_of_experts / n_all * (1 - top_k / sizes.n_experts))
    length = plan.training.sequence_length or 0
    scores = 12 * (sizes.depth or 0) * (sizes.width or 0) * length if sizes.n_heads else 0
    return float(6 * n_weights + scores)


def steps_in_budget(plan: AssessmentPlan, flops: float) -> float:
    """Return the number of updates within the budget of a plan; NaN if it sets no budget."""
    length = plan.training.sequence_length
    if length is None or (plan.budget.tokens is None and plan.budget.flops is None):
        return math.nan
    tokens = plan.batch_size * length
    of_tokens = math.inf if plan.budget.tokens is None else plan.budget.tokens / tokens
    of_flops = math.inf if plan.budget.flops is None else plan.budget.flops / (flops * tokens)
    return float(math.floor(min(of_tokens, of_flops)))
