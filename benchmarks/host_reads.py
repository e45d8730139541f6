"""Count how often the host waits for the device, as reported by CUDA or, without a GPU, by the calls that would wait.

A GPU runs asynchronously until the host reads a value from its memory; then the host waits.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = str(Path(__file__).resolve().parent.parent)
#: Optimizers keep their step count on the host, and tasks generate batches there, so that their reads do not wait.
_OPTIMIZERS, _TASKS = str(Path("torch", "optim")), str(Path(ROOT, "workbench", "tasks"))
#: Files that read on behalf of their callers.
_READERS = (__file__, str(Path(ROOT, "workbench", "models", "readable_weights.py")))
_READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select}


class HostReads(TorchDispatchMode):
    """Context that counts, on the CPU, the calls that would make the host wait for a GPU.

    These are ``item()``, ``float()``, ``bool()`` and ``int()`` of a tensor, operations that need the number of nonzero
    entries (including masks as indices), ``tolist()``, and moves to the host. Calls on tensors that would be on the
    host anyway are counted too, so that the count is an upper bound.

    Attributes:
        places: Number of waits by line of this project.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._functions = _Moves(self)

    @property
    def n(self) -> int:
        """Number of waits."""
        return sum(self.places.values())

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._functions.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        is_mask = packet is torch.ops.aten.index and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if packet in _READS or is_mask:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Count one wait for the line of this project that causes it."""
        frame = sys._getframe(1)
        while frame is not None and not (
            _is_own(file := frame.f_code.co_filename) and frame.f_code.co_name != "__torch_dispatch__"
        ):
            if _OPTIMIZERS in file:
                return
            frame = frame.f_back
        if frame is not None and file.startswith(_TASKS):
            return
        self.places["elsewhere" if frame is None else _place(file, frame.f_lineno)] += 1


class _Moves(TorchFunctionMode):
    """Mode that counts the calls that move a tensor to the host, which are not dispatched for tensors of the host."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.tolist):
            self._reads.note()
        return func(*args, **(kwargs or {}))


class CudaWaits:
    """Context that counts the waits that CUDA reports, including copies to the device without ``non_blocking``.

    Attributes:
        places: Number of waits by line of this project.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    @property
    def n(self) -> int:
        """Number of waits."""
        return sum(self.places.values())

    def __enter__(self):
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._take
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exception):
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(*exception)

    def _take(self, message, category, filename, lineno, file=None, line=None):
        if "synchronizing CUDA operation" not in str(message):
            return
        own = [frame for frame in traceback.extract_stack() if _is_own(frame.filename)]
        self.places[_place(own[-1].filename, own[-1].lineno) if own else "elsewhere"] += 1


def _is_own(file: str) -> bool:
    """Return whether a file belongs to this project and reads values on its own behalf."""
    return file.startswith(ROOT) and ".venv" not in file and file not in _READERS


def _place(file: str, line: int | None) -> str:
    """Return a line of this project as "file:line"."""
    return f"{Path(file).relative_to(ROOT)}:{line}"


def counter_for(device: torch.device) -> HostReads | CudaWaits:
    """Create the counter for a device."""
    return CudaWaits() if device.type == "cuda" else HostReads()
