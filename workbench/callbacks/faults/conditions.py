"""Faults of the settings of a run: its rate, its batches, its loss, its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.callbacks.faults.fault import Fault, require_positive, require_share
from workbench.errors import OptionError
from workbench.models.batches import count_rows, take_rows
from workbench.tasks.task import require_whole


@dataclass(kw_only=True, eq=False)
class LargeRate(Fault):
    """The learning rate is multiplied.

    Attributes:
        factor: Factor on the rate, after the schedule; above 0.
        ramp: Steps over which it grows from 1 to its value, linearly, each time it is switched on; 0: at once.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LargeRate(factor=5.0, ramp=4, start=0)
        >>> [fault.rate_factor(n) for n in (1, 2, 4, 8)]
        [3.0, 4.0, 5.0, 5.0]
    """

    kind: ClassVar[str] = "large_rate"
    meaning: ClassVar[str] = "the learning rate is multiplied"
    factor: float = 10.0
    ramp: int = 0

    def __post_init__(self) -> None:
        require_positive(factor=self.factor)
        require_whole(0, ramp=self.ramp)
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        return f"the learning rate is multiplied by {self.factor:g}" + (
            f", reached over {self.ramp} steps" if self.ramp else ""
        )

    def rate_factor(self, n_steps_on: int) -> float:
        """The factor on the rate in the step after ``n_steps_on`` steps with it."""
        return 1 + (self.factor - 1) * (min(1.0, (n_steps_on + 1) / self.ramp) if self.ramp else 1.0)


@dataclass(kw_only=True, eq=False)
class SmallBatch(Fault):
    """Only the first examples of each batch are used.

    Attributes:
        n_rows: Number of examples used.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> fault = wb.faults.SmallBatch(n_rows=2)
        >>> tokens, targets = fault.batch(torch.zeros(8, 4), torch.zeros(8, 4))
        >>> tuple(tokens.shape)
        (2, 4)
    """

    kind: ClassVar[str] = "small_batch"
    meaning: ClassVar[str] = "only the first rows of each batch are used"
    n_rows: int = 2

    def __post_init__(self) -> None:
        require_whole(1, n_rows=self.n_rows)
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        if self.n_rows == 1:
            return "only the first row of each batch is used"
        return f"only the first {self.n_rows} rows of each batch are used"

    def batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """The part of a batch that is used.

        Raises:
            OptionError: If it has fewer examples.
        """
        if (n_rows := count_rows(inputs)) < self.n_rows:
            raise OptionError(f"small_batch keeps n_rows = {self.n_rows} rows, but a batch has {n_rows}; keep fewer.")
        return take_rows(inputs, slice(0, self.n_rows)), targets[: self.n_rows]


@dataclass(kw_only=True, eq=False)
class NoAuxiliaryLoss(Fault):
    """The model's own auxiliary loss, such as a router's balance, is left out.

    The recorded ``auxiliary_loss`` is what was added: 0, plus further penalties, which remain.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.moe(d_model=16, n_layers=1, n_heads=2, n_experts=4)
        >>> fault = wb.faults.NoAuxiliaryLoss(start=1)
        >>> run = wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault])
        >>> [record.auxiliary_loss > 0 for record in run]
        [True, False]
    """

    kind: ClassVar[str] = "no_auxiliary_loss"
    meaning: ClassVar[str] = "the model's auxiliary loss, such as a router's balance, is left out"

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        return "the model's auxiliary loss is left out"


@dataclass(kw_only=True, eq=False)
class CorruptedData(Fault):
    """Labels or tokens are replaced by random ones of those in the batch.

    Attributes:
        what: Values to replace: ``"labels"`` (targets but -100) or ``"tokens"`` (of the inputs).
        share: Share of the values, each drawn independently; above 0, at most 1.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.CorruptedData(what="labels", share=0.5, start=100, stop=200)
        >>> fault.name, fault.enabled
        ('corrupted_data', False)
    """

    kind: ClassVar[str] = "corrupted_data"
    meaning: ClassVar[str] = "labels or tokens are replaced by random ones"
    what: str = "labels"
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.what not in ("labels", "tokens"):
            raise OptionError(f"what is '{self.what}', expected 'labels' or 'tokens'.")
        require_share(self.share)
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        return f"{100 * self.share:g} % of the {self.what} are replaced by random ones of the batch"

    def batch(self, inputs: Any, targets: Tensor, generator: torch.Generator) -> tuple[Any, Tensor]:
        """A corrupted copy of a batch; the arguments are not changed.

        Args:
            inputs: Inputs of the model.
            targets: Targets of the inputs.
            generator: Generator on the CPU.

        Raises:
            OptionError: If there are no whole numbers to replace.
        """
        if self.what == "labels":
            if targets.is_floating_point():
                raise OptionError("corrupted_data replaces class numbers, but these targets are not whole numbers.")
            return inputs, self._replaced(targets, targets != -100, generator)
        return _with_tokens(
            inputs, lambda tokens: self._replaced(tokens, torch.ones_like(tokens) > 0, generator)
        ), targets

    def _replaced(self, values: Tensor, may_change: Tensor, generator: torch.Generator) -> Tensor:
        known = values[may_change].unique()
        if not len(known):
            return values
        # Drawn on the CPU, so that every device sees the same numbers.
        is_hit = (torch.rand(values.shape, generator=generator) < self.share).to(values.device) & may_change
        drawn = torch.randint(len(known), values.shape, generator=generator).to(values.device)
        return torch.where(is_hit, known[drawn], values)


def _with_tokens(inputs: Any, change: Any) -> Any:
    """Inputs with their token ids changed: a tensor, ``input_ids`` of a mapping, or the first positional argument."""
    if isinstance(inputs, Mapping) and isinstance(tokens := inputs.get("input_ids"), Tensor):
        return {**inputs, "input_ids": change(tokens)}
    if isinstance(inputs, tuple | list) and inputs and isinstance(inputs[0], Tensor) and _are_tokens(inputs[0]):
        return (change(inputs[0]), *inputs[1:])
    if isinstance(inputs, Tensor) and _are_tokens(inputs):
        return change(inputs)
    raise OptionError("corrupted_data finds no token ids in these inputs; corrupt 'labels' instead.")


def _are_tokens(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype != torch.bool
