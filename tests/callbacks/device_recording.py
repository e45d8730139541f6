"""Records a run on a simulated device whose tensors have no values; prints its cost there as JSON.

PyTorch refuses to mix tensors of two devices there too. Call: python -m tests.callbacks.device_recording.
"""

from __future__ import annotations

import json
import sys
import traceback
import types
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import workbench as wb
from workbench.callbacks.recorder.collectors import Collectors, ModelReading
from workbench.models import readable_weights
from workbench.models.losses import largest_losses
from workbench.probes import precision

KIND, DEVICE = "somewhere", "somewhere:0"
N_LAYERS, N_STEPS = 3, 50
PACKAGE = str(Path(wb.__file__).parent)
READERS = (readable_weights.__file__, str(Path(PACKAGE, "models", "probing.py")))


def place() -> str:
    """Return the line of the package that is running."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE) and f.filename not in READERS]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "elsewhere"


class Costs(TorchDispatchMode):
    """Counts the waits of the host and the operations of each part in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        self.begin()

    def begin(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def note(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) and tensor.device.type == KIND:
            self.waits[place()] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.device.type == KIND and not func.is_view:
            self.operations[self.part] += 1
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source, target = (args[1], args[0]) if func.overloadpacket is torch.ops.aten.copy_ else (args[0], out)
            is_quick = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            comes = source.device.type == "cpu" and target.device.type == KIND
            leaves = source.device.type == KIND and target.device.type == "cpu"
            if leaves or (comes and not is_quick):
                self.waits[place()] += 1
        return out


COSTS = Costs()


def pretend_values() -> None:
    """Let tensors of the device return numbers, so that the host can read them."""
    for name, value in {"item": 1.0, "__bool__": False, "__float__": 1.0, "__int__": 1}.items():
        setattr(torch.Tensor, name, _asked(getattr(torch.Tensor, name), value))
    given = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self: np.ones(tuple(self.shape)) if isinstance(self, FakeTensor) else given(self)


def _asked(given: Any, value: Any) -> Any:
    def ask(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return given(self)
        COSTS.note(self)
        return value

    return ask


def register_device() -> None:
    _setup_privateuseone_for_python_backend(KIND)
    module = getattr(torch, KIND, None) or types.ModuleType(KIND)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.is_available, module.device_count, module.current_device = (lambda: True), (lambda: 1), (lambda: 0)
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, module)


def move(model: torch.nn.Module, reading: ModelReading, mode: FakeTensorMode) -> None:
    """Move a model to the device, and keep its reading on the host."""
    for recipe in (r for each in reading.query_keys for r in (each.query_recipe, each.key_recipe)):
        for name in ("index", "bias_index"):
            object.__setattr__(recipe, name, mode.from_tensor(getattr(recipe, name)))
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(weight).detach().to(DEVICE))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer).to(DEVICE)


def label_parts() -> None:
    for name in ("measure", "begin_update"):
        given = getattr(Collectors, name)

        def call(self, *args, given=given, name=name, **kwargs):
            before, COSTS.part = COSTS.part, kwargs.get("part", name)
            try:
                return given(self, *args, **kwargs)
            finally:
                COSTS.part = before

        setattr(Collectors, name, call)


def main() -> None:
    """Record a run, and print one entry for each of some steps."""
    register_device()
    pretend_values()
    label_parts()
    readable_weights.Tensor = FakeTensor  # tensors that are read together
    precision._disable_current_modes = nullcontext  # the mode that simulates the device must stay active
    model = wb.zoo.transformer(d_model=16, n_layers=N_LAYERS, n_heads=2, vocab_size=16, max_length=8)
    tokens = torch.randint(0, 16, (8, 8))
    # Projections of gradients would draw random numbers on the device, which has no generator.
    recorder, parts = wb.Recorder(every={"reduction": None}), []
    recorder.observe(lambda observation: parts.append(observation.part))
    recorder.prepare(model, tokens)  # the structure of a model is read from its values
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        move(model, recorder._reading, mode)
        inputs = mode.from_tensor(tokens).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        with COSTS, recorder.attach(model, optimizer):
            for step in range(N_STEPS):
                COSTS.begin()
                parts.clear()
                loss = cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                if step in (5, 9, 19, 49):
                    found[step] = {"parts": [*parts], "waits": {**COSTS.waits}, "operations": {**COSTS.operations}}
            COSTS.begin()
            largest_losses(model(inputs), inputs)
            found["largest losses"] = {"waits": {**COSTS.waits}}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
