"""Scalar that is differentiated: a loss on targets, or the output along a random direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.models.losses import prediction_of, token_loss

#: Function from logits and targets to a 0-dim tensor.
Loss = Callable[[Tensor, Tensor], Tensor]


def end_of(output: Any, inputs: Any, targets: Any, loss: Loss | None, *, seed: int) -> tuple[Tensor, str]:
    """Return the scalar whose gradient is computed, and a description of it.

    Args:
        output: Output of the model.
        inputs: Inputs of the model.
        targets: Targets of the loss; None for the next tokens, if the model returns logits of its tokens.
        loss: Function from logits and targets to a 0-dim tensor; None for `token_loss`.
        seed: Seed of the random direction that is used if there are no targets.
    """
    result = _result_in(output)
    if result is None:
        raise SnapshotError(
            "The model returned no floating-point tensor that depends on its blocks; pass a model that does."
        )
    what = "given targets"
    if targets is None and (tokens := _tokens_in(inputs)) is not None and _predicts(result, tokens):
        targets, what = _next_tokens(tokens, inputs), "next tokens"
    if targets is None:
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(result.shape, generator=generator).to(result)
        return (result * direction).sum(), f"random direction at the output, seed {seed}"
    try:
        value = (loss or token_loss)(result if loss is None else prediction_of(output), targets.to(result.device))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SnapshotError(
            f"The loss of an output of shape {tuple(result.shape)} on targets of shape {tuple(targets.shape)} failed "
            f"({first}); pass targets that fit these inputs, or the loss for them."
        ) from error
    if value.numel() != 1:
        raise SnapshotError(f"The loss has shape {tuple(value.shape)}, expected a single number; return its mean.")
    return value.squeeze(), f"loss on {what}"


def _result_in(output: Any) -> Tensor | None:
    """Return the logits of an output, or its first tensor that has a gradient; None if there is none."""
    if isinstance(output, Mapping):
        candidates = [output.get("logits"), *output.values()]
    elif isinstance(output, tuple | list):
        candidates = list(output)
    else:
        candidates = [getattr(output, "logits", None), output]
    fitting = [t for t in candidates if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    return fitting[0] if fitting else None


def _tokens_in(inputs: Any) -> Tensor | None:
    """Return the token ids of inputs, shape (sequence, token); of an encoder and decoder, those of the decoder."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    elif isinstance(inputs, tuple | list):
        inputs = inputs[0] if inputs else None
    is_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point() and inputs.ndim == 2
    return inputs if is_tokens and inputs.shape[1] > 1 else None


def _predicts(result: Tensor, tokens: Tensor) -> bool:
    """Return whether an output may be logits of the next token at every position."""
    return result.ndim == 3 and result.shape[:2] == tokens.shape and result.shape[2] > int(tokens.max())


def _next_tokens(tokens: Tensor, inputs: Any) -> Tensor:
    """Return the tokens shifted by one; -100 after the last token and for padding."""
    targets = torch.full_like(tokens, -100, dtype=torch.int64)
    targets[:, :-1] = tokens[:, 1:]
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        hidden = mask[:, 1:] == 0
        targets[:, :-1][hidden] = -100
    return targets
