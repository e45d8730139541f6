"""Figures of a diagnosis: causes by probability, evidence for and against them, and steps of the symptoms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import clipped, percent
from workbench.option_checks import PositiveInt, checked
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import columns_of
from workbench.plots.primitives import Primitives, decades
from workbench.schema.symptoms import symptom_title

if TYPE_CHECKING:
    import xarray as xr

_WIDTH, _ROW = 420, 24
_SOURCE = "wb.diagnose()"
_TABLE = {"what": "table of evidence", "source": _SOURCE, "dim": "evidence"}
_LONGEST_NAME = 40


@redrawable
def cause_bars(causes: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the probability of each cause as a bar, the most probable at the top; causes in the set are colored.

    "nothing", the result that nothing was found, is no cause and has no bar.

    Args:
        causes: Dataset with dim ``cause``: title, probability and optionally ``is_possible``; without it, only the most
            probable cause is colored.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.cause_bars(tree["causes"].to_dataset())
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Computes the probabilities.
        `workbench.plots.evidence_bars`: Draws the evidence behind them.
    """
    rows = columns_of(causes, ["title", "probability"], what="table of causes", source=_SOURCE, dim="cause")
    probability = rows["probability"].astype(float)
    order = np.argsort(-probability, kind="stable")
    is_possible = np.arange(len(order)) == 0
    if "cause" in causes.coords:
        is_cause = causes["cause"].values[order] != "nothing"
        order, is_possible = order[is_cause], is_possible[is_cause]
    if "is_possible" in causes:
        is_possible = causes["is_possible"].values[order]
    titles, probability = [str(rows["title"][i]) for i in order], probability[order]
    height = -np.arange(len(titles), dtype=float)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "probability", "cause")
        colors = np.where(is_possible, style.DIVERGED, style.NEUTRAL)
        columns, tips = {"name": np.array(titles)}, [("", "@name")]
        ends = (np.zeros(len(titles)), height - 0.32, np.nan_to_num(probability), height + 0.32)
        draw.boxes(*ends, colors=colors, alpha=0.85, columns=columns, tips=tips)
        labels = ["unknown" if np.isnan(value) else percent(value) for value in probability]
        draw.words(np.nan_to_num(probability) + 0.015, height, labels)
        panel = draw.panel(
            title="Causes by probability",
            view=((0, 1.12), (height[-1] - 0.6, 0.6)),
            size=(_WIDTH, _ROW * len(titles) + 12),
            names=("probability", ""),
            ticks=([0.0, 0.25, 0.5, 0.75, 1.0], [*zip(height, titles, strict=True)]),
            formats=("percent", "plain"),
            bounds=(0, 1),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@checked
@redrawable
def evidence_bars(evidence: xr.Dataset, *, n: PositiveInt = 4, backend: str = "bokeh") -> Any:
    """Draw the evidence of each symptom for a cause (right) or against it (left), grouped by cause.

    Args:
        evidence: Dataset with dim ``evidence``: cause, weight (signed log-odds) and ``symptom`` (name).
        n: Number of symptoms per cause with a separate bar, largest weight first; the others share one bar.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing.
        OptionError: If ``n`` is not positive, or the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.evidence_bars(tree["evidence"].to_dataset(), n=3)
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Computes the evidence.
        `workbench.plots.evidence_timeline`: Draws the steps of the symptoms.
    """
    cause, names, weight = _grouped(evidence, n)
    # The row with the name of a cause is above the rows of its symptoms.
    height, heads, up = np.zeros(len(weight)), {}, 0.0
    for i, name in enumerate(cause):
        if name not in heads:
            heads[name], up = up, up - 1
        height[i], up = up, up - 1
    at = height
    reach = 1.35 * float(np.nanmax(np.abs(weight))) or 1.0
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "log-odds", "symptom")
        for is_it, color in ((weight >= 0, style.DIVERGED), (weight < 0, style.CONVERGED)):
            if is_it.any():
                columns, tips = {"name": np.array(names)[is_it]}, [("", "@name")]
                ends = (np.zeros(is_it.sum()), at[is_it] - 0.32, weight[is_it], at[is_it] + 0.32)
                draw.boxes(*ends, colors=color, alpha=0.85, columns=columns, tips=tips)
        for side, is_it in ((1, weight >= 0), (-1, weight < 0)):
            labels = [f"{value:+.2f}" for value in weight[is_it]]
            align = "left" if side > 0 else "right"
            draw.words(weight[is_it] + 0.02 * side * reach, at[is_it], labels, align=align)
        for name, up_here in heads.items():
            draw.words(-0.98 * reach, up_here, name.replace("_", " "), is_bold=True)
        draw.bars([0.0], [up + 0.5], [0.0], [0.5], color=draw.ink, width=1.2)
        step = decades(reach / 4, reach / 1.5)[0]
        ticks = [(k * step, f"{k * step:+g}" if k else "0") for k in range(-4, 5) if abs(k * step) <= 0.95 * reach]
        panel = draw.panel(
            title="Evidence for and against each cause",
            view=((-reach, reach), (up + 0.4, 0.6)),
            size=(_WIDTH, int(_ROW * -up) + 12),
            names=("← against   evidence (log-odds)   for →", ""),
            ticks=(ticks, list(zip(at.tolist(), names, strict=True))),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@redrawable
def evidence_timeline(evidence: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the step at which each symptom was observed: one row per symptom, the earliest at the top.

    The size of a mark is the weight of the symptom.

    Args:
        evidence: Dataset with dim ``evidence``: ``symptom``, step (negative or NaN if there is none) and weight.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing, or no symptom has a step.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.evidence_timeline(tree["evidence"].to_dataset())
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Finds the symptoms.
        `workbench.plots.timeline`: Draws the recorded signals and events.
    """
    rows = columns_of(evidence, [_name_of(evidence), "step", "weight"], **_TABLE)
    step, weight = rows["step"].astype(float), np.abs(rows["weight"].astype(float))
    seen: dict[tuple[str, float], float] = {}
    for name, at, strength in zip(_titles(rows[_name_of(evidence)]), step, weight, strict=True):
        if at >= 0:
            seen[name, at] = max(seen.get((name, at), 0.0), float(np.nan_to_num(strength)))
    if not seen:
        raise SchemaError("No symptom of the evidence has a step; draw evidence_bars() instead.")
    first: dict[str, float] = {}
    for name, at in seen:
        first[name] = min(at, first.get(name, at))
    lines = {name: -float(i) for i, name in enumerate(sorted(first, key=lambda name: (first[name], name)))}
    heaviest, last = max(seen.values()) or 1.0, max(at for _, at in seen)
    n_elsewhere = int((~(step >= 0)).sum())
    margin = 0.04 * (last or 1.0)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "step", "symptom")
        heights = np.array(list(lines.values()))
        draw.bars(0, heights, last + margin, heights, color=style.NEUTRAL, width=0.6, alpha=0.5)
        for (name, at), strength in seen.items():
            size = 7 + 9 * strength / heaviest
            draw.dots(
                [at],
                [lines[name]],
                color=style.DIVERGED,
                size=size,
                columns={"name": np.array([name])},
                tips=[("", "@name")],
            )
        note = [f"{n_elsewhere} symptom{'s' * (n_elsewhere > 1)} without a step not shown"] if n_elsewhere else []
        panel = draw.panel(
            title="Steps at which symptoms were observed",
            note=note,
            view=((-margin, last + 2 * margin), (heights.min() - 0.6, 0.6)),
            size=(_WIDTH, _ROW * len(lines) + 12),
            names=("step", ""),
            ticks=(None, [(up, name) for name, up in lines.items()]),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


def _grouped(evidence: xr.Dataset, n: int) -> tuple[list[str], list[str], np.ndarray]:
    """Return cause, name and weight of each bar: causes by total evidence, symptoms by decreasing weight."""
    rows = columns_of(evidence, ["cause", _name_of(evidence), "weight"], **_TABLE)
    cause, weight = rows["cause"].astype(str), np.nan_to_num(rows["weight"].astype(float))
    names = np.array(_titles(rows[_name_of(evidence)]))
    total = {name: weight[cause == name].sum() for name in dict.fromkeys(cause)}
    bars: list[tuple[str, str, float]] = []
    for name in sorted(total, key=lambda name: -total[name]):
        of_cause = np.flatnonzero(cause == name)
        of_cause = of_cause[np.argsort(-np.abs(weight[of_cause]), kind="stable")]
        n_own = len(of_cause) if len(of_cause) == n + 1 else n
        own, rest = of_cause[:n_own], of_cause[n_own:]
        bars += [(name, str(names[i]), float(weight[i])) for i in sorted(own, key=lambda i: -weight[i])]
        if len(rest):
            bars.append((name, f"{len(rest)} others combined", float(weight[rest].sum())))
    return [bar[0] for bar in bars], [bar[1] for bar in bars], np.array([bar[2] for bar in bars])


def _name_of(evidence: xr.Dataset) -> str:
    """Return the variable that names the symptoms; earlier versions called it ``sign`` or ``quantity``."""
    return next(name for name in ("symptom", "sign", "quantity") if name in evidence)


def _titles(quantity: np.ndarray) -> list[str]:
    return [clipped(symptom_title(str(name)), _LONGEST_NAME) for name in quantity]
