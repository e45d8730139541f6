"""Hooks on a model in training that neither compiled code nor a copy of the model contains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack


class ModelHook:
    """A forward hook that acts where a model is called, and does nothing where it is compiled, exported or transformed.

    A graph that is traced contains nothing of it, so that it adds no graph break. A copy of the model, by ``deepcopy``,
    ``pickle`` or ``torch.save``, has a function of Python in its place that does nothing.

    Args:
        act: Function with the arguments of a hook.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        from torch._dynamo.eval_frame import skip_code

        self._act = torch.compiler.disable(act)
        skip_code(ModelHook.__call__.__code__)  # called within a compiled model but outside of its graphs

    def __call__(self, *call: Any) -> None:
        """Act, unless the model is traced."""
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or peek_interpreter_stack() is not None
        if not is_traced:
            self._act(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the hook of a copy: a method that accepts any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")
