"""Measures of attention, routers and the residual stream in one pass over a few fixed examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
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
from workbench.models.readable_weights import Measurement, complete, on_device
from workbench.models.router_weights import Router, router_weights
from workbench.monitors.attention_calls import BlockCalls, BlockNotes
from workbench.monitors.attention_health import attention_health
from workbench.monitors.matrices import widened
from workbench.monitors.router_health import dead_experts, expert_load, max_violation, routing_change, routing_entropy
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
    return widened(states.abs().amax((-2, -1)))


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
    size = states.abs().flatten(-2)
    return widened(size.amax(-1)) / widened(_median(size))


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

    On CUDA, `torch.median` and `torch.kthvalue` raise an error if the user asked for deterministic algorithms; sorting
    does not, but takes seven times as long on the host.
    """
    middle = (size.shape[-1] - 1) // 2
    if size.device.type == "cpu":
        value = size.kthvalue(middle + 1, -1).values
        return value.masked_fill(size.amax(-1).isnan(), torch.nan)
    ordered = size.sort(-1).values  # NaN last
    return torch.where(ordered[..., -1].isnan(), ordered[..., -1], ordered[..., middle])


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
    # The fourth power of large states would overflow.
    squares = centered.div_(torch.linalg.vector_norm(centered, torch.inf, -1, keepdim=True)).square_()
    return squares.shape[-1] * (torch.linalg.vector_norm(squares, dim=-1) / squares.sum(-1)).square()


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
#: Tensors on a device, and the function from their values to the variables of a part.
_Part = tuple[list[Tensor], Callable[[list[np.ndarray]], dict[str, np.ndarray]]]
#: Number of entries of states to measure at a time: on the host as many as fit its caches.
_ENTRIES_ON_HOST, _ENTRIES_ON_DEVICE = 2**17, 2**23
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
_OF_ROUTING = ("routing_entropy", "routing_entropy_share", "max_violation", "dead_experts", "routing_change")


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
        self, model: nn.Module, anatomy: Anatomy, inputs: Any, *, routers: Sequence[Router | Unreadable] | None = None
    ) -> None:
        self.model, self.anatomy, self.inputs = unwrap(model), anatomy, inputs_of(inputs)
        found = router_weights(self.model, self._inputs_here(), anatomy=anatomy) if routers is None else routers
        self._routers = {router.layer: router for router in found if isinstance(router, Router)}
        self.router_layers = tuple(sorted(self._routers))
        self.n_experts = tuple(self._routers[layer].n_experts for layer in self.router_layers)
        self.unreadable = [router.reason for router in found if isinstance(router, Unreadable)]
        self._choices: dict[int, np.ndarray] = {}
        self._rows: dict[torch.Size, tuple[Tensor, Tensor] | None] = {}

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

    def taking(self, parts: Collection[str] = PARTS) -> Measurement[dict[str, dict[str, np.ndarray]]]:
        """Measure what `take` returns; the host does not wait."""
        require_listed("parts", parts, PARTS)
        taken = self._launch(parts)
        found = iter((yield [tensor for tensors, _ in taken.values() for tensor in tensors]))
        return {part: finish([next(found) for _ in tensors]) for part, (tensors, finish) in taken.items()}

    def _launch(self, parts: Collection[str]) -> dict[str, _Part]:
        """Return the measurements of each part; nothing else of the pass is kept."""
        run = _Pass(self.model, self.anatomy, self._routers, self._inputs_here(), parts, self._rows)
        taken = {}
        if "attention" in parts and (attention := self._attention(self._with_attention(run))):
            taken["attention"] = attention
        if "router" in parts and self._routers:
            taken["router"] = self._routing(run)
        if "activations" in parts:
            taken["activations"] = self._activations(run)
        return taken

    def _with_attention(self, run: _Pass) -> _Pass:
        """Return a pass in which attention is visible: an additional one if kernels hide it in the normal pass."""
        if not (options := visible_attention(self.model)):
            return run
        with config_options(options):
            return _Pass(self.model, self.anatomy, {}, self._inputs_here(), ["attention"], self._rows)

    def _attention(self, run: _Pass) -> _Part | None:
        found = {layer: notes.attention for layer, notes in run.notes.items() if notes.attention is not None}
        n_layers = len(self.anatomy.sites)
        for layer, site in enumerate(self.anatomy.sites):
            if layer not in found:
                self._note(
                    f"The attention of {site.name} cannot be observed: it has no self-attention, or computes it in a "
                    "custom kernel (try the model's 'sdpa' or 'eager' attention)."
                )
        if not found:
            return None
        groups = _alike({layer: queries.entropy for layer, queries in found.items()})
        of_groups = [attention_health([found[layer] for layer in layers]) for layers in groups]
        n_heads = max(queries.entropy.shape[1] for queries in found.values())

        def finish(values: list[np.ndarray]) -> dict[str, np.ndarray]:
            table = {name: np.full((n_layers, n_heads), np.nan) for name in _OF_ATTENTION}
            for value, (layers, name) in zip(values, product(groups, table), strict=True):
                table[name][layers, : value.shape[1]] = value
            return table

        return [getattr(health, name) for health in of_groups for name in _OF_ATTENTION.values()], finish

    def _routing(self, run: _Pass) -> _Part:
        logits, choices = dict[int, Tensor](), dict[int, Tensor]()
        for layer, router in self._routers.items():
            notes = run.notes.get(layer)
            if notes is None or notes.logits is None:
                self._note(
                    f"The router of {router.site} was not called through {router.name}, so its logits are unknown."
                )
                continue
            logits[layer], chosen = notes.routing(router)
            if chosen is None:
                self._note(f"The choices of the router of {router.site} cannot be observed, only its logits.")
            else:
                choices[layer] = chosen
        groups = _alike(logits)
        stacks = [torch.stack([logits[layer] for layer in layers]) for layers in groups]
        measured = [each for stack in stacks for each in (routing_entropy(stack), stack.isnan().flatten(1).any(1))]
        chosen_in = [*choices]

        def finish(values: list[np.ndarray]) -> dict[str, np.ndarray]:
            rows = len(self.router_layers)
            table = {name: np.full(rows, np.nan) for name in _OF_ROUTING}
            table["expert_load"] = np.full((rows, max(self.n_experts)), np.nan)
            broken = set[int]()
            for layers, entropies, are_nan in zip(groups, values[::2], values[1::2], strict=False):
                for layer, entropy, is_nan in zip(layers, entropies, are_nan, strict=True):
                    row, n_experts = self.router_layers.index(layer), self._routers[layer].n_experts
                    table["routing_entropy"][row] = entropy
                    table["routing_entropy_share"][row] = entropy / math.log(n_experts) if n_experts > 1 else np.nan
                    broken |= {layer} if is_nan else set()  # the choice is not defined for NaN
            for layer, chosen in zip(chosen_in, values[2 * len(groups) :], strict=True):
                if layer not in broken:
                    self._of_choices(layer, chosen, table)
            return table

        return [*measured, *choices.values()], finish

    def _of_choices(self, layer: int, chosen: np.ndarray, table: Mapping[str, np.ndarray]) -> None:
        """Write the measures of a router's choices into the table."""
        row, choices = self.router_layers.index(layer), torch.from_numpy(chosen)
        load = expert_load(choices, self._routers[layer].n_experts)
        table["expert_load"][row, : len(load)] = load
        table["max_violation"][row], table["dead_experts"][row] = max_violation(load), dead_experts(load)
        before = self._choices.get(layer)
        if before is not None and before.shape == chosen.shape:
            table["routing_change"][row] = routing_change(torch.from_numpy(before), choices)
        self._choices[layer] = chosen

    def _activations(self, run: _Pass) -> _Part:
        run.measure_states()
        n_layers, logits, groups = len(self.anatomy.sites), _logits_in(run.output), [layers for layers, _ in run.states]
        tensors = [values[name] for _, values in run.states for name in _OF_STATES]
        if logits is None:
            self._note("The model returns no logits, so log_z is unknown.")
        else:
            tensors.append(log_z(run.chosen(logits)))

        def finish(values: list[np.ndarray]) -> dict[str, np.ndarray]:
            table = {name: np.full(n_layers, np.nan) for name in _OF_STATES}
            n_states = len(groups) * len(_OF_STATES)
            for value, (layers, name) in zip(values[:n_states], product(groups, _OF_STATES), strict=True):
                table[name][layers] = value
            return table | {"log_z": np.array(np.nan) if len(values) == n_states else values[-1]}

        return tensors, finish

    def _note(self, reason: str) -> None:
        if reason not in self.unreadable:
            self.unreadable.append(reason)

    def _inputs_here(self) -> Any:
        return on_device_of(self.model, self.inputs)


class _Pass:
    """One forward pass of a `ModelProbe` and its measurements."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        routers: Mapping[int, Router],
        batch: Any,
        parts: Collection[str],
        rows: dict[torch.Size, tuple[Tensor, Tensor] | None],
    ) -> None:
        self.model, self.sites, self.routers, self.batch, self.parts = model, anatomy.sites, routers, batch, parts
        self.layout = anatomy.layout
        self.notes: dict[int, BlockNotes] = {}
        #: Layers, and the measures of their states, shape (layer,).
        self.states: list[tuple[list[int], dict[str, Tensor]]] = []
        self._waiting: dict[int, Tensor] = {}
        self._rows = rows  # of all passes over the same examples
        self._calls = BlockCalls()
        watched = self._calls if {"attention", "router"} & set(parts) else nullcontext()
        with undisturbed(model), BlockHooks(self.sites, self._enter, self._leave), watched:
            self.output = call_model(model, batch)

    def rows_of(self, leading: torch.Size) -> tuple[Tensor, Tensor] | None:
        """Return mask and indices of the tokens to include, on the host, for a leading shape; None for all."""
        if leading not in self._rows:
            chosen = TokenSelection(None, layout=self.layout).choose(leading, self.batch)
            rows = torch.zeros(leading.numel(), dtype=torch.bool)
            rows[chosen] = True
            self._rows[leading] = None if rows.numpy().all() else (rows.view(leading), chosen)
        return self._rows[leading]

    def chosen(self, states: Tensor) -> Tensor:
        """Return the states of the tokens to include, shape (token, feature)."""
        rows, flat = self.rows_of(states.shape[:-1]), states.flatten(0, -2)
        return flat if rows is None else flat[on_device(rows[1], states.device)]

    def measure_states(self) -> None:
        """Measure the states that wait, those of equal shape together."""
        for layers in _alike(self._waiting):
            states = torch.stack([self._waiting[layer] for layer in layers])
            self.states.append((layers, {name: measure(states) for name, measure in _OF_STATES.items()}))
        self._waiting.clear()

    def _enter(self, call: BlockCall) -> None:
        leading = call.state_in.shape[:-1]
        router = self.routers.get(call.layer) if "router" in self.parts else None
        weight = self.model.get_parameter(router.name) if router else None
        axis, measures_attention, rows = self.layout.states or 0, "attention" in self.parts, self.rows_of(leading)
        mask = None if rows is None else rows[0]
        notes = BlockNotes(leading, mask, measures_attention, router, weight, batch_axis=axis)
        self.notes[call.layer] = self._calls.block = notes

    def _leave(self, call: BlockCall) -> None:
        self._calls.block = None
        if "activations" not in self.parts:
            return
        state = self.chosen(call.state_out.detach())
        at_a_time = _ENTRIES_ON_HOST if state.device.type == "cpu" else _ENTRIES_ON_DEVICE
        is_full = (len(self._waiting) + 1) * state.numel() > at_a_time
        self._waiting[call.layer] = state if is_full else state.clone()  # the next block may write to it
        if is_full:
            self.measure_states()


def _alike(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the layers of tensors that can be stacked."""
    groups: dict[tuple, list[int]] = {}
    for layer, tensor in tensors.items():
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(layer)
    return [*groups.values()]


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
