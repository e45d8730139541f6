"""Coordinate check: how the change of the outputs of layers by updates depends on the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ladder_trend import line_through
from size_ladder import LadderTrainer, Rung
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import call_model, on_device_of, unwrap
from workbench.models.probing import undisturbed, watch

if TYPE_CHECKING:
    import xarray as xr

#: Results of a check: the behavior of updates as the width increases.
PASSES, GROWS, VANISHES, DIVERGED, TOO_FEW_WIDTHS = "passes", "grows", "vanishes", "diverged", "too few widths"
#: Updates grow with the width if the interval of the exponent lies above the first limit, and vanish if it lies below
#: the second.
LARGEST_EXPONENT, SMALLEST_EXPONENT = 0.25, -0.5
#: Minimum number of widths for a verdict.
N_WIDTHS = 3
_PROBE_TOKENS = 128


def layer_outputs(model: nn.Module, inputs: Any, anatomy: Anatomy) -> dict[str, Tensor]:
    """Measure the output of every layer group of a model, without changing the model.

    Args:
        model: Any module.
        inputs: Inputs as for `call_model`.
        anatomy: Anatomy of the model.

    Returns:
        Name of the layer group -> tensor: ``embedding`` (the residual stream before the first block); for each block
        ``attention scores`` (before masking and softmax, if the block calls torch's attention), the parts of the block
        that contain matrices and whose output has the shape of the residual stream (such as ``attention`` and
        ``mlp``), and ``stream`` (the state after the block); and ``logits``.
    """
    model = unwrap(model)
    outputs = _Outputs()
    hooks = BlockHooks(anatomy.sites, outputs.enter, outputs.leave)
    parts = [
        (part, outputs.hook_after(name), False)
        for block in hooks.blocks
        for name, part in block.named_children()
        if any(parameter.ndim >= 2 for parameter in part.parameters())
    ]
    with undisturbed(model), hooks, watch(parts), outputs:
        output = call_model(model, inputs)
    outputs.found["logits"] = (output if isinstance(output, Tensor) else output.logits).detach().clone()
    return outputs.found


def coordinate_sizes(
    trainer: LadderTrainer, rung: Rung, seed: int, *, learning_rate: float, n_steps: int = 10
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Measure the initial magnitude of the outputs of the layer groups, and their change by a few updates.

    Returns:
        Initial root mean square of the output of each group over held-out tokens and features; and root mean square of
        its change after 1 to ``n_steps`` updates at a constant learning rate, shape (step,), NaN from a divergence on.
    """
    model = trainer.model(rung, seed)
    inputs = on_device_of(model, trainer.task(seed).probe(_PROBE_TOKENS))
    anatomy = read_anatomy(model, inputs)
    before = layer_outputs(model, inputs, anatomy)
    changes = {name: np.full(n_steps, np.nan) for name in before}
    for step, record in enumerate(trainer.runs(model, seed, learning_rate, n_steps)):
        if record.diverged:
            break
        after = layer_outputs(model, inputs, anatomy)
        for name, output in before.items():
            changes[name][step] = _rms(after[name] - output)
    return {name: _rms(output) for name, output in before.items()}, changes


def coordinate_check(
    trainer: LadderTrainer, rungs: Sequence[Rung], seeds: Sequence[int], *, learning_rate: float, n_steps: int = 10
) -> xr.Dataset:
    """Measure how the change of the output of each layer group scales with width (Yang et al. 2022, Appendix D.1).

    In the maximal update parametrization the changes do not depend on the width. In the standard parametrization with
    Adam they grow with the width in the blocks and in the logits, so that a learning rate that suits a narrow model is
    too large for a wide one.

    Args:
        trainer: Builder and trainer of the models.
        rungs: Sizes of the same depth.
        seeds: Seeds of parameters and data.
        learning_rate: A learning rate at which the widest model does not diverge.
        n_steps: Number of updates.

    Returns:
        Dataset with dimensions ``rung``, ``seed``, ``step`` (number of updates) and ``layer_group``: ``initial_size``
        (rung, layer_group) and ``update_size`` (rung, step, layer_group), geometric means over seeds, and
        ``update_size_of_seed`` (rung, seed, step, layer_group); ``coordinate_exponent`` with ``_low`` and ``_high``
        (layer_group), the slope of the logarithm of the change, averaged over steps, against the logarithm of the
        width; ``initial_exponent``, the same for the initial outputs; ``coordinate_state`` (``"passes"``, ``"grows"``,
        ``"vanishes"``, ``"diverged"`` or ``"too few widths"``), ``passes_coordinate_check`` and ``coordinate_reason``.
        Values are NaN from a divergence on, and where no output changed.
    """
    import xarray as xr

    found = [
        [coordinate_sizes(trainer, rung, seed, learning_rate=learning_rate, n_steps=n_steps) for seed in seeds]
        for rung in rungs
    ]
    groups = list(found[0][0][0])
    initial = np.array([[[first.get(name, np.nan) for name in groups] for first, _ in row] for row in found])
    missing = np.full(n_steps, np.nan)
    change = np.array([[[sizes.get(name, missing) for name in groups] for _, sizes in row] for row in found])
    change = np.moveaxis(change, -1, 2)  # (rung, seed, step, group)
    log_width = np.log([rung.width for rung in rungs])
    lines = [line_through(log_width, _log(change[..., g]).mean(-1)) for g in range(len(groups))]
    initial_lines = [line_through(log_width, _log(initial[..., g])) for g in range(len(groups))]
    data = xr.Dataset(
        {
            "initial_size": (("rung", "layer_group"), _mean_size(initial)),
            "update_size": (("rung", "step", "layer_group"), _mean_size(change)),
            "update_size_of_seed": (("rung", "seed", "step", "layer_group"), change),
            "coordinate_exponent": ("layer_group", [line.slope for line in lines]),
            "coordinate_exponent_low": ("layer_group", [line.slope_low for line in lines]),
            "coordinate_exponent_high": ("layer_group", [line.slope_high for line in lines]),
            "initial_exponent": ("layer_group", [line.slope for line in initial_lines]),
        },
        coords={
            "width": ("rung", [rung.width for rung in rungs]),
            "depth": ("rung", [rung.depth for rung in rungs]),
            "seed": ("seed", list(seeds)),
            "step": ("step", np.arange(1, n_steps + 1)),
            "layer_group": ("layer_group", groups),
        },
    )
    data["coordinate_exponent"].attrs = {"largest_healthy": LARGEST_EXPONENT, "smallest_healthy": SMALLEST_EXPONENT}
    state, reason = _verdict(data)
    data["coordinate_state"] = ((), state)
    data["passes_coordinate_check"] = ((), state == PASSES)
    data["coordinate_reason"] = ((), reason)
    return data


def _verdict(data: xr.Dataset) -> tuple[str, str]:
    """Return the result of the check and a sentence that explains it."""
    widths = data["width"].values
    diverged = np.isnan(data["update_size_of_seed"].values).all(-1)  # (rung, seed, step)
    if diverged.any():
        rung, _, step = np.argwhere(diverged)[0]
        return DIVERGED, (
            f"At width {widths[rung]} the run diverged at update {step + 1}; choose a smaller learning rate."
        )
    if len(widths) < N_WIDTHS:
        return (
            TOO_FEW_WIDTHS,
            f"The ladder has {len(widths)} widths, but the check needs at least {N_WIDTHS}; add narrower ones.",
        )
    groups = data["layer_group"].values
    exponent, low, high = (data[f"coordinate_exponent{end}"].values for end in ("", "_low", "_high"))
    for state, is_affected, pick in (
        (GROWS, low > LARGEST_EXPONENT, np.nanargmax),
        (VANISHES, high < SMALLEST_EXPONENT, np.nanargmin),
    ):
        if is_affected.any():
            worst = int(pick(np.where(is_affected, exponent, np.nan)))
            verb = "grow" if state == GROWS else "vanish"
            return state, (
                f"Updates {verb} with the width in {is_affected.sum()} of {len(groups)} layer groups, most strongly in "
                f"'{groups[worst]}', as width^{exponent[worst]:.2f}."
            )
    return PASSES, (
        f"Updates have about the same magnitude at every width: exponents lie between {np.nanmin(exponent):.2f} and "
        f"{np.nanmax(exponent):.2f}."
    )


class _Outputs(TorchFunctionMode):
    """Recorder of the outputs of layer groups and, while it is active, of the scores of attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self._block: int | None = None
        self._shape: torch.Size | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._block is not None and getattr(func, "__name__", "") == "scaled_dot_product_attention":
            self._record(self._name("attention scores"), _scores(*args, **(kwargs or {})))
        return result

    def enter(self, call: BlockCall) -> None:
        """Handle the beginning of a block."""
        self._block, self._shape = call.layer, call.state_in.shape
        if call.layer == 0:
            self._record("embedding", call.state_in)

    def leave(self, call: BlockCall) -> None:
        """Handle the end of a block."""
        self._record(self._name("stream"), call.state_out)
        self._block = None

    def hook_after(self, name: str) -> Callable[..., None]:
        """Return a forward hook that records the output of a part of a block."""

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            del module, args, kwargs
            first = output[0] if isinstance(output, tuple) and output else output
            if self._block is not None and isinstance(first, Tensor) and first.shape == self._shape:
                self._record(self._name(name), first)

        return after

    def _name(self, part: str) -> str:
        return f"block {self._block} {part}"

    def _record(self, name: str, value: Tensor) -> None:
        self.found.setdefault(name, value.detach().clone())


def _scores(
    query: Tensor, key: Tensor, value: Any = None, *others: Any, scale: float | None = None, **_: Any
) -> Tensor:
    """Return the attention scores of every pair of tokens, shape (batch, head, token, token)."""
    del value, others
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))


def _log(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of positive values; NaN for others."""
    return np.log(np.where(values > 0, values, np.nan))


def _mean_size(values: np.ndarray) -> np.ndarray:
    """Return the geometric mean over the seeds, the second axis."""
    return np.exp(_log(values).mean(1))
