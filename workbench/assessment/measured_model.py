"""From what a user has at hand to a model small enough to measure, and the design that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.errors import WorkbenchError
from workbench.hardware.sizes import model_sizes
from workbench.scaling.design import Design, design
from workbench.scaling.matched_width import matched_width
from workbench.subjects.checkpoint import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workbench.hardware import AssessmentPlan
    from workbench.training.tasks import Task

#: A design is measured at full size up to so many weights; larger ones as a thin model.
MOST_WEIGHTS = 4_000_000
#: Width and vocabulary of a thin model, and the most blocks of the one that trains on trial.
THIN_WIDTH, THIN_VOCABULARY, THIN_DEPTH = 64, 256, 4
#: Batches that an assessment measures on: tokens of a sequence and rows, as many as the recorded runs had.
LENGTH, N_ROWS = 64, 16
#: Tokens of a sequence for what scans it token by token, as transformers' state-space layers do without their own
#: kernels: a backward pass through such a scan takes time by the square of the length.
LENGTH_OF_SCANS = 32


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
        """Of the subject."""
        if self.is_own or self.design is None:
            return sum(weight.numel() for weight in self.model.parameters())
        return self.design.n_weights()

    def fresh(self, seed: int = 0, depth: int | None = None) -> nn.Module:
        """A model to look at before training, whose signals are those of the target's width.

        The subject itself, if it has weights of its own or no known design; ``model``, or another seed of it, if that
        is as large as the subject; otherwise thin with matched variances, see `workbench.scaling.matched_width`.

        Args:
            seed: Added to the seed of ``model``.
            depth: Blocks; None: as many as ``model``.
        """
        if self.is_own or self.design is None or (self.is_target_size and not seed and depth is None):
            return self.model
        if self.is_target_size:
            return self.design.build(self.width, depth or self.depth, self.seed + seed)
        return matched_width(
            self.design, self.width, depth or self.depth, self.seed + seed, vocabulary=_thin_vocabulary(self.design)
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
        ThresholdError: If nothing can be built from the subject, or not at this size.
        CheckpointError: If there is no such name or file.
    """
    if isinstance(subject, nn.Module | Subject):
        module = subject.model if isinstance(subject, Subject) else subject
        try:
            found = design(subject, width=width, depth=depth)
        except WorkbenchError:  # a module of one's own, which says nothing of other sizes
            found = None
        name = subject.name if isinstance(subject, Subject) else type(module).__name__
        size = (None, None) if found is None else (design(subject).width, design(subject).depth)
        return MeasuredModel(name, module, found, True, *size, seed)
    found = design(subject, width=width, depth=depth)
    if found.n_weights() <= MOST_WEIGHTS:
        return MeasuredModel(found.name, found.build(seed=seed), found, False, found.width, found.depth, seed)
    thin = found.nearest_width(min(THIN_WIDTH, found.width))
    blocks = min(THIN_DEPTH, found.depth)
    model = found.build(thin, blocks, seed, vocabulary=_thin_vocabulary(found))
    return MeasuredModel(found.name, model, found, False, thin, blocks, seed)


def planned_task(model: nn.Module, plan: AssessmentPlan, *, seed: int) -> Task:
    """The task of a plan as an assessment measures on it: short sequences and few rows, for the start of training.

    Args:
        model: That has to read it.
        plan: Says the task; its batch and length are not those that are measured on.
        seed: Added to the plan's.

    Raises:
        ThresholdError: If the task does not fit the model.
    """
    sizes = model_sizes(model)
    longest = min(sizes.max_length or LENGTH, LENGTH_OF_SCANS if _scans(model) else LENGTH)
    if "length" in plan.task.options:  # said for the task itself: it is the user's choice what that costs
        longest = sizes.max_length
    return plan.make_task(
        sizes.vocabulary,
        max_length=longest,
        image_size=sizes.image_size,
        seed=plan.training.seed + seed,
        n_rows=N_ROWS,
    )


def _scans(model: nn.Module) -> bool:
    return any(hasattr(module, "ssm_state_size") for module in model.modules())


def _thin_vocabulary(whole: Design) -> int | None:
    return None if whole.vocabulary is None else min(THIN_VOCABULARY, whole.vocabulary)
