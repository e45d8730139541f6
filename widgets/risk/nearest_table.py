"""The recorded runs that are most like a case, a row for each cell."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import fixed
from workbench.risk.measured_stable_rates import stable_rates
from workbench.widgets.risk.risk_verdict import HEAD
from workbench.widgets.tables import CELL, NAME, TABLE

if TYPE_CHECKING:
    import xarray as xr

#: Variables of the runs that the table reads besides those of `stable_rates`.
NEEDS = (
    "cell", "learning_rate", "has_diverged", "divergence_step", "architecture", "init_std", "d_model", "n_layers",
    "task", "batch_size", "optimizer", "schedule", "warmup", "clip_norm", "n_steps",
)  # fmt: skip
_CELL, _NAME = (style.replace("12px", "9px") for style in (CELL, NAME))
_WRAPPED = _NAME.replace("nowrap", "normal") + ";min-width:84px"
_HEADS = (
    ("architecture", _NAME, ""),
    ("width × layers", _CELL, ""),
    ("init scale", _CELL, ""),
    ("task, batch", _WRAPPED, ""),
    ("trained with", _WRAPPED, ""),
    ("run at", _CELL, "The recorded rate that is nearest to the planned one"),
    ("how it ended", _NAME, "The runs at that rate, one a seed"),
    ("stable to", _CELL, "Largest rate up to which less than 20 % of the cell's runs diverged"),
    ("distance", _CELL, "In the features of the risk model; 1: as far as cells that are familiar to each other"),
)


def nearest_table(nearest: xr.Dataset, rate: float) -> str:
    """Outcomes of recorded runs at about the planned rate.

    Args:
        nearest: Result of `workbench.risk.neighbours.Neighbours.cells`.
        rate: The planned learning rate.
    """
    stable = {
        cell: _stable(last, first)
        for cell, last, first in zip(
            *_columns(stable_rates(nearest), "cell", "last_stable", "first_unstable"), strict=True
        )
    }
    runs = dict(zip((*NEEDS, "distance"), _columns(nearest, *NEEDS, "distance"), strict=True))
    head = "".join(
        f'<th scope="col" style="{style};font-weight:600" title="{html.escape(tip)}">{name}</th>'
        for name, style, tip in _HEADS
    )
    body = ""
    for cell, words in stable.items():
        is_it = runs["cell"] == cell
        cells = _cells({name: values[is_it] for name, values in runs.items()}, words, rate)
        body += "<tr>" + "".join(
            f'<td style="{style}">{html.escape(text)}</td>' for (_, style, _), text in zip(_HEADS, cells, strict=True)
        )
        body += "</tr>"
    caption = f"text-align:left;padding:6px 0 2px;{HEAD}"
    return (
        f'<div style="overflow-x:auto"><table style="{TABLE};font-size:12px"><caption style="{caption}">'
        f"Recorded runs most like this one</caption><tr>{head}</tr>{body}</table></div>"
    )


def _columns(data: xr.Dataset, *names: str) -> list[np.ndarray]:
    return [data[name].values for name in names]


def _cells(runs: dict[str, np.ndarray], stable: str, rate: float) -> tuple[str, ...]:
    """The texts of one row, of the runs of one cell."""
    first = {name: values[0] for name, values in runs.items()}
    rates = runs["learning_rate"]
    at = rates[np.abs(np.log(rates / rate)).argmin()]
    has_diverged = runs["has_diverged"].astype(bool)[rates == at]
    return (
        str(first["architecture"]),
        f"{first['d_model']} × {first['n_layers']}",
        f"{first['init_std']:g}" if np.isfinite(first["init_std"]) else "–",
        f"{str(first['task']).replace('_', ' ')}, {first['batch_size']}",
        _plan(first),
        f"{at:.2g}",
        _ending(has_diverged, runs["divergence_step"][rates == at]),
        stable,
        fixed(first["distance"], 2),
    )


def _plan(first: dict[str, Any]) -> str:
    words = [str(first["optimizer"])]
    words += [str(first["schedule"])] if first["schedule"] != "constant" else []
    words += [f"warm-up {first['warmup']}"] if first["warmup"] else []
    words += [f"clip {first['clip_norm']:g}"] if np.isfinite(first["clip_norm"]) else []
    return ", ".join(words)


def _ending(has_diverged: np.ndarray, steps: np.ndarray) -> str:
    n_runs, n_diverged = len(has_diverged), int(has_diverged.sum())
    if not n_diverged:
        return f"○ survived ({n_runs} run{'s' if n_runs > 1 else ''})"
    return f"● {n_diverged} of {n_runs} diverged, step {np.median(steps[has_diverged]):.0f}"


def _stable(last: float, first: float) -> str:
    """In words: the last stable rate of the cell's grid, or the bound that it gives."""
    if np.isnan(first):
        return f"≥ {last:.2g}"
    return f"< {first:.2g}" if np.isnan(last) else f"{last:.2g}"
