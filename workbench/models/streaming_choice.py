"""Choice between loading a checkpoint into memory and streaming it from disk, and of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.io.memory import free_memory


@dataclass(frozen=True)
class StreamingChoice:
    """Choice of whether the weights of a checkpoint stay on disk, and on which device the model runs.

    Attributes:
        streaming: True, False, or "auto" to stream weights that need more than half of the free memory.
        device: Device on which the model runs; None to leave it where it is.
    """

    streaming: bool | str
    device: torch.device | None

    @classmethod
    def of(cls, streaming: bool | str, device: torch.device | str | None) -> StreamingChoice:
        """Create the choice from the arguments of `open_checkpoint`.

        Raises:
            CheckpointError: If ``streaming`` is not one of the allowed values, or the device is not available.
        """
        if streaming is not True and streaming is not False and streaming != "auto":
            raise CheckpointError.of("streaming", streaming, (True, False, "auto"))
        if device is None:
            return cls(streaming, None)
        try:
            place = torch.device(device)
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise CheckpointError.of("device", str(device), "an available device", remedy="pass 'cpu'") from error
        return cls(streaming, place)

    def is_streamed(self, n_bytes: int, *, why_not: str = "", is_strict: bool = True) -> bool:
        """Return whether weights of a given size stay on disk.

        Args:
            n_bytes: Size of the weights in bytes.
            why_not: Why they cannot stay on disk, as a clause; empty if they can.
            is_strict: Whether weights that do not fit raise an exception; otherwise missing ones are initialized in
                memory.

        Raises:
            CheckpointError: If streaming is required but not possible.
        """
        why_not = why_not or ("" if is_strict else "with strict=False, missing weights are initialized in memory")
        if self.streaming is True and why_not:
            raise CheckpointError(
                f"This checkpoint cannot be streamed: {why_not}; open it with wb.open_checkpoint(..., streaming=False)."
            )
        if self.streaming == "auto":
            return not why_not and n_bytes > free_memory(self.device or "cpu") / 2
        return bool(self.streaming)

    def placed(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, if there is one, and return it."""
        return model if self.device is None else model.to(self.device)
