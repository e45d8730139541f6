"""The penalties of a run, evaluated on the residual stream of each step with its autograd graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.callbacks.baselines.penalties import Penalty, Stream
from workbench.errors import AnatomyError
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import take_examples
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of
from workbench.models.wrapping import entrances, unwrap
from workbench.training.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.models.subject import Subject


class PenaltyTerms(Callback):
    """The penalties of a run as a callback; in a custom loop they are added to the loss as in the example.

    The random draws of a penalty depend only on the seed and the step. A pass that is repeated within a step (SAM,
    LBFGS) therefore has the same penalty, and the global random states are not changed.

    Args:
        penalties: Penalties of this package; a coefficient of 0 disables one.
        model: Model whose blocks `workbench.read_anatomy` finds; None for that of the run.
        seed: Seed of the random draws of the penalties.
        stack: Stack of the blocks; see `workbench.read_anatomy`.

    Raises:
        OptionError: If an element of ``penalties`` is not a penalty.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> tokens, targets = wb.tasks.random_tokens(length=8, batch_size=2).batch(0)
        >>> terms = wb.baselines.PenaltyTerms([wb.baselines.RandomL2(coefficient=0.1)], model=model)
        >>> terms.read_anatomy(tokens)
        >>> with terms.watch(step=0) as penalty_of:
        ...     loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        ...     penalty = penalty_of(loss)
        >>> penalty.item() > 0
        True

    See Also:
        `workbench.train`: Adds penalties by its argument ``penalties``.
        `workbench.baselines.Penalty`: Base class of all penalties.
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
        """Find the residual blocks; has to be called once before `watch`.

        Args:
            inputs: Batch of inputs of the model; its first two examples are used.

        Raises:
            AnatomyError: If the residual stream cannot be identified with certainty, or there is no model yet.
        """
        if self.model is None:
            raise AnatomyError("The penalties have no model yet; pass PenaltyTerms(model=), or train with them.")
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
        self.model = next(unwrap(module) for module in entrances(run.model) if _has_forward(module))

    def begin(self) -> None:
        """Find the residual blocks if there is a probe; otherwise this happens in the first step.

        Raises:
            AnatomyError: If the residual stream cannot be identified with certainty.
        """
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

        Args:
            step: Number of updates before this one.

        Yields:
            A function from the loss of the task to the weighted sum of the penalties of this step, a 0-dim tensor, or
            None if no penalty applies. It has to be called within the context.

        Raises:
            AnatomyError: If the blocks are unknown; from the function, if the blocks did not run as modules.
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


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass; a LightningModule may leave it to the model that it contains."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__name__ not in ("Module", "LightningModule")
