"""Traces of the operations inside each block: projections, norms, attention scores and selections."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workbench.models.anatomy import Anatomy
from workbench.models.block_calls import Site
from workbench.models.block_hooks import BlockCall, BlockHooks, raise_on_unknown
from workbench.models.calling import config_options, is_split, run_model, visible_attention
from workbench.models.probing import HookRequest, storage_pointer, undisturbed, watch
from workbench.models.readable_weights import full_tensor

#: Largest relative difference between the outputs of a module and those of the matrix computed for it.
_LARGEST_GAP = 1e-3


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear map, or of an adapter of one; None for other modules."""
    inner: Any = getattr(module, "base_layer", module)
    n_inputs, n_outputs = getattr(inner, "in_features", None), getattr(inner, "out_features", None)
    return (n_inputs, n_outputs) if isinstance(n_inputs, int) and isinstance(n_outputs, int) else None


def matrix_of(module: nn.Module, n_inputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix (output, input) and bias (output,) that a module applies in eval mode to inputs like these."""
    with undisturbed(module):
        bias = module(like.new_zeros(1, n_inputs))
        rows = module(torch.eye(n_inputs, dtype=like.dtype, device=like.device)) - bias
    return rows.T.detach().clone(), bias[0].detach().clone()


def effective_map(module: nn.Module, into: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return matrix and bias of a module with these inputs and outputs; None if it is not a linear map."""
    try:
        weight, bias = matrix_of(module, into.shape[-1], into)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None
    expected = into.double() @ weight.double().T + bias.double()
    rounding = max(_LARGEST_GAP, 4 * torch.finfo(out.dtype).eps)
    gap = float((expected - out.double()).norm())
    return (weight, bias) if gap <= rounding * float(out.double().norm()) else None


Finding = TypeVar("Finding")


@dataclass(frozen=True)
class ParameterSlice:
    """Rows or columns of a parameter that form an operand."""

    name: str  # path in the model; of a module whose matrix is computed if `is_module`
    axis: int  # axis of the parameter that counts outputs: 0 for [out, in], 1 for [in, out]; 0 for a vector
    start: int  # index of the first output along that axis
    size: int  # number of outputs
    is_module: bool = False


@dataclass(frozen=True)
class Projection:
    """A linear map that was applied; weight and bias are None unless parameters."""

    weight: ParameterSlice | None
    bias: ParameterSlice | None
    bias_value: Tensor | None  # bias that was added
    into: Tensor  # shape (..., feature)
    out: Tensor  # shape (..., output)


@dataclass(frozen=True)
class Normalization:
    """A norm that was applied; names of gain and bias are None unless parameters."""

    into: Tensor
    out: Tensor
    gain: str | None
    bias: str | None
    gain_value: Tensor | None
    bias_value: Tensor | None


@dataclass(frozen=True)
class Scores:
    """Attention scores that were computed."""

    query: Tensor  # shape (..., token, head_dim)
    key: Tensor  # shape (..., token, head_dim)
    n_projections: int  # number of linear maps that the block applied before


@dataclass(frozen=True)
class PackedAttention:
    """A call of PyTorch's multi-head attention, whose layout PyTorch documents."""

    query: Tensor
    key: Tensor
    n_heads: int
    query_weight: ParameterSlice | None
    key_weight: ParameterSlice | None
    query_bias: ParameterSlice | None
    key_bias: ParameterSlice | None


@dataclass(frozen=True)
class TopChoice:
    """A selection of the largest values along the last dimension."""

    scores: Tensor  # values that were compared
    n_selected: int  # number of values selected
    is_top_k: bool  # whether it is certainly one; a maximum may also keep an exponential in range


@dataclass
class BlockTrace:
    """The operations inside one call of a block."""

    state: Tensor
    projections: list[Projection] = field(default_factory=list)
    norms: list[Normalization] = field(default_factory=list)
    attentions: list[Scores | PackedAttention] = field(default_factory=list)
    selections: list[TopChoice] = field(default_factory=list)


def trace_blocks(
    model: nn.Module, inputs: Any, anatomy: Anatomy, analyze: Callable[[int, Site, BlockTrace], Finding]
) -> list[Finding]:
    """Run the model once and return what ``analyze`` finds in each block as it finishes, one trace at a time."""
    findings: dict[int, Finding] = {}
    recorder = _Recorder(model)

    def enter(call: BlockCall) -> None:
        recorder.trace = BlockTrace(call.state_in.detach())

    def leave(call: BlockCall) -> None:
        trace, recorder.trace = recorder.trace, None
        if trace is not None:
            with torch._C.DisableTorchFunction():
                findings[call.layer] = analyze(call.layer, call.site, trace)

    def leaf(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        recorder.record_leaf(module, args, output)

    hooks = BlockHooks(anatomy.sites, enter, leave, on_unknown=raise_on_unknown)
    leaves = [part for part in hooks.parts if not any(True for _ in part.children())]
    requests: list[HookRequest] = [(part, leaf, False) for part in leaves]
    for part in hooks.parts if not is_split(model) else ():  # a part of a sharded model cannot be run by itself
        if linear_widths(part) is not None:
            requests += [(part, recorder.begin_linear, True), (part, recorder.end_linear, False)]
    options = config_options(visible_attention(model))
    with undisturbed(model), options, hooks, watch(requests), recorder:
        run_model(model, inputs)
    return [findings[layer] for layer in sorted(findings)]


#: Functions whose result may be a copy of a parameter.
CASTS = frozenset({"to", "type", "float", "half", "bfloat16", "double", "contiguous", "type_as", "clone"})


class Arguments:
    """Arguments of one call of a torch function."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def packed(self) -> tuple[dict[str, Any], Any, Any]:
        """Return the arguments of PyTorch's multi-head attention by name, and its query and key weights."""
        bound = inspect.signature(functional.multi_head_attention_forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["use_separate_proj_weight"]:
            return given, given["q_proj_weight"], given["k_proj_weight"]
        return given, *given["in_proj_weight"].chunk(3)[:2]


class _Recorder(TorchFunctionMode):
    """Mode that records the relevant calls while a block runs, without changing them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace: BlockTrace | None = None
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._note(name, parameter)
        self._paths = {module: name for name, module in model.named_modules()}
        self._linear: list[tuple[nn.Module, int]] = []
        # Copies of parameters in another precision, kept so that their addresses are not reused.
        self._copies: list[Tensor] = []

    def _note(self, name: str, tensor: Tensor) -> None:
        if (pointer := storage_pointer(tensor)) is not None:
            self._parameters.setdefault(pointer, []).append((name, tensor.detach()))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        before = _Before(self, self.trace, func, args, kwargs) if self.trace is not None else None
        result = func(*args, **kwargs)
        if before is not None and self.trace is before.trace:
            before.record(result)
        return result

    def record_leaf(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Record a norm that is a custom module; those of PyTorch are recorded as functions."""
        if self.trace is None or not args or type(module).__module__.startswith("torch.nn.modules"):
            return
        if not isinstance(output, Tensor) or not isinstance(args[0], Tensor):
            return
        named = dict(module.named_parameters(recurse=False))
        gain, bias = named.pop("weight", None), named.pop("bias", None)
        is_map = args[0].shape != output.shape or named or (gain is not None and gain.shape[-1:] != output.shape[-1:])
        if is_map:
            return
        if gain is not None and gain.ndim > 1 and gain.numel() != output.shape[-1] * output.shape[-2]:
            return
        self.trace.norms.append(self.norm(args[0], output, gain, bias))

    def begin_linear(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the beginning of a call of a module that should be one linear map."""
        if self.trace is not None:
            self._linear.append((module, len(self.trace.projections)))

    def end_linear(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Record the module itself as a linear map if it multiplied by no parameter, or by more than one."""
        trace = self.trace
        if trace is None or not self._linear or self._linear[-1][0] is not module:
            return
        _, begin = self._linear.pop()
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        inside = trace.projections[begin:]
        is_adapted = hasattr(module, "base_layer")  # its adapter may still be zero
        if not is_adapted and any(p.weight is not None and torch.equal(p.out, output) for p in inside):
            return
        self.trace = None
        with torch._C.DisableTorchFunction():
            found = effective_map(module, args[0], output)
        self.trace = trace
        if found is None:
            return
        kept = [] if is_adapted else [p for p in inside if not torch.equal(p.out, output)]
        place = ParameterSlice(self._paths[module], 0, 0, output.shape[-1], is_module=True)
        _, bias = found
        trace.projections[begin:] = kept
        has_bias = bool(bias.any())
        trace.projections.append(
            Projection(place, place if has_bias else None, bias if has_bias else None, _keep(args[0]), _keep(output))
        )

    def norm(self, into: Tensor, out: Tensor, gain: Tensor | None, bias: Tensor | None) -> Normalization:
        """Return the record of a norm."""
        return Normalization(_keep(into), _keep(out), self.name(gain), self.name(bias), gain, bias)

    def name(self, tensor: Any) -> str | None:
        """Return the name of a parameter; None if the tensor is no full parameter."""
        place = self.locate(tensor)
        return place[0] if place is not None and place[1].shape == tensor.shape else None

    def locate(self, tensor: Any) -> tuple[str, Tensor] | None:
        """Return name and value of the parameter whose memory a tensor views; None if there is none."""
        pointer = storage_pointer(tensor)
        owners = self._parameters.get(pointer, []) if pointer is not None else []
        inside = [
            (name, owner)
            for name, owner in owners
            if 0 <= tensor.storage_offset() - owner.storage_offset() < max(1, owner.numel())
        ]
        return inside[0] if inside else None

    def slice(self, operand: Any, *, outputs_last: bool = False) -> ParameterSlice | None:
        """Return the part of a parameter that an operand is; None if it is no parameter or another kind of view."""
        place = self.locate(operand)
        if place is None:
            return None
        name, owner = place
        offset = operand.storage_offset() - owner.storage_offset()
        if operand.ndim == 1 and owner.ndim == 1 and operand.stride() == owner.stride():
            return ParameterSlice(name, 0, offset // max(1, owner.stride(0)), operand.shape[0])
        if operand.ndim != 2 or owner.ndim != 2:
            return None
        operand = operand.T if outputs_last else operand
        for axis in (0, 1):
            view = owner if axis == 0 else owner.T
            start, rest = divmod(offset, view.stride(0)) if axis == 0 else (offset, 0)
            if operand.stride() == view.stride() and operand.shape[1] == view.shape[1] and not rest:
                return ParameterSlice(name, axis, start, operand.shape[0])
        return None

    def note_copy(self, source: Any, result: Any) -> None:
        """Record that a tensor is a copy of a parameter in another precision."""
        name = self.name(source)
        if name is None or not isinstance(result, Tensor) or result.shape != source.shape:
            return
        if storage_pointer(result) != storage_pointer(source):
            self._copies.append(result)
            self._note(name, result)


class _Before(Arguments):
    """Arguments of one call of a torch function, recorded before its result is known."""

    def __init__(self, recorder: _Recorder, trace: BlockTrace, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self.recorder, self.trace = recorder, trace
        self.name = getattr(func, "__name__", "").strip("_")

    def record(self, result: Any) -> None:
        handler = getattr(self, f"_on_{self.name}", None)
        if handler is not None:
            handler(result)
        elif self.name in CASTS and self.args:
            self.recorder.note_copy(self.args[0], result)

    def _on_linear(self, result: Tensor) -> None:
        weight, bias = self.get(1, "weight"), self.get(2, "bias")
        self._project(self.get(0, "input"), self.recorder.slice(weight), bias, result)

    def _on_addmm(self, result: Tensor) -> None:
        bias, into, weight = self.get(0, "input"), self.get(1, "mat1"), self.get(2, "mat2")
        self._project(into, self.recorder.slice(weight, outputs_last=True), bias, result)

    def _on_matmul(self, result: Tensor) -> None:
        a, b = self.get(0, "input"), self.get(1, "other", self.kwargs.get("mat2"))
        weight = self.recorder.slice(b, outputs_last=True)
        if weight is not None:
            self._project(a, weight, None, result)
        elif isinstance(b, Tensor) and a.ndim > 2 and b.ndim > 2:
            self._score(a, b.transpose(-1, -2))

    _on_bmm = _on_mm = _on_matmul

    def _on_baddbmm(self, result: Tensor) -> None:
        self._score(self.get(1, "batch1"), self.get(2, "batch2").transpose(-1, -2))

    def _on_einsum(self, result: Tensor) -> None:
        operands = self.args[1:] if len(self.args) == 3 else self.get(1, "operands", ())
        equation = self.args[0]
        if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:
            return
        inputs, out = equation.replace(" ", "").split("->")
        first, second = inputs.split(",")
        shared = set(first) & set(second)
        batch = [i for i in out if i in shared]
        contracted = [i for i in first if i in shared and i not in out]
        rows = [[i for i in names if i not in shared] for names in (first, second)]
        if len(contracted) != 1 or any(len(r) != 1 for r in rows) or len(batch) < 1:
            return
        views = [
            operand.permute([names.index(i) for i in (*batch, row[0], contracted[0])])
            for operand, names, row in zip(operands, (first, second), rows, strict=True)
        ]
        self._score(*views)

    def _on_scaled_dot_product_attention(self, result: Tensor) -> None:
        self._score(self.get(0, "query"), self.get(1, "key"))

    def _on_multi_head_attention_forward(self, result: Any) -> None:
        given, *weights = self.packed()
        bias, width = given["in_proj_bias"], given["embed_dim_to_check"]
        biases = [None, None] if bias is None else bias[: 2 * width].chunk(2)
        slices = [self.recorder.slice(part) for part in (*weights, *biases)]
        self.trace.attentions.append(PackedAttention(given["query"], given["key"], given["num_heads"], *slices))

    def _on_rms_norm(self, result: Tensor) -> None:
        self._normalize(self.get(2, "weight"), None, result)

    def _on_layer_norm(self, result: Tensor) -> None:
        self._normalize(self.get(2, "weight"), self.get(3, "bias"), result)

    def _on_topk(self, result: Any) -> None:
        scores, dim = self.get(0, "input"), self.get(2, "dim", -1)
        if isinstance(scores, Tensor) and dim in (-1, scores.ndim - 1):
            self.trace.selections.append(TopChoice(_keep(scores), int(self.get(1, "k")), True))

    def _on_argmax(self, result: Any) -> None:
        scores, dim = self.get(0, "input"), self.get(1, "dim")
        if isinstance(scores, Tensor) and isinstance(dim, int) and dim in (-1, scores.ndim - 1):
            self.trace.selections.append(TopChoice(_keep(scores), 1, False))

    _on_max = _on_argmax

    def _normalize(self, gain: Any, bias: Any, result: Tensor) -> None:
        self.trace.norms.append(self.recorder.norm(self.get(0, "input"), result, gain, bias))

    def _project(self, into: Tensor, weight: ParameterSlice | None, bias: Any, result: Tensor) -> None:
        bias = bias if isinstance(bias, Tensor) else None
        place = self.recorder.slice(bias) if bias is not None else None
        self.trace.projections.append(Projection(weight, place, bias, _keep(into), _keep(result)))

    def _score(self, query: Tensor, key: Tensor) -> None:
        if query.shape[-1] == key.shape[-1]:
            self.trace.attentions.append(Scores(_keep(query), _keep(key), len(self.trace.projections)))


def _keep(tensor: Tensor) -> Tensor:
    """Return a copy, because later operations may write in place."""
    return full_tensor(tensor.detach()).clone()
