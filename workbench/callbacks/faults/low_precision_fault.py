"""Fault of the attention: low bits are cut in its backward pass, with a bias towards zero."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar

from workbench.callbacks.faults.fault import Fault
from workbench.callbacks.faults.flash_attention_mode import ROUNDINGS, Bits, Cut
from workbench.errors import OptionError
from workbench.option_checks import one_of

_TARGETS = {"output": "O", "gradient": "dO"}
_WHAT = {"truncate": "are cut", "nearest": "are rounded off"}


@dataclass(kw_only=True, eq=False)
class LowPrecisionAttention(Fault):
    """Fault: the backward pass of attention uses its output O and its gradient dO with fewer bits.

    Truncation towards zero makes delta = rowsum(dO * O) too small, which biases the gradients of queries and keys.
    In a run with this fault, attention is computed by `workbench.faults.flash_attention` in every step, with k = 0
    while the fault is off. Switching therefore changes only the bits. A control run has the same list of faults with
    this one off, or with ``n_bits=0``, which yields the same numbers.

    The fault replaces ``torch.nn.functional.scaled_dot_product_attention``, which is used by the models of the zoo and
    by Hugging Face models loaded with ``attn_implementation="sdpa"``. It also acts in the gradient checkpointing of
    modules. It does not act in the recomputation of a function inside the attention module, nor within
    ``torch.nn.MultiheadAttention``; a model without any other attention raises an error.

    Attributes:
        n_bits: Number k of bits that are cut, 0 to 8; see `workbench.faults.cut_low_bits`.
        targets: Tensors that are cut: ``"output"`` (O), ``"gradient"`` (dO and all that is computed from it), or both.
        rounding: ``"truncate"`` is the fault. ``"nearest"`` is a control that cuts as many bits with almost no bias.
            ``"cast"`` (with ``n_bits=0``) is the cast to bfloat16 alone.
        start: See `Fault`.
        stop: See `Fault`.

    Raises:
        OptionError: If an option is out of range.

    Example:
        >>> import workbench as wb
        >>> fault = wb.faults.LowPrecisionAttention(n_bits=8, start=1)
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=2, faults=[fault]):
        ...     print(record.step, record.active_faults)
        0 ()
        1 ('low_precision_attention',)

    See Also:
        `workbench.faults.flash_attention`: The attention of a run with this fault.
        `workbench.probes.precision_errors`: Detects errors of the arithmetic.
    """

    kind: ClassVar[str] = "low_precision_attention"
    meaning: ClassVar[str] = "bits of O and dO are lost in the backward pass of attention"
    n_bits: Bits = 8
    targets: str | Collection[str] = ("output", "gradient")
    rounding: Annotated[str, one_of(ROUNDINGS)] = "truncate"

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not targets or any(target not in _TARGETS for target in targets):
            raise OptionError.of("targets", self.targets, "'output', 'gradient' or both")
        self.targets = tuple(name for name in _TARGETS if name in targets)
        if self.rounding == "cast" and self.n_bits:
            raise OptionError.of("n_bits", self.n_bits, "0 with rounding='cast', which cuts no bits")
        super().__post_init__()

    @property
    def effect(self) -> str:
        """Effect of the fault while it is on, as a clause."""
        which = " and ".join(_TARGETS[target] for target in self.targets)
        if self.rounding == "cast":
            return f"{which} are cast to bfloat16 in the backward pass"
        n_bits = f"{self.n_bits} {'bit' if self.n_bits == 1 else 'bits'}"
        return f"{n_bits} of {which} {_WHAT[self.rounding]} in the backward pass"

    @property
    def cut(self) -> Cut:
        """The cut of bits while the fault is on."""
        return Cut(self.n_bits, self.rounding, "output" in self.targets, "gradient" in self.targets)
