"""A device whose tensors have shapes but no values, and a count of what a program asks of it.

PyTorch refuses to mix tensors of two devices there too, and the memory of a model is that of its shapes, so that the
cost of a measurement on a large model is counted without a GPU. One process can make up one device.
"""

from __future__ import annotations

import math
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

import workbench as wb
from workbench.callbacks.recorder import batch_watch, updates
from workbench.models import readable_weights
from workbench.probes import precision

KIND, DEVICE = "somewhere", "somewhere:0"
PACKAGE = str(Path(wb.__file__).parent)
#: Files that read on behalf of their callers.
READERS = (readable_weights.__file__, str(Path(PACKAGE, "models", "probing.py")))
#: Model of an H100: seconds of a launch, bytes per second of its memory and between it and the host, and operations per
#: second by dtype, without TF32.
LAUNCH, BANDWIDTH, LINK = 5e-6, 2.5e12, 2.5e10
FLOPS = {torch.float64: 4.5e13, torch.float32: 4.5e13, torch.bfloat16: 5e14, torch.float16: 5e14}
#: Tensors and entries of one launch of a fused operation on a list, by the number of lists that it reads or writes.
_TENSORS, _ENTRIES = (110, 64, 48, 36, 30), 320 * 2**16
_ATEN = torch.ops.aten
#: Operations that only allocate.
_FREE = {
    _ATEN.empty,
    _ATEN._unsafe_view,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
    _ATEN.detach,
    torch.ops.prim.device,
}


@dataclass
class Cost:
    """What one part asks of the device.

    Attributes:
        n_launches: Launched kernels.
        n_bytes: Bytes that they read and write.
        seconds: Their predicted time on an H100: of each the longest of launch, memory and arithmetic.
        n_reads: Copies to the host, including single numbers.
        n_sent: Bytes of these copies.
        waits: Number of waits of the host, by line of the package.
    """

    n_launches: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    n_reads: int = 0
    n_sent: int = 0
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def n_waits(self) -> int:
        """Number of waits of the host."""
        return sum(self.waits.values())

    def less(self, other: Cost) -> Cost:
        """Return what is left without another cost."""
        numbers = {name: value - vars(other)[name] for name, value in vars(self).items() if name != "waits"}
        return Cost(**numbers, waits=self.waits - other.waits)


class Costs(TorchDispatchMode):
    """Context that counts what each part asks of the device.

    Attributes:
        part: Name of the running part.
        of_part: Costs by name.
        are_late: Whether copies to the host do not wait, as on CUDA where the program asks for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part, self.are_late = "", False
        self.begin()

    def begin(self) -> None:
        """Forget all counts."""
        self.of_part: dict[str, Cost] = defaultdict(Cost)

    @property
    def waits(self) -> Counter[str]:
        """Number of waits of all parts, by line of the package."""
        return sum((cost.waits for cost in self.of_part.values()), Counter())

    def note_read(self, n_bytes: int = 0, *, waits: bool = True) -> None:
        """Count a copy to the host."""
        cost = self.of_part[self.part]
        cost.n_reads += 1
        cost.n_sent += n_bytes
        if waits:
            cost.waits[_place()] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        for each in tree_leaves(args):
            if isinstance(each, FakeTensor):
                each.constant = None  # a value that is known could not be copied to the device
        out = self._by_values(packet, args)
        out = func(*args, **kwargs) if out is None else out
        given, made = _here((args, kwargs)), _here(out)
        if func.is_view or packet in _FREE or not (given or made):
            return out
        n_linked = 0
        if packet in (_ATEN._to_copy, _ATEN.copy_):
            source, target = (args[1], args[0]) if packet is _ATEN.copy_ else (args[0], out)
            is_quick = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            n_linked = _n_bytes(target) if source.device.type != target.device.type else 0
            if source.device.type == KIND and target.device.type == "cpu":
                self.note_read(n_linked, waits=not (is_quick or self.are_late))
            elif source.device.type == "cpu" and not is_quick:
                self.of_part[self.part].waits[_place()] += 1
        cost, name, n_launches = self.of_part[self.part], packet.__name__, 1
        n_bytes = sum(map(_n_bytes, given if packet is _ATEN.copy_ else (*given, *made)))
        if name.startswith("_foreach"):
            lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)] or [given]
            depth = len(lists) + (isinstance(out, list | tuple) and not name.endswith("_norm"))
            if out is None and name != "_foreach_copy_":  # it is in place
                n_bytes += sum(map(_n_bytes, _here(lists[0])))
            n_entries = sum(each.numel() for each in _here(lists[0]))
            n_launches = math.ceil(len(lists[0]) / _TENSORS[min(depth, 5) - 1]) + n_entries // _ENTRIES
            n_launches *= 2 if name.endswith("_norm") else 1
        elif name == "cat":
            n_launches = math.ceil(len(given) / 128)
        n_flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        speed = FLOPS.get((made or given)[0].dtype, FLOPS[torch.float32])
        cost.n_launches += n_launches
        cost.n_bytes += n_bytes
        cost.seconds += max(n_launches * LAUNCH, n_bytes / BANDWIDTH, n_linked / LINK, n_flops / speed)
        return out

    def _by_values(self, packet: Any, args: Any) -> torch.Tensor | bool | None:
        """Return the result of an operation whose kind depends on values, as if they were true; None for others."""
        source, mask, shape = args[0] if args else None, None, ()
        if packet is _ATEN.equal:
            if source.device.type == KIND:
                self.note_read()
            return True
        if not isinstance(source, FakeTensor):
            return None
        if packet is _ATEN.nonzero:
            mask, shape = source, (source.numel(), source.ndim)
        elif packet is _ATEN.index:
            mask = next((each for each in args[1] if each is not None and each.dtype == torch.bool), None)
            if mask is not None:
                first = next(i for i, each in enumerate(args[1]) if each is mask)
                shape = (*source.shape[:first], mask.numel(), *source.shape[first + mask.ndim :])
        if mask is None:
            return None
        if source.device.type == KIND:
            self.note_read()
        return source.new_empty(shape, dtype=torch.int64 if mask is source else source.dtype)


def _here(found: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor) and each.device.type == KIND]


def _n_bytes(tensor: torch.Tensor) -> int:
    n = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return n * tensor.element_size()


def _place() -> str:
    """Return the line of the package that is running."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE) and f.filename not in READERS]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "elsewhere"


#: The costs of this process.
COSTS = Costs()


class _Generator(torch.Generator):
    """Generator that counts for the made-up device too, which has no numbers to draw."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == KIND else device)


def make_up() -> None:
    """Register the device, and let its tensors return numbers, so that the host can read them."""
    if torch.Generator is _Generator:
        return
    _setup_privateuseone_for_python_backend(KIND)
    module = getattr(torch, KIND, None) or types.ModuleType(KIND)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.is_available, module.device_count, module.current_device = (lambda: True), (lambda: 1), (lambda: 0)
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, module)
    torch.Generator = _Generator
    for name, value in {"item": 1.0, "__bool__": False, "__float__": 1.0, "__int__": 1}.items():
        setattr(torch.Tensor, name, _asked(getattr(torch.Tensor, name), value))
    given = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self: np.ones(tuple(self.shape)) if isinstance(self, FakeTensor) else given(self)
    _foreach_supported_types.append(FakeTensor)
    for reader in (readable_weights, batch_watch, updates):
        reader.Tensor = FakeTensor  # its tensors are those whose type is that of ordinary ones
    precision._disable_current_modes = nullcontext  # the mode that simulates the device must stay active


def _asked(given: Any, value: Any) -> Any:
    def ask(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return given(self)
        if self.device.type == KIND:
            COSTS.note_read()
        return value

    return ask


def move(model: torch.nn.Module, reading: Any, mode: FakeTensorMode) -> None:
    """Move a model to the device, and keep its reading by a recorder on the host."""
    for recipe in (r for each in reading.query_keys for r in (each.query_recipe, each.key_recipe)):
        for name in ("index", "bias_index"):
            object.__setattr__(recipe, name, mode.from_tensor(getattr(recipe, name)))
    moved: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in moved:
                    moved[id(weight)] = torch.nn.Parameter(mode.from_tensor(weight).detach().to(DEVICE))
                module._parameters[name] = moved[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer).to(DEVICE)


@contextmanager
def labelled(part: str) -> Iterator[None]:
    """Context in which the costs are those of a part."""
    outer, COSTS.part = COSTS.part, part
    try:
        yield
    finally:
        COSTS.part = outer
