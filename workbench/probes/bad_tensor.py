"""The first tensor of a pass that is not finite, as data and as a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.formatting import capitalized, counted, number_in_words
from workbench.probes.pass_readings import Reading

#: Path of a module, and the largest |gradient| that it passes back.
Neighbor = tuple[str, float]


@dataclass(frozen=True)
class BadTensor:
    """The first tensor of a pass with values that are not finite.

    Attributes:
        module: Path of the module in the model; "" for the model itself, or for code outside of it, as ``tensor``
            states.
        tensor: "parameter NAME", "buffer NAME", "input", "output", or "loss" (computed outside of every module). In the
            backward pass: "gradient of the input" (passed back by the module although the gradient of its output is
            finite), "gradient of parameter NAME", "gradient of the output" (a sum of finite contributions, or the
            result of a hook), or "gradient from the loss" (computed outside of every module).
        pass_: "forward" or "backward".
        n_bad: Number of values that are not finite.
        n_values: Number of values of the tensor.
        largest_before: Largest finite |value| among the inputs of the operation if it is known, otherwise of the
            module; for a gradient, among the gradients received; for a parameter, buffer or input, among its own
            values. NaN if no value is finite.
        bracket: Nearest modules on either side, in the order of the backward pass, that passed back finite gradients:
            the last other one before and the first one after, each with its largest |gradient|; "the loss" represents
            code outside of every module. None if there is none, and in the forward pass.
        operation: Operation of torch that computed the tensor, such as "exp" or "SqrtBackward0"; empty if unknown.
        suggestion: Probable cause; empty if none is certain.

    Example:
        >>> import workbench as wb
        >>> wb.probes.BadTensor("mlp", "output", "forward", 2, 64, 91.0, operation="exp").sentence
        'Forward pass: mlp returns 2 of 64 values that are not finite, by exp of finite values of at most 91.'

    See Also:
        `workbench.probes.first_bad_tensor`: Finds it.
    """

    module: str
    tensor: str
    pass_: str
    n_bad: int
    n_values: int
    largest_before: float
    bracket: tuple[Neighbor | None, Neighbor | None] = (None, None)
    operation: str = ""
    suggestion: str = ""

    @property
    def sentence(self) -> str:
        """Description of the tensor, its place, its inputs and the probable cause."""
        where = self.module or "the model"
        are = "is" if self.n_values == 1 else "are"
        bad = f"{self.n_bad:,} of {counted(self.n_values, 'value')} that {are} not finite"
        text = {
            "output": f"{where} returns {bad}",
            "loss": "the loss is not finite",
            "gradient from the loss": f"the loss passes back to the model a gradient with {bad}",
            "gradient of the output": f"the gradient of the output of {where} has {bad}",
            "input": f"an input of {where} has {bad}",
        }.get(self.tensor)
        if text is None and self.pass_ == "backward":
            text = f"{where} passes back a {self.tensor} with {bad}"
        elif text is None:
            text = f"{self.tensor} of {where} has {bad}"
        if self.tensor in ("output", "loss") or self.pass_ == "backward":
            size = "" if math.isnan(self.largest_before) else f" of at most {number_in_words(self.largest_before)}"
            kind = "gradients" if self.pass_ == "backward" else "values"
            source = f"by {self.operation} of" if self.operation else "computed from"
            text += f", {source} finite {kind}{size}"
        beginnings = ("the last finite gradients before it are those of", "the first after it those of")
        for words, side in zip(beginnings, self.bracket, strict=True):
            if side is not None:
                text += f"; {words} {side[0] or 'the model'} (at most {number_in_words(side[1])})"
        ending = f": {self.suggestion}." if self.suggestion else "."
        return f"{capitalized(self.pass_)} pass: {text}{ending}"


def bad_tensor_of(
    reading: Reading,
    module: str,
    tensor: str,
    largest_before: float,
    *,
    pass_: str = "forward",
    suggestion: str = "",
) -> BadTensor:
    """Return a `BadTensor` with the counts of a reading."""
    return BadTensor(module, tensor, pass_, reading.n_bad, reading.n_values, largest_before, suggestion=suggestion)
