"""Merge the inputs of several batches, count their states, and compute checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workbench.tasks.task import STATES_PER_IMAGE, Inputs


def n_states(inputs: Inputs) -> int:
    """Count the token states of a batch; masked ones do not count, and an image counts as 16."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        return int((mask != 0).sum()) if mask is not None and mask.ndim == 2 else n_states(next(iter(inputs.values())))
    if not inputs.is_floating_point():
        return inputs.numel()
    if inputs.ndim == 4:
        return len(inputs) * STATES_PER_IMAGE
    return inputs.shape[0] * inputs.shape[1] if inputs.ndim == 3 else len(inputs)


def enough_inputs(batches: Iterable[tuple[Inputs, Tensor]], n_tokens: int) -> list[Inputs]:
    """Collect the inputs of the first batches that can be merged, until they have ``n_tokens`` states."""
    chosen: list[Inputs] = []
    n_chosen = 0
    for inputs, _ in batches:
        if not chosen or _form(inputs) == _form(chosen[0]):
            chosen.append(copied(inputs))
            n_chosen += n_states(inputs)
        if n_chosen >= n_tokens:
            break
    return chosen


def merged(batches: list[Inputs]) -> Inputs:
    """Merge batches of one form; with a mask, tensors of its shape are padded at the end to the longest."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat([batch for batch in batches if isinstance(batch, Tensor)])
    named = [batch for batch in batches if not isinstance(batch, Tensor)]
    longest = max((batch["attention_mask"].shape[-1] for batch in named if "attention_mask" in batch), default=0)

    def merged_under(name: str) -> Tensor:
        if not _is_masked(name, first):
            return torch.cat([batch[name] for batch in named])
        return torch.cat([functional.pad(batch[name], (0, longest - batch[name].shape[1])) for batch in named])

    return {name: merged_under(name) for name in first}


def copied(inputs: Inputs) -> Inputs:
    """Copy the tensors of inputs."""
    return {n: value.clone() for n, value in inputs.items()} if isinstance(inputs, Mapping) else inputs.clone()


def checksum(batch: tuple[Inputs, Tensor]) -> str:
    """Compute a checksum of a batch: sixteen hexadecimal digits."""
    inputs, targets = batch
    tensors = {**(inputs if isinstance(inputs, Mapping) else {"": inputs}), "targets": targets}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _form(inputs: Inputs) -> Any:
    """Return the properties that must be equal for batches to be merged."""
    if isinstance(inputs, Mapping):
        return {name: "masked" if _is_masked(name, inputs) else value.shape[1:] for name, value in inputs.items()}
    return inputs.shape[1:]


def _is_masked(name: str, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor has the shape of the mask, which marks the end of each sequence."""
    mask = inputs.get("attention_mask")
    return mask is not None and mask.ndim == 2 and inputs[name].shape == mask.shape
