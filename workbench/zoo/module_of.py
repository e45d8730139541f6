"""The module of a model under study."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from workbench.errors import AnatomyError


class HoldsModel(Protocol):
    """The part of a model under study that is used here: it holds the module as ``model``."""

    @property
    def model(self) -> nn.Module:
        """The module."""


def module_of(model: HoldsModel | nn.Module) -> nn.Module:
    """The module of a subject; a module, or what stands for one and gives its parameters by name, is its own.

    Raises:
        AnatomyError: If it is no module, or one that runs no hooks.
    """
    if isinstance(model, type):
        raise AnatomyError(
            f"The model is the class {model.__name__}; pass a model, not its class, such as {model.__name__}(...)."
        )
    module: Any = model if hasattr(model, "get_parameter") else getattr(model, "model", None)
    if not hasattr(module, "get_parameter"):
        raise AnatomyError(
            f"A model is a {type(model).__name__}, expected an nn.Module or a subject from wb.open_checkpoint()."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise AnatomyError(
            f"{getattr(module, 'original_name', type(module).__name__)} is compiled by TorchScript, which runs no "
            "hooks; pass the module that it was made from."
        )
    if isinstance(module, GraphModule) and not _calls_modules(module):
        raise AnatomyError(
            f"{type(module).__name__} is an exported graph of operations, which calls no modules; pass the module that "
            "it was made from."
        )
    return module


def _calls_modules(graph: GraphModule) -> bool:
    """Whether a graph calls modules with parameters; that of ``torch.export`` has none."""
    called = [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]
    return any(True for module in called for _ in module.parameters())
