"""Axes of inputs and states that count sequences and tokens, from documentation or by changing one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.models.calling import tensors_of

_REMEDY = (
    "pass batch_first=True if the inputs are (batch, token) or (batch, token, feature), batch_first=False if they are "
    "(token, batch) or (token, batch, feature)"
)
#: Parts of the names of inputs that accompany tokens but are not tokens.
_COMPANIONS = ("mask", "position", "type", "label", "length")
#: Changes up to this multiple of the machine epsilon, relative to the largest state, are attributed to rounding.
_ROUNDING = 16.0


@dataclass(frozen=True)
class BatchLayout:
    """The axes that count sequences."""

    inputs: int | None = 0  # axis of the input tensors that counts sequences, 0 or 1; None if it cannot be determined
    #: Axis of the states that counts sequences; None if it cannot be determined, or if states have shape (token,
    #: feature).
    states: int | None = 0
    #: Whether a forward pass on a part of the inputs yields the same states as one on all of them.
    can_split: bool = True


#: Sequences first, as in transformers and in the zoo.
BATCH_FIRST = BatchLayout()


def layout_of(
    model: nn.Module,
    inputs: Any,
    leading: tuple[int, ...],
    *,
    batch_first: bool | None,
    state_for: Callable[[Any], Tensor],
) -> BatchLayout:
    """Determine the axes that count sequences, in inputs and in states.

    The layout is documented for models of transformers and of the zoo, for images, and for PyTorch's own transformer
    layers. For other models one token is changed: attention, convolutions and scans propagate the change along the axis
    of tokens, but never from one sequence to another. If no token depends on another, the axes of batch and token
    cannot be distinguished and are None; code that needs them calls `require`. ``leading`` is the shape of the states
    without features, ``batch_first`` what the user states, and ``state_for`` maps inputs, a few examples, to the states
    that leave the last block.
    """
    tokens = token_tensors(inputs)
    axis = 1 - int(batch_first) if batch_first is not None else _documented_axis(model, inputs)
    if axis is not None:
        return BatchLayout(axis, _axis_by_size(model, inputs, leading, axis, state_for, has_tokens=bool(tokens)))
    if not tokens:  # vectors: each is a separate example, unless they turn out to be tokens of one sequence
        main = next((value for _, value in tensors_of(inputs)), None)
        is_sequence = main is not None and main.ndim == 2 and len(_changed(main, inputs, state_for)) > 1
        return BatchLayout(None if is_sequence else 0, None if is_sequence else 0, not is_sequence)
    name, main = tokens[0]
    changed = _changed_states(name, main, inputs, state_for)
    if changed.ndim != 2:
        n_changed = int(changed.sum())
        return BatchLayout(None, None, n_changed <= 1)
    n_rows, n_columns = (int(changed.any(dim=1 - dim).sum()) for dim in (0, 1))
    if n_rows > 1 and n_columns > 1:
        if _is_folded(tuple(main.shape[:2]), leading):
            raise _folded(model, main, leading)
        raise AnatomyError(
            f"Changing one token of {type(model).__name__} changes states along both axes of {leading}, so the axes of "
            f"batch and token cannot be distinguished; {_REMEDY}."
        )
    if n_rows <= 1 and n_columns <= 1:
        return BatchLayout(None, None)
    states = 1 if n_rows > 1 else 0
    fitting = [axis for axis in (0, 1) if main.shape[axis] == leading[states]]
    if not fitting:
        raise _folded(model, main, leading)
    if len(fitting) == 2:  # as many sequences as tokens: test whether the second entry is in the sequence of the first
        second = _changed_states(name, main, inputs, state_for, place=(1, 0))
        rows = [each.any(dim=1 - states).nonzero().flatten().tolist() for each in (changed, second)]
        fitting = [1 if rows[0] == rows[1] else 0]
    return BatchLayout(fitting[0], states)


def require(axis: int | None, what: str, leading: tuple[int, ...]) -> int:
    """Return the axis of a `BatchLayout` if it is known, or raise AnatomyError, which names what needs it."""
    if axis is None:
        raise AnatomyError(
            f"{what} needs to know which axis of states of shape {tuple(leading)} counts sequences; this cannot be "
            f"determined, because no token of this model depends on another; {_REMEDY}."
        )
    return axis


def token_tensors(inputs: Any) -> list[tuple[Any, Tensor]]:
    """Return name (or position) and value of each input that holds tokens: ids (a, b) or vectors (a, b, feature)."""
    return [
        (name, value)
        for name, value in tensors_of(inputs)
        if (value.ndim == 3 if value.is_floating_point() else value.ndim == 2)
        and not any(part in str(name) for part in _COMPANIONS)
    ]


def _documented_axis(model: nn.Module, inputs: Any) -> int | None:
    """Return the axis of the inputs that counts sequences if it is documented for the model, else None."""
    if any(value.ndim > 3 for _, value in tensors_of(inputs)):
        return 0  # images and videos: convolutions expect the batch first
    from workbench.zoo.constructors import is_zoo_model

    modules = [cls.__module__.split(".") for cls in type(model).__mro__]
    if is_zoo_model(model) or any(parts[0] == "transformers" for parts in modules):
        return 0
    if modules[0][:2] == ["torch", "nn"]:
        attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
        has_batch = all(value.ndim == 3 for _, value in tensors_of(inputs) if value.is_floating_point())
        if attention is not None and has_batch:
            return 0 if attention.batch_first else 1
    return None


def _axis_by_size(
    model: nn.Module,
    inputs: Any,
    leading: tuple[int, ...],
    axis: int,
    state_for: Callable[[Any], Tensor],
    *,
    has_tokens: bool,
) -> int | None:
    """Return the axis of the states whose length is the number of sequences; None if there is none."""
    counts = {value.shape[axis] for _, value in tensors_of(inputs) if value.ndim > axis}
    fitting = [position for position, size in enumerate(leading) if size in counts]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:  # change a full sequence: the axis along which only one entry changes counts sequences
        vectors = [(n, v) for n, v in tensors_of(inputs) if v.is_floating_point() and v.ndim > axis]
        named = token_tensors(inputs) or vectors
        if not named:
            return fitting[0]
        changed = _changed_states(*named[0], inputs, state_for, sequence_axis=axis)
        others = [tuple(d for d in range(changed.ndim) if d != position) for position in fitting]
        single = [p for p, rest in zip(fitting, others, strict=True) if int(changed.any(dim=rest).sum()) == 1]
        return next((p for p in single if leading[p] > 1), single[0] if single else fitting[0])
    if has_tokens and len(leading) == 2:
        _, main = token_tensors(inputs)[0]
        if _is_folded(tuple(main.shape[:2]), leading):
            raise _folded(model, main, leading)
    return None


def _is_folded(inputs: tuple[int, ...], leading: tuple[int, ...]) -> bool:
    """Return whether one axis of the states is an integer multiple of that of the tokens, and the other is equal."""
    for shape in (inputs, inputs[::-1]):
        for axis in (0, 1):
            factor, rest = divmod(leading[axis], shape[axis])
            if factor > 1 and not rest and leading[1 - axis] == shape[1 - axis]:
                return True
    return False


def _folded(model: nn.Module, main: Tensor, leading: tuple[int, ...]) -> AnatomyError:
    return AnatomyError(
        f"The states of {type(model).__name__} have leading shape {tuple(leading)} where its inputs have "
        f"{tuple(main.shape[:2])}: several residual streams are folded into the batch, or tokens are regrouped, which "
        "cannot be read; choose another model, or blocks with one state per token by wb.profile(..., stack=)."
    )


def _changed_states(
    name: Any,
    main: Tensor,
    inputs: Any,
    state_for: Callable[[Any], Tensor],
    *,
    place: tuple[int, int] | None = None,
    sequence_axis: int | None = None,
) -> Tensor:
    """Return which states change with one token (or one full sequence) of the inputs, boolean, of the leading shape."""
    changed = main.clone()
    selected: Any = place or (0, 0)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if sequence_axis is not None:
        selected = (slice(None),) * sequence_axis + (0,)
    elif not place and isinstance(mask, Tensor) and mask.shape == main.shape[:2] and bool(mask.any()):
        selected = tuple(mask.nonzero()[0].tolist())  # the first token that is attended
    changed[selected] = _another(main, changed[selected])
    return _difference(state_for(inputs), state_for(_with(inputs, name, changed)))


def _changed(main: Tensor, inputs: Any, state_for: Callable[[Any], Tensor]) -> list[int]:
    """Return the indices of the vectors whose states change with the first vector."""
    name = next(n for n, value in tensors_of(inputs) if value is main)
    changed = main.clone()
    changed[0] = _another(main, changed[0])
    difference = _difference(state_for(inputs), state_for(_with(inputs, name, changed)))
    difference = difference.flatten(1).any(1) if difference.ndim > 1 else difference
    return difference.nonzero().flatten().tolist()


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """Return which states differ, boolean, of the leading shape."""
    if before.shape != after.shape:
        raise AnatomyError(
            f"The states change their shape from {tuple(before.shape)} to {tuple(after.shape)} with one token, so the "
            "axes of batch and token cannot be distinguished; pass wb.profile(..., batch_first=)."
        )
    size = (before.double() - after.double()).abs().amax(-1)
    largest = float(size.max()) if size.numel() else 0.0
    changed = size > 0
    if changed.ndim == 2 and int(changed.any(0).sum()) > 1 and int(changed.any(1).sum()) > 1:
        # The change sends other numbers of tokens to experts, and kernels round differently for other shapes.
        eps = torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
        changed = size > _ROUNDING * eps * max(largest, float(before.double().abs().max()))
    return changed


def _another(main: Tensor, value: Tensor) -> Tensor:
    """Return different tokens or vectors of the same kind."""
    if value.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(value.shape, generator=generator).to(value)
        scale = float(main.float().std(correction=0))
        return value.flip(-1) * -0.5 + noise * (scale or 1.0)
    known = main.unique()
    if len(known) > 1:
        place = torch.searchsorted(known, value.contiguous())
        return known[(place + 1) % len(known)]
    return torch.where(value > 0, value - 1, value + 1)


def _with(inputs: Any, name: Any, value: Tensor) -> Any:
    if isinstance(inputs, Mapping):
        return {**inputs, name: value}
    if isinstance(inputs, tuple | list):
        return tuple(value if position == name else item for position, item in enumerate(inputs))
    return value
