"""Measures of attention, routers and the residual stream in one pass over a few fixed examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import require_listed
from workbench.models.anatomy import Anatomy
from workbench.models.attention_weights import Unreadable
from workbench.models.batches import TokenSelection, inputs_of
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import call_model, config_options, on_device_of, unwrap, visible_attention
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import Measurement, complete, read_arrays
from workbench.models.router_weights import Router, router_weights
from workbench.monitors.attention_calls import BlockCalls, BlockNotes
from workbench.monitors.matrices import widened
from workbench.monitors.router_health import (
    dead_experts,
    expert_load,
    max_violation,
    routing_change,
    routing_entropy,
    routing_entropy_share,
)
from workbench.monitors.scalars import log_z


def activation_max(states: Tensor) -> Tensor:
    """Return the largest magnitude of any entry, max |h|.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), in the unit of the states; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.activation_max(torch.tensor([[1.0, -3.0], [2.0, 0.5]])).item()
        3.0

    See Also:
        `workbench.monitors.outlier_ratio`: The same relative to the median.
        `workbench.monitors.ModelProbe`: Measures it in every block of a model.
    """
    return widened(states).abs().amax((-2, -1))


def outlier_ratio(states: Tensor) -> Tensor:
    """Return the ratio of largest to median magnitude over all entries of all tokens, max |h| / median |h|.

    Defined by Sun et al. 2024 (arXiv:2402.17762).

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), at least 1. The median of an even number of entries is the lower of the two in the middle. inf if
        the median is 0; NaN if all entries are 0 or a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.outlier_ratio(torch.tensor([[1.0, -2.0, 2.0], [2.0, 100.0, 1.0]])).item()
        50.0

    See Also:
        `workbench.monitors.massive_activations`: Counts the outliers.
        `workbench.monitors.activation_max`: The largest magnitude itself.
    """
    size = widened(states).abs().flatten(-2)
    return size.amax(-1) / _median(size)


def massive_activations(states: Tensor, *, least: float = 100.0, ratio: float = 1000.0) -> Tensor:
    """Count the entries above 100 and above 1,000 times the median in magnitude (Sun et al. 2024, arXiv:2402.17762).

    Args:
        states: Shape (..., token, feature).
        least: Magnitude that an entry must exceed, in the unit of the states.
        ratio: Multiple of the median magnitude of all entries that it must exceed.

    Returns:
        Shape (...), a count; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> states = torch.ones(4, 8)
        >>> states[0, 3] = 2000.0
        >>> wb.monitors.massive_activations(states).item()
        1.0

    See Also:
        `workbench.monitors.outlier_ratio`: Largest over median magnitude.
    """
    size = widened(states).abs().flatten(-2)
    median = _median(size)
    count = ((size > least) & (size > ratio * median[..., None])).sum(-1)
    return count.to(size.dtype).masked_fill(median.isnan(), float("nan"))


def _median(size: Tensor) -> Tensor:
    """Return the lower median along the last dimension, NaN if an entry is NaN.

    `torch.median` raises an error on CUDA if the user asked for deterministic algorithms; sorting does not.
    """
    ordered = size.sort(-1).values  # NaN last
    return torch.where(ordered[..., -1].isnan(), ordered[..., -1], ordered[..., (size.shape[-1] - 1) // 2])


def kurtosis(states: Tensor) -> Tensor:
    """Return Pearson's kurtosis, mean((h - mean)^4) / mean((h - mean)^2)^2, over all entries of all tokens.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), dimensionless: 3 for a normal distribution (nothing is subtracted), about the number of entries if
        a single one dominates. NaN for constant states, and if a state is not finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.kurtosis(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).item()
        1.0

    See Also:
        `workbench.monitors.outlier_ratio`: Largest over median magnitude.
    """
    entries = widened(states).flatten(-2)
    centered = entries - entries.mean(-1, keepdim=True)
    centered = centered / centered.abs().amax(-1, keepdim=True)  # the fourth power of large states would overflow
    squares = centered.square()
    return squares.square().mean(-1) / squares.mean(-1).square()


def state_norm(states: Tensor) -> Tensor:
    """Return the mean over tokens of the Euclidean norm of a token's state.

    Args:
        states: Shape (..., token, feature).

    Returns:
        Shape (...), in the unit of the states; NaN where a state is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.state_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).item()
        3.0

    See Also:
        `workbench.flow.measure`: Signal gains of all blocks of a model.
    """
    return torch.linalg.vector_norm(widened(states), dim=-1).mean(-1)


PARTS = ("attention", "router", "activations")
_OF_STATES = {
    "activation_max": activation_max,
    "outlier_ratio": outlier_ratio,
    "kurtosis": kurtosis,
    "state_norm": state_norm,
}
_OF_ATTENTION = {
    "attention_logit_max": "logit_max",
    "attention_entropy": "entropy",
    "attention_entropy_share": "entropy_share",
}
_OF_ROUTING = (
    "routing_entropy",
    "routing_entropy_share",
    "max_violation",
    "dead_experts",
    "routing_change",
)


class ModelProbe:
    """Measurements of a model on fixed examples, repeated during training.

    The pass is separate from training: eval mode, no gradients, in the precision of the parameters. Modes, random
    states, parameters, buffers, attributes and hooks are left unchanged, so that training is not affected.

    Args:
        model: Module to measure.
        anatomy: Anatomy of its blocks.
        inputs: One batch of a few examples, in a form that `call_model` accepts, or a task. Tokens hidden by an
            ``attention_mask`` are excluded.
        routers: Result of `router_weights` for this model; None to call it, which runs the model once.

    Attributes:
        router_layers: Indices of the blocks with a router that can be read, in order.
        n_experts: Number of experts of each of them.
        unreadable: Reasons for values that are NaN in every measurement, one sentence each; filled by `take`. Values
            that are NaN because the model's activations or parameters are NaN are not included.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> tokens = torch.arange(16).reshape(2, 8)
        >>> probe = wb.monitors.ModelProbe(model, wb.read_anatomy(model, tokens), tokens)
        >>> taken = probe.take(["activations"])
        >>> sorted(taken), sorted(taken["activations"])
        (['activations'], ['activation_max', 'kurtosis', 'log_z', 'outlier_ratio', 'state_norm'])

    See Also:
        `workbench.Recorder`: Measures a model during training.
        `workbench.read_anatomy`: Reads the blocks of a model.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        inputs: Any,
        *,
        routers: Sequence[Router | Unreadable] | None = None,
    ) -> None:
        self.model, self.anatomy, self.inputs = unwrap(model), anatomy, inputs_of(inputs)
        found = router_weights(self.model, self._inputs_here(), anatomy=anatomy) if routers is None else routers
        self._routers = {router.layer: router for router in found if isinstance(router, Router)}
        self.router_layers = tuple(sorted(self._routers))
        self.n_experts = tuple(self._routers[layer].n_experts for layer in self.router_layers)
        self.unreadable = [router.reason for router in found if isinstance(router, Unreadable)]
        self._choices: dict[int, Tensor] = {}

    def take(self, parts: Collection[str] = PARTS) -> dict[str, dict[str, np.ndarray]]:
        """Run the model on the examples and measure it.

        Args:
            parts: Parts to measure: "attention", "router", "activations".

        Returns:
            One entry per part that the model has, float64:

            - ``attention``: ``attention_logit_max``, ``attention_entropy`` (nat) and ``attention_entropy_share``, each
              (layer, head), see `AttentionHealth`; padded with NaN where a layer has fewer heads. The scores are those
              of the model, with its masks, positions and scale; if there is cross-attention, those of self-attention.
              Absent if no layer has attention that can be seen.
            - ``router``: ``routing_entropy`` (nat), ``routing_entropy_share``, ``max_violation``, ``dead_experts`` and
              ``routing_change`` since the last measurement of this part (NaN at the first), each (router layer,), and
              ``expert_load``, (router layer, expert). All are NaN if a logit is NaN. Absent in dense models.
            - ``activations``: ``activation_max``, ``outlier_ratio``, ``kurtosis`` and ``state_norm`` of the states that
              leave a block, each (layer,), and ``log_z`` of the model's output, 0-dim: of its ``logits``, or of the
              (first) tensor that it returns.

        Raises:
            OptionError: If a part is not one of the three.
            AnatomyError: If the residual stream is not where it was when the anatomy was read.
        """
        return complete(self.taking(parts))

    def taking(self, parts: Collection[str]) -> Measurement[dict[str, dict[str, np.ndarray]]]:
        """Measure as `take` does; the model runs before the values are read."""
        require_listed("parts", parts, PARTS)
        run = _Pass(self.model, self.anatomy, self._routers, self._inputs_here(), parts)
        taken: dict[str, dict[str, _Column]] = {}
        if "attention" in parts and (attention := self._attention(self._with_attention(run))):
            taken["attention"] = attention
        if "router" in parts and self._routers:
            taken["router"] = self._routing(run)
        if "activations" in parts:
            taken["activations"] = self._activations(run)
        yield []
        return _read(taken)

    def _with_attention(self, run: _Pass) -> _Pass:
        """Return a pass in which attention is visible: an additional one if kernels hide it in the normal pass."""
        if not (options := visible_attention(self.model)):
            return run
        with config_options(options):
            return _Pass(self.model, self.anatomy, {}, self._inputs_here(), ["attention"])

    def _attention(self, run: _Pass) -> dict[str, _Column]:
        found = []
        for layer, site in enumerate(self.anatomy.sites):
            notes = run.notes.get(layer)
            found.append(notes.attention if notes else None)
            if found[-1] is None:
                self._note(
                    f"The attention of {site.name} cannot be observed: it has no self-attention, or computes it in a "
                    "custom kernel (try the model's 'sdpa' or 'eager' attention)."
                )
        if not any(found):
            return {}
        n_heads = max(len(health.entropy) for health in found if health)
        return {
            name: _Column([getattr(health, attribute) if health else None for health in found], n_heads)
            for name, attribute in _OF_ATTENTION.items()
        }

    def _routing(self, run: _Pass) -> dict[str, _Column]:
        values: dict[str, list[Tensor | None]] = {name: [] for name in (*_OF_ROUTING, "expert_load")}
        for layer in self.router_layers:
            of_layer = self._routing_of(layer, run.notes.get(layer))
            for name, column in values.items():
                column.append(of_layer.get(name))
        loads = _Column(values.pop("expert_load"), max(self.n_experts))
        return {name: _Column(column) for name, column in values.items()} | {"expert_load": loads}

    def _routing_of(self, layer: int, notes: BlockNotes | None) -> dict[str, Tensor]:
        router = self._routers[layer]
        if notes is None or notes.logits is None:
            self._note(f"The router of {router.site} was not called through {router.name}, so its logits are unknown.")
            return {}
        logits, choices = notes.routing(router)
        values = {"routing_entropy": routing_entropy(logits), "routing_entropy_share": routing_entropy_share(logits)}
        if choices is None:
            self._note(f"The choices of the router of {router.site} cannot be observed, only its logits.")
            return values
        if bool(logits.isnan().any()):  # the choice is not defined for NaN
            return values
        load = expert_load(choices, router.n_experts)
        values |= {"expert_load": load, "max_violation": max_violation(load), "dead_experts": dead_experts(load)}
        before = self._choices.get(layer)
        if before is not None and before.shape == choices.shape:
            values["routing_change"] = routing_change(before.to(choices.device), choices)
        self._choices[layer] = choices
        return values

    def _activations(self, run: _Pass) -> dict[str, _Column]:
        layers = range(len(self.anatomy.sites))
        values = {name: _Column([run.states.get(i, {}).get(name) for i in layers]) for name in _OF_STATES}
        logits = _logits_in(run.output)
        if logits is None:
            self._note("The model returns no logits, so log_z is unknown.")
            return values | {"log_z": _Column([None], is_single=True)}
        rows = run.rows_of(logits.shape[:-1])
        return values | {"log_z": _Column([log_z(logits if rows is None else logits[rows])], is_single=True)}

    def _note(self, reason: str) -> None:
        if reason not in self.unreadable:
            self.unreadable.append(reason)

    def _inputs_here(self) -> Any:
        return on_device_of(self.model, self.inputs)


class _Pass:
    """One forward pass of a `ModelProbe` and its measurements."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, routers: Mapping[int, Router], batch: Any, parts: Collection[str]
    ) -> None:
        self.model, self.sites, self.routers, self.batch, self.parts = model, anatomy.sites, routers, batch, parts
        self.layout = anatomy.layout
        self.notes: dict[int, BlockNotes] = {}
        self.states: dict[int, dict[str, Tensor]] = {}
        self._rows: dict[torch.Size, Tensor | None] = {}
        self._calls = BlockCalls()
        watched = self._calls if {"attention", "router"} & set(parts) else nullcontext()
        with undisturbed(model), BlockHooks(self.sites, self._enter, self._leave), watched:
            self.output = call_model(model, batch)

    def rows_of(self, leading: torch.Size) -> Tensor | None:
        """Return the boolean mask of the tokens to include, of the given leading shape; None for all."""
        if leading not in self._rows:
            chosen = TokenSelection(None, layout=self.layout).choose(leading, self.batch)
            rows = torch.zeros(leading.numel(), dtype=torch.bool)
            rows[chosen] = True
            self._rows[leading] = None if rows.numpy().all() else rows.view(leading)  # on the host
        return self._rows[leading]

    def _enter(self, call: BlockCall) -> None:
        leading = call.state_in.shape[:-1]
        router = self.routers.get(call.layer) if "router" in self.parts else None
        weight = self.model.get_parameter(router.name) if router else None
        axis, measures_attention = self.layout.states or 0, "attention" in self.parts
        notes = BlockNotes(leading, self.rows_of(leading), measures_attention, router, weight, batch_axis=axis)
        self.notes[call.layer] = self._calls.block = notes

    def _leave(self, call: BlockCall) -> None:
        self._calls.block = None
        if "activations" not in self.parts:
            return
        state = call.state_out.detach()
        rows = self.rows_of(state.shape[:-1])
        state = state.flatten(0, -2) if rows is None else state[rows.to(state.device)]
        self.states[call.layer] = {name: measure(state) for name, measure in _OF_STATES.items()}


def _logits_in(output: Any) -> Tensor | None:
    """Return the logits in an output, shape (..., class): those named ``logits``, or the output or its first tensor."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    is_logits = isinstance(output, Tensor) and output.ndim >= 2 and output.is_floating_point()
    return output.detach() if is_logits else None


@dataclass(frozen=True)
class _Column:
    """Measured tensors on their device: of at most ``width`` entries, or 0-dim without a width; None if missing."""

    values: Sequence[Tensor | None]
    width: int | None = None
    is_single: bool = False


def _read(taken: Mapping[str, Mapping[str, _Column]]) -> dict[str, dict[str, np.ndarray]]:
    """Return the values on the host, NaN if missing; the host waits for the device only once."""
    columns = [column for part in taken.values() for column in part.values()]
    rows = iter(read_arrays([value for column in columns for value in column.values if value is not None]))

    def array(column: _Column) -> np.ndarray:
        n, width = len(column.values), column.width
        out = np.full((n,) if width is None else (n, width), np.nan)
        for i, value in enumerate(column.values):
            if value is not None:
                row = next(rows)
                out[i, ...] = row if width is None else np.append(row, np.full(width - len(row), np.nan))
        return out[0] if column.is_single else out

    return {part: {name: np.asarray(array(column)) for name, column in of.items()} for part, of in taken.items()}
