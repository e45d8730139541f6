"""The residual stream of a training step with its graph, and the penalties on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.callbacks.baselines.penalties import Penalty, Stream
from workbench.errors import AnatomyError, OptionError
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import take_rows
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of
from workbench.models.wrapping import entrances, unwrap
from workbench.training.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.models.subject import Subject


class PenaltyTerms(Callback):
    """The penalties of a run as a callback; in the user's own loop they are added explicitly.

        terms = PenaltyTerms([JacobianPenalty(0.1)], model=model)
        with terms.watch(step) as penalty_of:
            loss = cross_entropy(model(tokens), targets)
            penalty = penalty_of(loss)  # None where nothing is due
        (loss if penalty is None else loss + penalty).backward()

    The random draws of a penalty depend only on the seed and the step: a pass that is repeated within a step (SAM,
    LBFGS) gets the same penalty, and no global random state is changed.

    Args:
        penalties: Penalties of this package; a coefficient of 0 switches one off.
        model: Model whose blocks `workbench.read_anatomy` finds; None: that of the run.
        seed: Seed of the penalties' random draws.
        stack: Stack of the blocks; see `workbench.read_anatomy`.

    Raises:
        OptionError: If an element of ``penalties`` is no penalty.

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
        if isinstance(penalties, Penalty):
            raise OptionError(f"penalties is one {type(penalties).__name__}, expected a sequence; pass [it].")
        for penalty in penalties:
            if not isinstance(penalty, Penalty):
                raise OptionError(
                    f"penalties holds a {type(penalty).__name__}, expected penalties such as "
                    "wb.baselines.GradientPenalty()."
                )
        self.model: nn.Module | None = None if model is None else unwrap(model)
        self.penalties = tuple(penalties)
        self.seed = seed
        self.stack = stack
        self._anatomy: Anatomy | None = None
        self._step = 0
        self._listening: tuple[ExitStack, Callable[[Tensor], Tensor | None]] | None = None

    @property
    def are_on(self) -> bool:
        """Whether any penalty can become due."""
        return any(penalty.coefficient for penalty in self.penalties)

    def read_anatomy(self, inputs: Any) -> None:
        """Find the residual blocks; required once before `watch`.

        Args:
            inputs: Batch as the model will get it; its first two examples are used.

        Raises:
            AnatomyError: If the residual stream cannot be read with certainty, or there is no model yet.
        """
        if self.model is None:
            raise AnatomyError("The penalties have no model yet; pass PenaltyTerms(model=), or train with them.")
        inputs = on_device_of(self.model, take_rows(inputs, slice(0, 2)))
        self._anatomy = read_anatomy(self.model, inputs, stack=self.stack)

    def describe(self) -> dict[str, dict[str, Any]]:
        """The penalties as plain values, by name; a second one of a kind is called ``<name> 2``."""
        seen: Counter[str] = Counter()
        described = {}
        for penalty in self.penalties:
            name = type(penalty).__name__
            seen[name] += 1
            described[name if seen[name] == 1 else f"{name} {seen[name]}"] = penalty.describe()
        return described

    def setup(self, run: TrainingRun) -> None:
        """Act on the model of the run, or, if that is a wrapper that cannot be called, on the model inside."""
        super().setup(run)
        self.model = next(unwrap(module) for module in entrances(run.model) if _has_forward(module))

    def begin(self) -> None:
        """Find the residual blocks if there is a probe to run the model on; otherwise in the first step.

        Raises:
            AnatomyError: If the residual stream cannot be read with certainty.
        """
        probe = self.run.probe
        if self.are_on and probe is not None:
            self.read_anatomy(probe(2))

    def begin_step(self, step: int) -> None:
        """Set the step, which determines the penalties that are due."""
        self._step = step

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the batch unchanged; the blocks are read from it if there was no probe."""
        if self.are_on and self._anatomy is None:
            self.read_anatomy(inputs)
        return inputs, targets

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Capture the forward pass until `auxiliary_loss` is called."""
        with ExitStack() as stack:
            self._listening = stack, stack.enter_context(self.watch(self._step))
            yield

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Add the penalties that are due to the auxiliary loss."""
        if self._listening is None:
            return auxiliary
        (listening, penalty_of), self._listening = self._listening, None
        penalty = penalty_of(task_loss)
        listening.close()
        if penalty is None:
            return auxiliary
        return penalty if auxiliary is None else auxiliary + penalty

    def end(self, *, is_broken: bool = False) -> None:
        """Release the model."""
        super().end(is_broken=is_broken)
        self.model = self._anatomy = self._listening = None

    @contextmanager
    def watch(self, step: int) -> Iterator[Callable[[Tensor], Tensor | None]]:
        """Capture the states of one forward pass.

        Args:
            step: Updates done before this one.

        Yields:
            A function from the task's loss to the weighted sum of the penalties that are due in this step, a 0-dim
            tensor; None if there are none. Call it within the context.

        Raises:
            AnatomyError: From the function, if the blocks did not run as modules.
        """
        due = [(i, p) for i, p in enumerate(self.penalties) if p.coefficient and step % p.interval == 0]
        if not due:
            yield lambda task_loss: None
            return
        if self._anatomy is None:
            raise AnatomyError("The penalties have not seen the model yet; call read_anatomy(inputs) first.")
        entering: dict[int, Tensor] = {}
        leaving: dict[int, Tensor] = {}

        def enter(call: BlockCall) -> None:
            state = call.state_in
            if not state.requires_grad:  # before the first parameter that is trained
                state.requires_grad_()
            entering[call.layer] = state

        def leave(call: BlockCall) -> None:
            leaving[call.layer] = call.state_out

        sites = self._anatomy.sites

        def penalty_of(task_loss: Tensor) -> Tensor:
            if len(leaving) < len(sites):
                raise AnatomyError(
                    f"Not every block of {type(self.model).__name__} ran as a module in this step, as it does not in "
                    "compiled code; train the module itself, without penalties, or with them off."
                )
            layers = range(len(sites))
            stream = Stream(tuple(entering[i] for i in layers), tuple(leaving[i] for i in layers))
            parts = [p.coefficient * p.value(stream, task_loss, self._random(i, step, stream.device)) for i, p in due]
            return torch.stack(parts).sum()

        with ExitStack() as stack:
            if any(penalty.is_second_order for _, penalty in due):
                # The fused attention kernels have no second derivative.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(BlockHooks(sites, enter, leave))
            yield penalty_of

    def _random(self, number: int, step: int, device: torch.device) -> torch.Generator:
        words = np.random.SeedSequence((self.seed, number, step)).generate_state(2, np.uint32)
        return torch.Generator(device).manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a LightningModule may leave that to the model it holds."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__name__ not in ("Module", "LightningModule")
