"""Figures of learning rates: held-out losses of studies and pilots, and the useful rates of many designs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import counted
from workbench.option_kinds import NonNegativeInt
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import by_name, require_variables
from workbench.plots.primitives import Primitives, decades
from workbench.rates.outcomes import mean_over_seeds

if TYPE_CHECKING:
    import xarray as xr


_SIZE = (640, 340)
_NEEDED = ("loss", "mean_loss", "best_rate", "slow_edge", "useful_edge", "is_learned")
#: The axis ends above the trivial loss, by this fraction of the range from the best loss to it.
_HEADROOM = 0.25
#: Distance of the bars of useful rates of several designs, as a fraction of the height.
_BAR = 0.022


@redrawable
def rate_curve(
    outcome: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the held-out loss against the learning rate: one line for each design, one dot for each run.

    The band is the range of useful rates; it extends to the end of the axis where an edge is unknown. Of several
    designs, the ranges are bars at the foot, one above the other, because bands would overlap. The large mark is the
    best rate, the dashed line the trivial loss, the dotted vertical line the explosion edge. Losses that are not
    finite or above the axis are triangles at the top.

    Args:
        outcome: Dataset from `workbench.rates.loss_over_rates`, or several of them by name.
        places: Style number (color, marker, dash) of each design, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a dataset lacks a variable, or has no finite loss.
        OptionError: If the backend does not exist, or a design has no style number.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> import xarray as xr
        >>> rate, loss = np.array([1e-3, 2e-3, 4e-3]), np.array([[2.2], [2.0], [2.6]])
        >>> band = {"best_rate": 2e-3, "slow_edge": 1.5e-3, "useful_edge": 2.5e-3, "is_learned": True}
        >>> losses = {"loss": (("rate", "seed"), loss), "mean_loss": ("rate", loss.mean(1))}
        >>> outcome = xr.Dataset({**losses, **band}, {"rate": rate, "seed": [0]})
        >>> len(wb.plots.rate_curve(outcome))  # panels
        1

    See Also:
        `workbench.rates.loss_over_rates`: Computes the losses and edges.
        `workbench.plots.rate_bands`: Draws the useful rates of many designs.
    """
    named = by_name(outcome, what="outcome", source="wb.rates.loss_over_rates()")
    for name, data in named.items():
        what = f"outcome '{name}'" if name else "outcome"
        require_variables(data, _NEEDED, what=what, source="wb.rates.loss_over_rates()")
        if not np.isfinite(data["loss"].values).any():
            raise SchemaError(f"The {what} has no finite loss; add runs at smaller learning rates.")
    order = style.model_places(list(named), places)
    rates = np.concatenate([data["rate"].values for data in named.values()])
    left, right = float(rates.min()) / 1.3, float(rates.max()) * 1.3
    bottom, top = _losses_shown(named.values())
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "held-out loss")
        notes: list[str] = []
        for row, ((name, data), place) in enumerate(zip(named.items(), order, strict=True)):
            height = None if len(named) == 1 else bottom + (0.5 + row) * _BAR * (top - bottom)
            notes += _draw(draw, name, data, style.model_style(place), (left, right), (bottom, top), height)
        panel = draw.panel(
            title="Held-out loss vs. learning rate",
            note=[*dict.fromkeys(notes)],
            view=((left, right), (bottom, top)),
            size=_SIZE,
            names=("learning rate", "held-out loss (nat)"),
            ticks=(decades(left, right), None),
            is_log=(True, False),
            legend=len(named) > 1,
        )
        return style.laid_out(hv, [panel], backend)


def _losses_shown(outcomes: Any) -> tuple[float, float]:
    outcomes, lows, highs = list(outcomes), [], []
    for data in outcomes:
        losses = data["loss"].values
        losses = losses[np.isfinite(losses)]
        trivial = float(data["trivial_loss"]) if "trivial_loss" in data else float(np.quantile(losses, 0.9))
        lows.append(float(losses.min()))
        highs.append(max(trivial, float(losses.min()) + 0.1))
    low, high = min(lows), max(highs)
    foot = 0.06 if len(outcomes) == 1 else 0.03 + 1.3 * _BAR * len(outcomes)
    return low - foot * (high - low), high + _HEADROOM * (high - low)


def _draw(
    draw: Primitives,
    name: str,
    data: xr.Dataset,
    styling: Mapping[str, str],
    rates: tuple[float, float],
    losses: tuple[float, float],
    height: float | None,
) -> Sequence[str]:
    """Draw one design, its useful rates as a bar at a height if there are several, and return what its marks mean."""
    color, notes = styling["color"], []
    rate, loss = data["rate"].values, data["loss"].values
    slow, edge = (float(data[one]) for one in ("slow_edge", "useful_edge"))
    if bool(data["is_learned"]):
        first, last = slow if np.isfinite(slow) else rates[0], edge if np.isfinite(edge) else rates[1]
        if height is None:
            draw.boxes(first, losses[0], last, losses[1], colors=color, alpha=0.14)
        else:
            draw.bars(first, height, last, height, color=color, width=5)
        notes.append("band: useful rates" if height is None else "bars at the foot: useful rates")
    if "trivial_loss" in data:
        trivial = float(data["trivial_loss"])
        draw.bars(rates[0], trivial, rates[1], trivial, color=style.NEUTRAL, width=1, dash="dashed")
        notes.append("dashed: trivial loss (target frequencies only)")
    if "explosion_edge" in data and np.isfinite(explosion := float(data["explosion_edge"])):
        draw.bars(explosion, losses[0], explosion, losses[1], color=color, width=2, dash="dotted")
        notes.append("dotted vertical line: explosion edge")
    mean = data["mean_loss"].values
    draw.line(rate, np.where(np.isfinite(mean), mean, np.nan), color=color, dash=styling["dash"], width=2.2, label=name)
    notes += draw_runs(draw, name, rate, loss, color, losses)
    best = float(data["best_rate"])
    if np.isfinite(best):
        place = int(np.argmin(np.abs(np.log(rate / best))))
        draw.dots([best], [mean[place]], color=color, marker=styling["marker"], size=13, edge=style.MARK_GROUND)
        notes.append("large mark: best rate")
    return notes


_USEFUL = style.MODEL_COLORS[2]
_ESTIMATES = ("slow_edge", "best_rate", "useful_edge", "useful_edge_low", "useful_edge_high")
#: The axis ends above the trivial loss, by this fraction of the range.
_PILOT_HEADROOM = 0.3


@redrawable
def pilot_losses(data: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the held-out losses of a pilot: one line for each number of updates, one dot for each run.

    The green band is the estimated range of useful rates of the full training. The dotted line is the best rate, the
    solid vertical line the useful edge, and the bar at its foot the interval of that edge. In an assessment, the gray
    vertical lines are the planned rate and its limit. Estimates for another width are drawn with the losses at the
    rates that correspond to theirs at that width.

    Args:
        data: Field ``data`` of the result of `workbench.find_rate`, or node ``pilot`` of an assessment.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is not that of a pilot, or has no finite loss.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16, batch_size=2)
        >>> found = wb.find_rate(model, task, n_steps=1000, budget=200, progress=False)
        >>> len(wb.plots.pilot_losses(found.data))  # panels
        1

    See Also:
        `workbench.find_rate`: Runs the pilot.
        `workbench.plots.rate_curve`: Draws the losses of full training runs.
    """
    require_variables(data, ("loss", "trivial_loss", *_ESTIMATES), what="pilot", source="wb.find_rate()")
    loss = data["loss"].values
    if not np.isfinite(loss).any():
        raise SchemaError("The pilot has no finite loss; repeat it with a smaller wb.find_rate(..., start=).")
    factor = float(data.attrs.get("rate_factor", 1))
    rate, lengths = factor * data["rate"].values, data["n_updates"].values.tolist()
    slow, best, edge, low, high = (float(data[name]) for name in _ESTIMATES)
    planned, limit = (float(data.get(name, np.nan)) for name in ("planned_rate", "upper_rate_limit"))
    known = [one for one in (slow, best, high, planned, limit) if np.isfinite(one)]
    rates = min([float(rate.min()), *known]) / 1.3, max([float(rate.max()), *known]) * 1.3
    losses = _pilot_losses_shown(loss, float(data["trivial_loss"]))
    notes: list[str] = []
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "held-out loss")
        if np.isfinite(edge):
            draw.boxes(slow, losses[0], edge, losses[1], colors=_USEFUL, alpha=0.22)
            draw.bars(edge, losses[0], edge, losses[1], color=_USEFUL, width=2)
            height = losses[0] + 0.03 * (losses[1] - losses[0])
            draw.bars(low, height, high, height, color=_USEFUL, width=5)
            draw.bars(best, losses[0], best, losses[1], color=_USEFUL, width=2, dash="dotted")
            notes.append(f"green: useful rates for {counted(data.attrs['n_steps'], 'update')}")
            notes += ["bar: interval of the useful edge", "dotted: best rate"]
        for at, dash, name in ((planned, "solid", "planned rate"), (limit, "dashed", "limit of the planned rate")):
            if np.isfinite(at):
                draw.bars(at, losses[0], at, losses[1], color=style.NEUTRAL, width=2, dash=dash)
                notes.append(f"gray, {dash}: {name}")
        if np.isfinite(trivial := float(data["trivial_loss"])):
            draw.bars(rates[0], trivial, rates[1], trivial, color=style.NEUTRAL, width=1, dash="dashed")
            notes.append("dashed, horizontal: trivial loss (target frequencies only)")
        for at, (n_updates, color) in enumerate(zip(lengths, style.depth_colors(len(lengths)), strict=True)):
            name, is_tried = counted(n_updates, "update"), ~np.isnan(loss[at])
            is_any = is_tried.any(axis=1)
            mean = mean_over_seeds(loss[at])[is_any]
            draw.line(rate[is_any], np.where(np.isfinite(mean), mean, np.nan), color=color, width=2.2, label=name)
            notes += draw_runs(draw, name, rate, loss[at], color, losses)
        panel = draw.panel(
            title="Held-out loss of the pilot runs",
            note=[*dict.fromkeys(notes)],
            view=(rates, losses),
            size=_SIZE,
            names=("learning rate" if factor == 1 else "learning rate at the planned width", "held-out loss (nat)"),
            ticks=(decades(*rates), None),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def _pilot_losses_shown(loss: np.ndarray, trivial: float) -> tuple[float, float]:
    finite = loss[np.isfinite(loss)]
    low = float(finite.min())
    high = max(trivial if np.isfinite(trivial) else float(np.quantile(finite, 0.8)), low + 0.1)
    return low - 0.06 * (high - low), high + _PILOT_HEADROOM * (high - low)


_WIDTHS, _HEIGHT_OF_ROW = (520, 220), 15
_OF_BANDS = (
    "best_rate", "best_loss", "slow_edge", "useful_edge", "explosion_edge", "smallest_rate", "largest_rate",
)  # fmt: skip


@redrawable
def rate_bands(
    outcomes: xr.Dataset, *, by: str | None = None, places: Mapping[str, int] | None = None, backend: str = "bokeh"
) -> Any:
    """Draw the useful learning rates of several designs: one row each, grouped by architecture.

    The bar extends from the slow edge to the useful edge. If an edge is outside of the rates that were tried, the bar
    ends in a hollow square at the last of them; without any edge there is no bar. The mark on the bar is the best rate,
    the hollow triangle the explosion edge. The right panel shows the held-out loss at the best rate.

    Args:
        outcomes: Dataset from `workbench.rates.rate_outcomes`.
        by: Coordinate whose values have different colors, such as ``"study"``; None draws one color.
        places: Style number (color, marker, dash) of each of these values; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If the dataset lacks a variable or the coordinate, or has no finite loss.
        OptionError: If the backend does not exist, or a value of the coordinate has no style number.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.open("rate_study", "fit")
        >>> runs = study.isel(run=study.architecture.isin(["GPT-2", "Llama"]).values & (study.stage == "coarse").values)
        >>> len(wb.plots.rate_bands(wb.rates.rate_outcomes(runs)))  # panels
        2

    See Also:
        `workbench.rates.rate_outcomes`: Computes the rates of each design.
        `workbench.plots.rate_curve`: Draws the losses behind them.
    """
    needed = (*_OF_BANDS, "architecture", *(() if by is None else (by,)))
    require_variables(outcomes, needed, what="table of outcomes", source="wb.rates.rate_outcomes()")
    if not np.isfinite(outcomes["best_loss"].values).any():
        raise SchemaError("No design has a finite loss; add runs at smaller learning rates.")
    kinds = [""] * outcomes.sizes["cell"] if by is None else [str(one) for one in outcomes[by].values]
    names = list(dict.fromkeys(kinds))
    styles = dict(zip(names, map(style.model_style, style.model_places(names, places)), strict=True))
    heights, ticks = _rows(outcomes["architecture"].values.tolist())
    bottom = min(heights) - 1.0
    rates = float(outcomes["smallest_rate"].min()) / 1.3, float(outcomes["largest_rate"].max()) * 1.3
    losses = outcomes["best_loss"].values[np.isfinite(outcomes["best_loss"].values)]
    margin = 0.08 * float(np.ptp(losses)) or 0.1
    height = round(_HEIGHT_OF_ROW * (1.0 - bottom))
    with style.drawing(backend) as hv:
        left, right = Primitives(hv, backend, "learning rate", "row"), Primitives(hv, backend, "best loss", "row")
        for i, (kind, at) in enumerate(zip(kinds, heights, strict=True)):
            one = {name: float(outcomes[name].values[i]) for name in _OF_BANDS}
            _draw_rates(left, one, at, styles[kind])
        for name, styling in styles.items():
            is_it = np.array(kinds) == name
            loss, at = outcomes["best_loss"].values[is_it], np.array(heights)[is_it]
            right.dots(
                loss, at, color=styling["color"], marker=styling["marker"], label=name, tips=[("held-out loss", "$x")]
            )
        panels = [
            left.panel(
                title="Useful learning rates",
                note=["bar: useful rates", "mark: best rate", "hollow triangle: explosion edge"],
                view=(rates, (bottom, 1.0)),
                size=(_WIDTHS[0], height),
                names=("learning rate", ""),
                ticks=(decades(*rates), ticks),
                is_log=(True, False),
            ),
            right.panel(
                title="Loss at the best rate",
                note=["held-out examples"],
                view=((float(losses.min()) - margin, float(losses.max()) + margin), (bottom, 1.0)),
                size=(_WIDTHS[1], height),
                names=("held-out loss (nat)", ""),
                ticks=(None, ticks),
                bare=(False, True),
                at=(_WIDTHS[0] + 60, 0),
                legend=by is not None,
            ),
        ]
        return style.laid_out(hv, panels, backend, n_columns=2)


def _rows(architectures: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the heights of designs, from 0 downwards, and a tick per architecture, with gaps between them."""
    heights, ticks, at = [0.0] * len(architectures), [], 0.0
    for name in dict.fromkeys(architectures):
        members = [i for i, one in enumerate(architectures) if one == name]
        for i in members:
            heights[i] = at
            at -= 1.0
        ticks.append((at + (len(members) + 1) / 2, name))
        at -= 0.6 if len(members) > 1 else 0.0
    return heights, ticks


def _draw_rates(draw: Primitives, one: Mapping[str, float], at: float, styling: Mapping[str, str]) -> None:
    """Draw one row: the band, the best rate, and the explosion edge."""
    color = styling["color"]
    edges = one["slow_edge"], one["useful_edge"]
    is_known = np.isfinite(one["best_rate"])
    ends = [
        edge if np.isfinite(edge) else limit
        for edge, limit in zip(edges, (one["smallest_rate"], one["largest_rate"]), strict=True)
    ]
    if np.isfinite(edges).any() and is_known:
        draw.bars(ends[0], at, ends[1], at, color=color, width=5, alpha=0.55)
        for edge, end in zip(edges, ends, strict=True):
            if np.isnan(edge):
                draw.dots([end], [at], color=color, marker="square", size=7, is_hollow=True)
        tips = [("best rate", "$x"), ("useful rates", f"{ends[0]:.2g} to {ends[1]:.2g}")]
        draw.dots(
            [one["best_rate"]], [at], color=color, marker=styling["marker"], size=10, edge=style.MARK_GROUND,
            tips=tips,
        )  # fmt: skip
    if np.isfinite(one["explosion_edge"]):
        draw.dots([one["explosion_edge"]], [at], color=color, marker="inverted_triangle", size=8, is_hollow=True)


def draw_runs(
    draw: Primitives, name: str, rate: np.ndarray, loss: np.ndarray, color: str, losses: tuple[float, float]
) -> list[str]:
    """Draw a dot for each run, and a triangle at the top where its loss is not finite or above the axis."""
    at, seed = np.nonzero(~np.isnan(loss))
    value = loss[at, seed]
    is_high = ~(value <= losses[1])
    tips = [("", name), ("learning rate", "$x"), ("held-out loss (nat)", "@shown")][not name :]
    for of, marker in ((~is_high, "circle"), (is_high, "triangle")):
        if of.any():
            shown = np.array([f"{one:.3f}" if np.isfinite(one) else "not finite" for one in value[of]])
            y = np.where(is_high[of], losses[1] - 0.02 * (losses[1] - losses[0]), value[of])
            draw.dots(
                rate[at][of], y, color=color, marker=marker, size=6, alpha=0.7, columns={"shown": shown}, tips=tips
            )
    return ["triangles: loss above the axis or not finite"] if is_high.any() else []
