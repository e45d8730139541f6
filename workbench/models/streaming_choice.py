"""Whether a checkpoint is opened into memory or stays on disk, and the device on which it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.io.memory import free_memory


@dataclass(frozen=True)
class StreamingChoice:
    """Whether the weights of a checkpoint stay on disk, and the device on which it runs.

    Attributes:
        streaming: True, False, or "auto" for what takes more than half of the free memory.
        device: Device on which the model runs; None: where it is.
    """

    streaming: bool | str
    device: torch.device | None

    @classmethod
    def of(cls, streaming: bool | str, device: torch.device | str | None) -> StreamingChoice:
        """The choice from the arguments of `open_checkpoint`.

        Raises:
            CheckpointError: If a word or a device is not known.
        """
        if streaming is not True and streaming is not False and streaming != "auto":
            raise CheckpointError(f"streaming={streaming!r} is not known; pass True, False or 'auto'.")
        if device is None:
            return cls(streaming, None)
        try:
            place = torch.device(device)
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise CheckpointError(f"device={device!r} is not available here; pass 'cpu'.") from error
        return cls(streaming, place)

    def is_wanted(self, n_bytes: int, *, why_not: str = "", is_strict: bool = True) -> bool:
        """Whether weights of this many bytes stay on disk.

        Args:
            n_bytes: Their bytes.
            why_not: Why they cannot, as a clause; empty if they can.
            is_strict: Whether weights that do not fit are refused; others are made up in memory.

        Raises:
            CheckpointError: If they are asked to stay there and cannot.
        """
        why_not = why_not or ("" if is_strict else "strict=False makes up what is missing, in memory")
        if self.streaming is True and why_not:
            raise CheckpointError(f"This checkpoint cannot be streamed: {why_not}; open it with streaming=False.")
        if self.streaming == "auto":
            return not why_not and n_bytes > free_memory(self.device or "cpu") / 2
        return bool(self.streaming)

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, if one is asked for."""
        return model if self.device is None else model.to(self.device)
