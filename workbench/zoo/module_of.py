"""Access to the module of a model under study."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from workbench.errors import AnatomyError, held_module


class HoldsModel(Protocol):
    """Protocol of objects that hold a module as ``model``, such as subjects."""

    @property
    def model(self) -> nn.Module:
        """Module of the object."""


def module_of(model: HoldsModel | nn.Module) -> nn.Module:
    """Return the module of a subject; a module, or another object with ``get_parameter``, is returned unchanged."""
    module: Any = held_module(model)
    if isinstance(module, torch.jit.ScriptModule):
        raise AnatomyError(
            f"{getattr(module, 'original_name', type(module).__name__)} is TorchScript; pass the original module."
        )
    if isinstance(module, GraphModule) and not _calls_modules(module):
        raise AnatomyError(f"{type(module).__name__} is an exported graph, which calls no modules; pass the original.")
    return module


def _calls_modules(graph: GraphModule) -> bool:
    """Return whether a graph calls modules with parameters; graphs of ``torch.export`` do not."""
    called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    return any(True for module in called for _ in module.parameters())
