"""Penalties on the residual stream that are added to the loss, as baselines for KSS.

The KSS paper (arXiv:2602.22988) names them without defining them, and states a coefficient only for the gradient
penalty, 0.1, which is the default of all. Each is a mean, so that it does not grow with batch size, width or depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.errors import AnatomyError
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import take_examples
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import entrances, has_forward, on_device_of, unwrap
from workbench.models.subject import Subject
from workbench.option_checks import check_fields
from workbench.option_kinds import Fraction, NonNegativeFloat, PositiveInt, one_of
from workbench.training.callback import Callback, TrainingRun

LAYERS = ("half", "all")


@dataclass(frozen=True)
class Stream:
    """The residual stream of one forward pass, with its autograd graph.

    Attributes:
        entering: State entering each block, shape (batch, ..., feature).
        leaving: State leaving each block, of the same shape.
    """

    entering: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.leaving)

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        return self.leaving[0].device


@dataclass(frozen=True)
class Penalty(ABC):
    """Base class of penalties: terms of the loss that depend on the residual stream.

    Attributes:
        coefficient: Weight of the penalty in the loss; 0 disables it.
        interval: Steps between two applications, the first of which is at step 0. The weight does not depend on it.
        is_second_order: Whether the penalty contains gradients, so that training needs second derivatives.

    Example:
        >>> import workbench as wb
        >>> class OutputSize(wb.baselines.Penalty):
        ...     def value(self, stream, task_loss, random):
        ...         return stream.leaving[-1].square().mean()
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=1, penalties=[OutputSize(coefficient=0.1)])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True]

    See Also:
        `workbench.train`: Adds penalties to the loss.
    """

    is_second_order: ClassVar[bool] = False

    coefficient: NonNegativeFloat = 0.1
    interval: PositiveInt = 1

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty without its coefficient.

        Args:
            stream: Residual stream of the forward pass that computed the loss.
            task_loss: Loss of the task, 0-dim, a mean over the batch.
            random: Generator for random draws, on the device of the states.

        Returns:
            A 0-dim tensor, at least 0, differentiable in the parameters.
        """

    def describe(self) -> dict[str, Any]:
        """Return the settings of the penalty as plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class GradientPenalty(Penalty):
    """Squared norm of the gradient of the loss in the state entering the first block, averaged over sequences.

    The paper states the coefficient 0.1 and no definition. Double backpropagation (Drucker and LeCun 1992) and gradient
    regularization (Ross and Doshi-Velez 2018, arXiv:1711.09404) use the gradient in the inputs. Tokens are discrete, so
    the closest analogue is the gradient in their embeddings. It takes one further backward pass through the activations
    of all blocks, as a gradient in the parameters would.

    For a loss that is a mean over B independent sequences, B times the squared norm of the gradient of the batch equals
    the mean of the squared norms of the gradients of the sequences. The first dimension of the state must be the
    batch.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.GradientPenalty(coefficient=0.1, interval=2)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=3, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, False, True]

    See Also:
        `workbench.baselines.JacobianPenalty`: Penalizes the Jacobians of the blocks.
        `workbench.baselines.Penalty`: Describes the arguments.
    """

    is_second_order: ClassVar[bool] = True

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty, see `Penalty.value`; its unit is (unit of the loss / unit of the stream)^2."""
        first = stream.entering[0]
        (gradient,) = torch.autograd.grad(task_loss, first, create_graph=True)
        return len(first) * _wide(gradient).square().sum()


@dataclass(frozen=True)
class LayerwisePenalty(Penalty):
    """A penalty that is a mean over layers.

    Attributes:
        layers: Layers to average over: ``"half"``, drawn in each step as in KSS, or ``"all"``.
    """

    layers: Annotated[str, one_of(LAYERS)] = "half"

    def value(self, stream: Stream, task_loss: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean of `of_layer` over the layers, see `Penalty.value`."""
        n_layers = stream.n_layers
        layers: Sequence[int] = range(n_layers)
        if self.layers == "half":
            drawn = torch.randperm(n_layers, generator=random, device=random.device)[: max(1, n_layers // 2)]
            layers = sorted(drawn.tolist())
        return torch.stack([self.of_layer(stream.entering[i], stream.leaving[i], random) for i in layers]).mean()

    @abstractmethod
    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the penalty of one layer, 0-dim."""


@dataclass(frozen=True)
class RandomL2(LayerwisePenalty):
    """Mean square of the entries of the residual stream, over random layers and tokens; it ignores spectra.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.
        token_share: Fraction of the tokens that are drawn in each layer, in (0, 1]; at least one is drawn.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.RandomL2(coefficient=0.1, token_share=0.25)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.ActivationVariance`: Does not penalize the mean.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    token_share: Fraction = 0.5

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean square of the entries of the state leaving the block."""
        states = leaving.flatten(0, -2)
        if self.token_share < 1:
            n_drawn = max(1, round(self.token_share * len(states)))
            states = states[torch.randperm(len(states), generator=random, device=random.device)[:n_drawn]]
        return _wide(states).square().mean()


@dataclass(frozen=True)
class JacobianPenalty(LayerwisePenalty):
    """Mean squared singular value of the Jacobian of each block, |J|_F^2 / n.

    J = dy/dx is the Jacobian of the entire block, between all tokens of a sequence, where x is the state entering the
    block and y, with n entries, the state leaving it. The penalty is 1 for the identity. The squared norm of J is
    estimated without bias as |J^T v|^2 with random signs v (Hutchinson 1990; used by Hoffman et al. 2019,
    arXiv:1908.02729, for the Jacobian of the logits). Each draw takes a backward pass through the activations of the
    block.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.
        n_projections: Number of draws of v.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.JacobianPenalty(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.GradientPenalty`: Penalizes the gradient of the loss.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    is_second_order: ClassVar[bool] = True

    n_projections: PositiveInt = 1

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the estimate of |J|_F^2 / n, unit 1."""
        squares = []
        for _ in range(self.n_projections):
            bits = torch.randint(2, leaving.shape, generator=random, device=random.device)
            squares.append(pulled_back_square(entering, leaving, (2 * bits - 1).to(leaving.dtype)))
        return torch.stack(squares).mean() / leaving.numel()


@dataclass(frozen=True)
class ActivationVariance(LayerwisePenalty):
    """Variance of each feature of the residual stream over the tokens of the batch, averaged over features.

    Littwin and Wolf (2018, arXiv:1811.09764) also regularize by the variance of activations. Unlike `RandomL2`, this
    penalty does not act on the mean.

    Attributes:
        layers: ``"half"``, drawn in each step, or ``"all"``.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> penalty = wb.baselines.ActivationVariance(coefficient=0.1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, penalties=[penalty])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, True]

    See Also:
        `workbench.baselines.RandomL2`: Penalizes the mean, too.
        `workbench.baselines.Penalty`: Describes the other arguments.
    """

    def of_layer(self, entering: Tensor, leaving: Tensor, random: torch.Generator) -> Tensor:
        """Return the mean variance (over n, not n - 1) of the features of the state leaving the block."""
        return _wide(leaving.flatten(0, -2)).var(dim=0, correction=0).mean()


def pulled_back_square(entering: Tensor, leaving: Tensor, direction: Tensor) -> Tensor:
    """Return |J^T v|^2 of a block with the Jacobian J = dy/dx, 0-dim, differentiable in the parameters."""
    (pulled,) = torch.autograd.grad(leaving, entering, direction, create_graph=True)
    return _wide(pulled).square().sum()


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in at least float32, as squares in half precision overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class PenaltyTerms(Callback):
    """The penalties of a run as a callback; in a custom loop they are added to the loss as in the example.

    The random draws of a penalty depend only on the seed and the step. A pass that is repeated within a step (SAM,
    LBFGS) therefore has the same penalty, and the global random states are not changed.
    """

    name = "penalties"

    def __init__(
        self,
        penalties: Sequence[Penalty],
        *,
        model: Subject | nn.Module | None = None,
        seed: int = 0,
        stack: str | None = None,
    ) -> None:
        self.model: nn.Module | None = None if model is None else unwrap(model)
        self.penalties = tuple(penalties)
        self.seed = seed
        self.stack = stack
        self._anatomy: Anatomy | None = None
        self._step = 0
        self._open_pass: tuple[ExitStack, Callable[[Tensor], Tensor | None]] | None = None

    @property
    def are_on(self) -> bool:
        """Whether any penalty has a coefficient above 0."""
        return any(penalty.coefficient for penalty in self.penalties)

    def read_anatomy(self, inputs: Any) -> None:
        """Find the residual blocks; has to be called once before `watch`."""
        if self.model is None:
            raise AnatomyError("The penalties have no model yet; train with them.")
        inputs = on_device_of(self.model, take_examples(inputs, slice(0, 2)))
        self._anatomy = read_anatomy(self.model, inputs, stack=self.stack)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the penalties by name; a second one of a kind is named ``<name> 2``."""
        seen: Counter[str] = Counter()
        described = {}
        for penalty in self.penalties:
            name = type(penalty).__name__
            seen[name] += 1
            described[name if seen[name] == 1 else f"{name} {seen[name]}"] = penalty.describe()
        return described

    def setup(self, run: TrainingRun) -> None:
        """Act on the model of the run, or on the model inside if that is a wrapper without a forward pass."""
        super().setup(run)
        self.model = next(unwrap(module) for module in entrances(run.model) if has_forward(module))

    def begin(self) -> None:
        """Find the residual blocks if there is a probe; otherwise this happens in the first step."""
        probe = self.run.probe
        if self.are_on and probe is not None:
            self.read_anatomy(probe(2))

    def begin_step(self, step: int) -> None:
        """Set the step, which determines which penalties apply."""
        self._step = step

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the batch unchanged; if there was no probe, find the residual blocks with it."""
        if self.are_on and self._anatomy is None:
            self.read_anatomy(inputs)
        return inputs, targets

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Capture the forward pass until `auxiliary_loss` is called."""
        with ExitStack() as stack:
            self._open_pass = stack, stack.enter_context(self.watch(self._step))
            yield

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Add the penalties of this step to the auxiliary loss."""
        if self._open_pass is None:
            return auxiliary
        (hooks, penalty_of), self._open_pass = self._open_pass, None
        penalty = penalty_of(task_loss)
        hooks.close()
        if penalty is None:
            return auxiliary
        return penalty if auxiliary is None else auxiliary + penalty

    def end(self, *, is_broken: bool = False) -> None:
        """Release the model."""
        super().end(is_broken=is_broken)
        self.model = self._anatomy = self._open_pass = None

    @contextmanager
    def watch(self, step: int) -> Iterator[Callable[[Tensor], Tensor | None]]:
        """Capture the states of one forward pass.

        Yields:
            A function from the loss of the task to the weighted sum of the penalties of this step, a 0-dim tensor, or
            None if no penalty applies. It has to be called within the context.
        """
        due = [(i, p) for i, p in enumerate(self.penalties) if p.coefficient and step % p.interval == 0]
        if not due:
            yield lambda task_loss: None
            return
        if self._anatomy is None:
            raise AnatomyError("The residual blocks of the model are unknown; call read_anatomy(inputs) first.")
        entering: dict[int, Tensor] = {}
        leaving: dict[int, Tensor] = {}

        def enter(call: BlockCall) -> None:
            state = call.state_in
            if not state.requires_grad:  # no trained parameter precedes this block
                state.requires_grad_()
            entering[call.layer] = state

        def leave(call: BlockCall) -> None:
            leaving[call.layer] = call.state_out

        sites = self._anatomy.sites

        def penalty_of(task_loss: Tensor) -> Tensor:
            if len(leaving) < len(sites):
                raise AnatomyError(
                    f"Not all blocks of {type(self.model).__name__} ran as modules in this step, possibly because they "
                    "are compiled; train the model without compiling it, or without penalties."
                )
            layers = range(len(sites))
            stream = Stream(tuple(entering[i] for i in layers), tuple(leaving[i] for i in layers))
            terms = [p.coefficient * p.value(stream, task_loss, self._random(i, step, stream.device)) for i, p in due]
            return torch.stack(terms).sum()

        with ExitStack() as stack:
            if any(penalty.is_second_order for _, penalty in due):
                # The fused attention kernels have no second derivative.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(BlockHooks(sites, enter, leave))
            yield penalty_of

    def _random(self, number: int, step: int, device: torch.device) -> torch.Generator:
        words = np.random.SeedSequence((self.seed % 2**64, number, step)).generate_state(2, np.uint32)
        return torch.Generator(device).manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
