"""Signal gains of the forward pass and gradient gains of the backward pass along the depth of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import clipped, three_digits
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import by_name, require_variables
from workbench.plots.primitives import Primitives, decades, flowed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

#: Both have a contrast of at least 3 on white and on #111111, and differ with any color vision.
AMPLIFIED, ATTENUATED = "#d55e00", "#1f77d4"
_MOST_MODELS = 6
#: Largest number of models for which the names of the sub-layers fit.
_MOST_NAMED = 3
#: Largest number of models in one row, and the number per row if there are more.
_MOST_COLUMNS, _WRAPPED_COLUMNS = 4, 3
#: Width of a bokeh figure, the part of it for axes and legend, and the gap next to each frame.
_TOTAL_WIDTH, _BESIDE, _BETWEEN_COLUMNS = 1200, 152, 54
_MOST_WIDTH, _HEIGHT, _GAP = 460, 190, 30
#: Distance of the lower frame from the upper one on a matplotlib figure, and of a row of models from the next.
_BETWEEN, _BETWEEN_ROWS = 64, 90
#: Width of a letter of a note and of a title.
_LETTER, _LETTER_OF_TITLE = 6.2, 9.0
_NEEDED = (
    *("state_rms", "gradient_norm", "signal_gain", "gradient_gain"),
    *("sublayer_signal_gain", "sublayer_gradient_gain"),
)
#: Smallest ratio of the ends of an axis of sizes.
_LEAST_SPAN = 2.0


@redrawable
def flow_map(flow: xr.Dataset | Mapping[str, xr.Dataset], *, backend: str = "bokeh") -> Any:
    """Draw the growth and decay of signal and gradient from block to block, several models side by side.

    The upper panels show the RMS of the residual stream relative to that of the state entering the first block; the
    lower panels show the norm of the gradient of the loss relative to that at the output of the last block. Each box is
    a sub-layer, or a block whose sub-layers were not measured: its width is its part of the block, its height is its
    gain, and its color states whether it amplifies or attenuates. The axes are logarithmic, so that equal gains are
    equally high, and shared by all models. The small line lists the sub-layers of a block from left to right.

    Args:
        flow: Dataset from `workbench.flow.measure` at one step, or up to six by name.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with one column per model (more than four models: two rows of three) and options for that
        backend only.

    Raises:
        SchemaError: If there is no dataset, one lacks a variable or has several steps, or there are more than six.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> flow = wb.flow.measure(model, wb.tasks.associative_recall(length=16), jacobian=False)
        >>> figure = wb.plots.flow_map({"Pre-LN": flow})
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.flow.measure`: Measures the gains.
        `workbench.plots.layer_profile`: Draws spectral measures against depth.
    """
    paths = paths_of(flow)
    n_columns = len(paths) if len(paths) <= _MOST_COLUMNS else _WRAPPED_COLUMNS
    width = min(_MOST_WIDTH, int((_TOTAL_WIDTH - _BESIDE) / n_columns - _BETWEEN_COLUMNS))
    spans = [_span([getattr(path, direction) for path in paths]) for direction in ("forward", "backward")]
    notes = [_notes(paths, direction, width) for direction in ("forward", "backward")]
    # Frames of a matplotlib figure have fixed positions; the distances leave space for the notes.
    above = [_HEIGHT + 13 * (1 + directions[0].count("\n")) for directions in notes]
    height = sum(above) + _BETWEEN + _BETWEEN_ROWS
    n_rows = -(-len(paths) // n_columns)
    with style.drawing(backend) as hv:
        panels: list[Any] = []
        for first in range(0, len(paths), n_columns):
            shown = range(first, min(first + n_columns, len(paths)))
            for row, (axis, span) in enumerate(zip(("forward", "backward"), spans, strict=True)):
                for i in shown:
                    path, direction, column = paths[i], getattr(paths[i], axis), i - first
                    draw = Primitives(hv, backend, f"depth {path.name}", axis)
                    has_legend = row == 0 and i == n_columns - 1
                    _draw(draw, direction, has_legend=has_legend)
                    bottom = (n_rows - 1 - first // n_columns) * height
                    panel = draw.panel(
                        title=clipped(path.name, int(width / _LETTER_OF_TITLE)) if row == 0 else "",
                        note=[notes[row][i]],
                        view=((-0.15, path.n_layers + 0.15), span),
                        size=(width, _HEIGHT),
                        names=(_DEPTH[row], _SIZES[row]),
                        ticks=(_depth_ticks(path.n_layers, width), _size_ticks(*span)),
                        is_log=(False, True),
                        legend=has_legend,
                        bare=(False, column > 0),
                        at=(column * (width + _GAP), bottom if row else bottom + _BETWEEN + above[1]),
                    )
                    panels.append(panel)
                panels += [hv.Empty()] * (n_columns - len(shown))
        return style.laid_out(hv, panels, backend, n_columns=n_columns)


#: Labels of the axes of the upper and of the lower panels.
_DEPTH = ("block (forward pass) →", "← block (backward pass)")
_SIZES = ("signal RMS (relative)", "gradient norm (relative)")


@dataclass(frozen=True)
class Direction:
    """Relative sizes at boundaries and gains of boxes along one direction; boxes have edges in blocks and notes."""

    axis: str
    size: np.ndarray
    left: np.ndarray
    right: np.ndarray
    before: np.ndarray
    after: np.ndarray
    name: np.ndarray
    note: list[str] = field(default_factory=list)

    @property
    def gain(self) -> np.ndarray:
        """Gain of each box."""
        return self.after / self.before


@dataclass(frozen=True)
class FlowPath:
    """Content of the panels of one model: signal, gradient, and the sub-layers if they are those of every block."""

    name: str
    n_layers: int
    forward: Direction
    backward: Direction
    parts: str


def paths_of(flow: xr.Dataset | Mapping[str, xr.Dataset]) -> list[FlowPath]:
    """Compute the content of `flow_map`."""
    flows = by_name(flow, what="flow", source="wb.flow.measure()")
    if len(flows) > _MOST_MODELS:
        raise SchemaError(f"There are {len(flows)} flows, expected at most {_MOST_MODELS}; draw some of them.")
    paths = []
    for given, data in flows.items():
        name = given or str(data.attrs.get("subject", "flow"))
        require_variables(data, _NEEDED, what=f"flow '{name}'", source="wb.flow.measure()")
        if "step" in data["state_rms"].dims:
            raise SchemaError(f"The flow '{name}' has several steps; select one, for example flow.isel(step=-1).")
        paths.append(_path_of(name, data))
    return paths


def _path_of(name: str, flow: xr.Dataset) -> FlowPath:
    n = flow.sizes["layer"]
    forward, backward = (
        _direction(flow, "forward", "state_rms", "signal"),
        _direction(flow, "backward", "gradient_norm", "gradient"),
    )
    kinds = {tuple(label.partition(": ")[2] for label in forward.name[forward.left.astype(int) == i]) for i in range(n)}
    kind = kinds.pop() if len(kinds) == 1 else ()
    return FlowPath(name, n, forward, backward, f"sub-layers: {', '.join(kind)}" if len(kind) > 1 else "")


def _direction(flow: xr.Dataset, axis: str, of_state: str, kind: str) -> Direction:
    """Return sizes and boxes of one direction."""
    n, is_forward = flow.sizes["layer"], axis == "forward"
    names = flow["layer_name"].values if "layer_name" in flow.coords else np.arange(n).astype(str)
    size = _positive(flow[of_state].values)
    size = size / size[0 if is_forward else n]
    boxes: list[tuple[float, float, float, float, str]] = []
    for layer in range(n):
        gains, labels = _sublayers(flow, layer, kind)
        edges = layer + np.arange(len(gains) + 1) / len(gains)
        before = size[layer] if is_forward else size[layer + 1]
        of_block = []
        for i in range(len(gains)) if is_forward else range(len(gains) - 1, -1, -1):
            after = before * gains[i]
            of_block.append((edges[i], edges[i + 1], before, after, f"{names[layer]}: {labels[i]}"))
            before = after
        boxes += of_block if is_forward else of_block[::-1]
    columns: list[Any] = [np.array(column) for column in zip(*boxes, strict=True)]
    direction = Direction(axis, size, *columns)
    return _with_note(direction, size[n] if is_forward else size[0], n)


def _sublayers(flow: xr.Dataset, layer: int, kind: str) -> tuple[np.ndarray, list[str]]:
    """Return gains and names of the sub-layers of a block; the gain of the block if one of them is unknown."""
    gains = flow[f"sublayer_{kind}_gain"].values[layer]
    labels = flow["sublayer_name"].values[layer] if "sublayer_name" in flow.coords else np.full(len(gains), "")
    is_there = (labels != "") | np.isfinite(gains)
    gains, labels = _positive(gains[is_there]), labels[is_there]
    if len(gains) and np.isfinite(gains).all():
        return gains, [str(label) for label in labels]
    return _positive(flow[f"{kind}_gain"].values[layer : layer + 1]), ["block"]


def _with_note(direction: Direction, total: float, n_layers: int) -> Direction:
    """Add phrases on the total gain, the gain per block and unknown states."""
    if not np.isfinite(direction.size).any():
        direction.note.append("not measured")
    elif np.isfinite(total):
        direction.note.extend([f"total ×{three_digits(total)}", f"per block ×{three_digits(total ** (1 / n_layers))}"])
    unknown = int(np.isnan(direction.size).sum())
    if 0 < unknown < len(direction.size):
        direction.note.append(f"{unknown} of {len(direction.size)} states not measured or zero")
    return direction


def _draw(draw: Primitives, direction: Direction, *, has_legend: bool) -> None:
    x = np.arange(len(direction.size))
    corners = [(direction.left, direction.before), (direction.right, direction.after)]
    if direction.axis == "backward":
        corners = [(direction.left, direction.after), (direction.right, direction.before)]
    depth, size = (np.stack(side, axis=1).ravel() for side in zip(*corners, strict=True))
    draw.band(depth, np.ones(len(depth)), size, color=style.NEUTRAL, alpha=0.14)
    draw.bars(-0.15, 1.0, len(x) - 0.85, 1.0, color=style.NEUTRAL, width=1, dash="dashed")
    is_known = np.isfinite(direction.gain)
    if is_known.any():
        low, high = np.minimum(direction.before, direction.after), np.maximum(direction.before, direction.after)
        columns = {"name": direction.name[is_known], "gain": direction.gain[is_known]}
        colors = np.where(direction.gain >= 1, AMPLIFIED, ATTENUATED)[is_known]
        tips = [("", "@name"), (f"{direction.axis} gain", "@gain{0.000}")]
        ends = (end[is_known] for end in (direction.left, low, direction.right, high))
        draw.boxes(*ends, colors=colors, alpha=0.9, columns=columns, tips=tips)
    draw.line(depth, size, color=draw.ink, width=1.2)
    if has_legend:
        for label, color in (("amplifies", AMPLIFIED), ("attenuates", ATTENUATED)):
            draw.line([np.nan, np.nan], [np.nan, np.nan], color=color, width=9, label=label)


def _span(directions: Sequence[Direction]) -> tuple[float, float]:
    """Return the range of a logarithmic axis that holds all sizes, with a margin."""
    values = np.concatenate(
        [np.concatenate([direction.size, direction.before, direction.after]) for direction in directions]
    )
    values = np.append(values[np.isfinite(values)], 1.0)
    low, high = np.log(values.min()), np.log(values.max())
    middle, half = (low + high) / 2, max(high - low, np.log(_LEAST_SPAN)) / 2
    return float(np.exp(middle - 1.12 * half)), float(np.exp(middle + 1.12 * half))


def _depth_ticks(n_layers: int, width: int) -> list[tuple[float, str]]:
    """Return ticks with the number of each block at its center; if not all fit, of every second, fourth, ... block."""
    most = max(2, width // 34)
    every = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, 10**6) if n_layers / step <= most)
    return [(layer + 0.5, str(layer)) for layer in range(0, n_layers, every)]


def _size_ticks(low: float, high: float) -> list[float]:
    """Return ticks at 1, 2 and 5 of each decade, or fewer; more if there would be at most two."""
    ticks = decades(low, high, n_most=6)
    if len(ticks) > 2:
        return ticks
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    finer = [float(f"{mantissa}e{power}") for power in powers for mantissa in (1, 1.2, 1.5, 2, 3, 5, 7)]
    return [at for at in finer if low <= at <= high]


def _notes(paths: Sequence[FlowPath], axis: str, width: int) -> list[str]:
    """Return the small lines of each frame, equally many for all: bokeh crops frames that it has to move down."""
    named = axis == "forward" and len(paths) <= _MOST_NAMED
    phrases = [[*getattr(path, axis).note, *([path.parts] if named else [])] for path in paths]
    notes = [flowed(of_path, n_characters=width / _LETTER) for of_path in phrases]
    n_breaks = max(note.count("\n") for note in notes)
    return [note + "\n" * (n_breaks - note.count("\n")) for note in notes]


def _positive(values: Any) -> np.ndarray:
    values = np.asarray(values, float)
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)
