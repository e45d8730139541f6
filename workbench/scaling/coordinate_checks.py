"""Coordinate check: whether updates change the outputs of layers by the same amount at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.errors import OptionError
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import call_model, on_device_of
from workbench.models.probing import undisturbed, watch
from workbench.models.wrapping import unwrap
from workbench.scaling.size_ladder import Rung, Workshop
from workbench.scaling.trend import line_through
from workbench.schema.statuses import CoordinateState

if TYPE_CHECKING:
    import xarray as xr

#: An exponent whose interval lies above the first number means growth with the width; below the second, vanishing.
LARGEST_EXPONENT, SMALLEST_EXPONENT = 0.25, -0.5
#: Number of widths that a verdict needs.
N_WIDTHS = 3
_PROBE_TOKENS = 128


def layer_outputs(model: nn.Module, inputs: Any, anatomy: Anatomy) -> dict[str, Tensor]:
    """Measure the output of every layer group of a model for some inputs; the model is left unchanged.

    Args:
        model: Any module.
        inputs: Inputs as for `call_model`.
        anatomy: Anatomy of the model.

    Returns:
        Name of the group -> tensor: ``embedding`` (the stream before the first block); for each block ``attention
        scores`` (before masking and softmax, where torch's own attention is called), the parts of the block with
        matrices in them whose output has the stream's shape (such as ``attention`` and ``mlp``), and ``stream``
        (the state after it); ``logits``.
    """
    model = unwrap(model)
    outputs = _Outputs()
    hooks = BlockHooks(anatomy.sites, outputs.enter, outputs.leave)
    parts = [
        (part, outputs.hook_after(name), False)
        for block in hooks.blocks
        for name, part in block.named_children()
        if any(weight.ndim >= 2 for weight in part.parameters())
    ]
    with undisturbed(model), hooks, watch(parts), outputs:
        output = call_model(model, inputs)
    outputs.found["logits"] = (output if isinstance(output, Tensor) else output.logits).detach().clone()
    return outputs.found


def coordinate_sizes(
    workshop: Workshop, rung: Rung, seed: int, *, learning_rate: float, n_steps: int = 10
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Measure the initial size of the outputs of the layer groups, and their change by a few updates.

    Returns:
        Root mean square of each group's output over held-out tokens and features at the start; and of its change since
        then after 1 to ``n_steps`` updates at a constant rate, shape (step,), NaN from a divergence on.
    """
    model = workshop.model(rung, seed)
    inputs = on_device_of(model, workshop.task_of(seed).probe(_PROBE_TOKENS))
    anatomy = read_anatomy(model, inputs)
    before = layer_outputs(model, inputs, anatomy)
    changes = {name: np.full(n_steps, np.nan) for name in before}
    for step, record in enumerate(workshop.runs(model, seed, learning_rate, n_steps, is_plain=True)):
        if record.diverged:
            break
        after = layer_outputs(model, inputs, anatomy)
        for name, output in before.items():
            changes[name][step] = _rms(after[name] - output)
    return {name: _rms(output) for name, output in before.items()}, changes


def coordinate_check(
    workshop: Workshop,
    rungs: Sequence[Rung],
    seeds: Sequence[int],
    *,
    learning_rate: float,
    n_steps: int = 10,
    level: float = 0.95,
) -> xr.Dataset:
    """Measure how the change of each layer group's output scales with width at a fixed rate (Yang et al. 2022, D.1).

    In the maximal update parametrization no group's change depends on the width. In the standard one with Adam it grows
    in the blocks and in the logits, so that the rate that is right for a thin model is too large for a wide one.

    Args:
        workshop: Builder and trainer of the models; warm-up and schedule are ignored.
        rungs: Sizes of one depth.
        seeds: Seeds of parameters and data.
        learning_rate: A rate at which even the widest model does not diverge.
        n_steps: Updates.
        level: Level of the intervals.

    Returns:
        Dataset with dims ``rung``, ``seed``, ``step`` (updates done) and ``layer_group``: ``initial_size`` (rung,
        layer_group) and ``update_size`` (rung, step, layer_group), geometric means over seeds, and the latter of each
        seed, ``update_size_of_seed``; ``coordinate_exponent`` with ``_low`` and ``_high`` (layer_group), the slope of
        its logarithm, averaged over steps, against that of the width, and ``initial_exponent``;
        ``coordinate_state`` (``"passes"``, ``"grows"``, ``"vanishes"``, ``"diverged"`` or ``"too few widths"``),
        ``passes_coordinate_check`` and ``coordinate_reason``. NaN: from a divergence on, or where no output changed.

    Raises:
        OptionError: If the rungs are of several depths, or there are no steps.
        AnatomyError: If the residual stream cannot be read.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 32, "n_layers": 2, "n_heads": 2, "max_length": 8})
        >>> workshop = wb.scaling.Workshop(design, wb.tasks.random_tokens(vocab_size=16, length=8))
        >>> rungs = [wb.scaling.Rung(width, 2) for width in (8, 16, 32)]
        >>> check = wb.scaling.coordinate_check(workshop, rungs, [0], learning_rate=1e-3, n_steps=2)
        >>> check["update_size"].dims, check["layer_group"].values[[0, -1]].tolist()
        (('rung', 'step', 'layer_group'), ['embedding', 'logits'])
    """
    import xarray as xr

    if len({rung.depth for rung in rungs}) != 1:
        raise OptionError("A coordinate check compares widths at one depth; pass rungs of one depth.")
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
        raise OptionError(f"n_coordinate_steps is {n_steps!r}, expected a whole number of at least 1.")
    found = [
        [coordinate_sizes(workshop, rung, seed, learning_rate=learning_rate, n_steps=n_steps) for seed in seeds]
        for rung in rungs
    ]
    groups = list(found[0][0][0])
    initial = np.array([[[first.get(name, np.nan) for name in groups] for first, _ in row] for row in found])
    nothing = np.full(n_steps, np.nan)
    change = np.array([[[sizes.get(name, nothing) for name in groups] for _, sizes in row] for row in found])
    change = np.moveaxis(change, -1, 2)  # (rung, seed, step, group)
    log_width = np.log([rung.width for rung in rungs])
    lines = [line_through(log_width, _log(change[..., g]).mean(-1), level=level) for g in range(len(groups))]
    at_first = [line_through(log_width, _log(initial[..., g]), level=level) for g in range(len(groups))]
    data = xr.Dataset(
        {
            "initial_size": (("rung", "layer_group"), _mean_size(initial)),
            "update_size": (("rung", "step", "layer_group"), _mean_size(change)),
            "update_size_of_seed": (("rung", "seed", "step", "layer_group"), change),
            "coordinate_exponent": ("layer_group", [line.slope for line in lines]),
            "coordinate_exponent_low": ("layer_group", [line.slope_low for line in lines]),
            "coordinate_exponent_high": ("layer_group", [line.slope_high for line in lines]),
            "initial_exponent": ("layer_group", [line.slope for line in at_first]),
        },
        coords={
            "width": ("rung", [rung.width for rung in rungs]),
            "depth": ("rung", [rung.depth for rung in rungs]),
            "seed": ("seed", list(seeds)),
            "step": ("step", np.arange(1, n_steps + 1)),
            "layer_group": ("layer_group", groups),
        },
    )
    data["coordinate_exponent"].attrs = {
        "largest_healthy": LARGEST_EXPONENT,
        "smallest_healthy": SMALLEST_EXPONENT,
    }
    state, reason = _verdict(data)
    data["coordinate_state"] = ((), state.value)
    data["passes_coordinate_check"] = ((), state is CoordinateState.PASSES)
    data["coordinate_reason"] = ((), reason)
    return data


def _verdict(data: xr.Dataset) -> tuple[CoordinateState, str]:
    """The result of the check, and a sentence that explains it."""
    widths = data["width"].values
    diverged = np.isnan(data["update_size_of_seed"].values).all(-1)  # (rung, seed, step)
    if diverged.any():
        rung, _, step = np.argwhere(diverged)[0]
        return CoordinateState.DIVERGED, (
            f"At width {widths[rung]} the run diverged at update {step + 1}; choose a lower rate for the check."
        )
    if len(widths) < N_WIDTHS:
        return (
            CoordinateState.TOO_FEW_WIDTHS,
            f"The ladder has {len(widths)} widths, expected at least {N_WIDTHS}; add thinner ones.",
        )
    groups = data["layer_group"].values
    exponent, low, high = (data[f"coordinate_exponent{end}"].values for end in ("", "_low", "_high"))
    for state, is_it, pick in (
        (CoordinateState.GROWS, low > LARGEST_EXPONENT, np.nanargmax),
        (CoordinateState.VANISHES, high < SMALLEST_EXPONENT, np.nanargmin),
    ):
        if is_it.any():
            worst = int(pick(np.where(is_it, exponent, np.nan)))
            verb = "grow" if state is CoordinateState.GROWS else "vanish"
            return state, (
                f"Updates {verb} with the width in {is_it.sum()} of {len(groups)} layer groups, most of all in "
                f"'{groups[worst]}', by width^{exponent[worst]:.2f}."
            )
    return CoordinateState.PASSES, (
        f"Updates are of one size at every width: exponents lie between {np.nanmin(exponent):.2f} and "
        f"{np.nanmax(exponent):.2f}."
    )


class _Outputs(TorchFunctionMode):
    """Records the outputs of the layer groups and, while it is active, the scores of attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self._block: int | None = None
        self._shape: torch.Size | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._block is not None and getattr(func, "__name__", "") == "scaled_dot_product_attention":
            self._note(self._name("attention scores"), _scores(*args, **(kwargs or {})))
        return result

    def enter(self, call: BlockCall) -> None:
        """Called when a block begins."""
        self._block, self._shape = call.layer, call.state_in.shape
        if call.layer == 0:
            self._note("embedding", call.state_in)

    def leave(self, call: BlockCall) -> None:
        """Called when a block has ended."""
        self._note(self._name("stream"), call.state_out)
        self._block = None

    def hook_after(self, name: str) -> Callable[..., None]:
        """A forward hook that records the output of a part of a block."""

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            del module, args, kwargs
            first = output[0] if isinstance(output, tuple) and output else output
            if self._block is not None and isinstance(first, Tensor) and first.shape == self._shape:
                self._note(self._name(name), first)

        return after

    def _name(self, part: str) -> str:
        return f"block {self._block} {part}"

    def _note(self, name: str, value: Tensor) -> None:
        self.found.setdefault(name, value.detach().clone())


def _scores(
    query: Tensor, key: Tensor, value: Any = None, *others: Any, scale: float | None = None, **_: Any
) -> Tensor:
    """Attention scores of every pair of tokens, shape (batch, head, token, token)."""
    del value, others
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))


def _log(values: np.ndarray) -> np.ndarray:
    """Logarithms; NaN where a value is not positive."""
    return np.log(np.where(values > 0, values, np.nan))


def _mean_size(values: np.ndarray) -> np.ndarray:
    """Geometric mean over the seeds, the second axis."""
    return np.exp(_log(values).mean(1))
