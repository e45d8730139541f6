"""Access to the module of a model under study."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from workbench.errors import AnatomyError


class HoldsModel(Protocol):
    """Protocol of objects that hold a module as ``model``, such as subjects."""

    @property
    def model(self) -> nn.Module:
        """Module of the object."""


def module_of(model: HoldsModel | nn.Module) -> nn.Module:
    """Return the module of a subject; a module, or another object with ``get_parameter``, is returned unchanged.

    Raises:
        AnatomyError: If it is not a module, or is one that runs no hooks.
    """
    if isinstance(model, type):
        raise AnatomyError(
            f"The model is the class {model.__name__}; pass an instance of it, such as {model.__name__}(...).",
            name="model",
            value=model,
            expected="a model rather than a class",
        )
    module: Any = model if hasattr(model, "get_parameter") else getattr(model, "model", None)
    if not hasattr(module, "get_parameter"):
        raise AnatomyError(
            f"The model is a {type(model).__name__}, expected an nn.Module or a subject from wb.open_checkpoint().",
            name="model",
            value=model,
            expected="an nn.Module or a subject",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise AnatomyError(
            f"{getattr(module, 'original_name', type(module).__name__)} is compiled by TorchScript, which runs no "
            "hooks; pass the original module.",
            name="model",
            value=module,
            expected="not compiled by TorchScript",
        )
    if isinstance(module, GraphModule) and not _calls_modules(module):
        raise AnatomyError(
            f"{type(module).__name__} is an exported graph of operations, which calls no modules; pass the original "
            "module.",
            name="model",
            value=module,
            expected="a module that calls other modules",
        )
    return module


def _calls_modules(graph: GraphModule) -> bool:
    """Return whether a graph calls modules with parameters; graphs of ``torch.export`` do not."""
    called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    return any(True for module in called for _ in module.parameters())
