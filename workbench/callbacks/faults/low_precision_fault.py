"""Attention whose backward pass loses bits, always in one direction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from workbench.callbacks.faults.fault import Fault
from workbench.callbacks.faults.flash_attention_mode import ROUNDINGS, Cut
from workbench.errors import OptionError
from workbench.tasks.task import require_whole

_TARGETS = {"output": "O", "gradient": "dO"}
_WHAT = {"truncate": "are cut", "nearest": "are rounded off"}


@dataclass(kw_only=True, eq=False)
class LowPrecisionAttention(Fault):
    """The backward pass of attention uses its output O and its gradient dO with fewer bits.

    A cut that always goes towards zero makes delta = rowsum(dO * O) too small, and with it the gradients of queries and
    keys wrong in one direction. While the fault is in a run's list, attention is computed by
    `workbench.faults.flash_attention` in every step, with k = 0 while it is off: switching changes the bits and nothing
    else, and the control run has the same list with the fault off (or ``n_bits=0``, which gives the same numbers).

    It replaces ``torch.nn.functional.scaled_dot_product_attention``, which the zoo calls, and Hugging Face models
    loaded with ``attn_implementation="sdpa"``. Gradient checkpointing of modules is followed; where a function
    inside of the module that attends is run again, or attention runs within ``torch.nn.MultiheadAttention``, it is out
    of reach (a model with nothing but the latter is refused).

    Attributes:
        n_bits: Number k of bits that are lost, 0 to 8; see `workbench.faults.cut_low_bits`.
        targets: Tensors that lose them: ``"output"`` (O), ``"gradient"`` (dO and everything computed from it), or both.
        rounding: ``"truncate"`` is the fault; ``"nearest"`` a control that loses as many bits with hardly a bias;
            ``"cast"`` (with ``n_bits=0``) the cast to bfloat16 alone.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LowPrecisionAttention(n_bits=8, start=1)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault]):
        ...     print(record.step, record.active_faults)
        0 ()
        1 ('low_precision_attention',)
    """

    kind: ClassVar[str] = "low_precision_attention"
    meaning: ClassVar[str] = "bits of O and dO are lost in the backward pass of attention"
    n_bits: int = 8
    targets: Collection[str] = ("output", "gradient")
    rounding: str = "truncate"

    def __post_init__(self) -> None:
        require_whole(0, n_bits=self.n_bits)
        if self.n_bits > 8:
            raise OptionError(f"n_bits is {self.n_bits}, expected 0 to 8: seven bits of mantissa, one of exponent.")
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not targets or any(target not in _TARGETS for target in targets):
            raise OptionError(f"targets is {self.targets!r}, expected 'output', 'gradient' or both.")
        self.targets = tuple(name for name in _TARGETS if name in targets)
        if self.rounding not in ROUNDINGS:
            raise OptionError(f"rounding is '{self.rounding}', expected one of {', '.join(ROUNDINGS)}.")
        if self.rounding == "cast" and self.n_bits:
            raise OptionError(f"rounding 'cast' loses no further bits, but n_bits is {self.n_bits}; pass n_bits=0.")
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Its effect while it is on."""
        which = " and ".join(_TARGETS[target] for target in self.targets)
        if self.rounding == "cast":
            return f"{which} are cast to bfloat16 in the backward pass"
        n_bits = f"{self.n_bits} {'bit' if self.n_bits == 1 else 'bits'}"
        return f"{n_bits} of {which} {_WHAT[self.rounding]} in the backward pass"

    @property
    def cut(self) -> Cut:
        """The cut while it is on."""
        return Cut(self.n_bits, self.rounding, "output" in self.targets, "gradient" in self.targets)
