"""Individual predictors of divergence, ours and published, as a chart and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import with_interval
from workbench.option_checks import PositiveInt, checked
from workbench.plots import style
from workbench.plots.dataset_columns import columns_of, names_along
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

OURS, PUBLISHED = style.MODEL_COLORS[0], style.MODEL_COLORS[1]
_SOURCE = "workbench.studies.outcomes.predictor_table()"
_OURS = ("auroc", "low", "high")
_COUNTS = ("n_runs", "n_diverged")
_PUBLISHED = ("published_auroc", "published_low", "published_high")
_WITHIN = ("auroc_within_architecture", "auroc_within_cell")
_WIDTH, _ROW = 640, 34
#: Positions of the columns of numbers to the right of the chart, which ends at 1.
_OURS_AT, _PUBLISHED_AT, _END = 1.06, 1.5, 1.92


@redrawable
def predictor_table(table: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the area under the ROC curve of each predictor, ours and published, with intervals.

    There is one row per predictor. A dot with a line is our value with its interval, a hollow diamond the published
    value. A small hollow triangle is our value among runs of the same architecture: if it is near the vertical line at
    0.5, the score only separates architectures. Below 0.5, higher scores belong to runs that converge.

    Args:
        table: Dataset with dim ``predictor``, whose coordinate ``long_name`` is shown if it exists: auroc, low, high;
            optionally n_runs, n_diverged, published_auroc, published_low, published_high, auroc_within_architecture
            and auroc_within_cell; NaN if unknown. The attribute ``level`` is the confidence level of our intervals.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is not a table of predictors, or is empty.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> table = wb.outcomes.predictor_table(wb.samples.divergence_sweep("norms"), n_bootstrap=0)
        >>> figure = wb.plots.predictor_table(table)
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.outcomes.predictor_table`: Computes the table.
        `workbench.plots.predictor_frame`: Returns it as numbers.
        `workbench.plots.roc`: Draws the curves.
    """
    names, columns = _columns(table)
    row = -np.arange(len(names), dtype=float)
    has_published = np.isfinite(columns["published_auroc"])
    shift = 0.14 if has_published.any() else 0.0
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "AUROC", "predictor")
        draw.bars([0.5], [row[-1] - 0.6], [0.5], [0.6], color=style.NEUTRAL, width=1, dash="dashed")
        draw.bars(columns["low"], row + shift, columns["high"], row + shift, color=OURS, width=2.2)
        shown = {"predictor_": np.array(names)} | columns
        tips = [("", "@predictor_"), ("ours", "@auroc{0.000} [@low{0.000}, @high{0.000}]")]
        tips += [("runs", "@n_runs{0}, @n_diverged{0} diverged")] if np.isfinite(columns["n_runs"]).any() else []
        is_known = np.isfinite(columns["auroc"])
        ours = {key: column[is_known] for key, column in shown.items()}
        draw.dots(ours["auroc"], row[is_known] + shift, color=OURS, size=10, columns=ours, tips=tips)
        if has_published.any():
            theirs = {key: column[has_published] for key, column in shown.items()}
            below = row[has_published] - shift
            draw.bars(theirs["published_low"], below, theirs["published_high"], below, color=PUBLISHED, width=1.6)
            styling: dict[str, Any] = {"color": PUBLISHED, "marker": "diamond", "size": 10, "is_hollow": True}
            tips = [("", "@predictor_"), ("published", "@published_auroc{0.000}")]
            draw.dots(theirs["published_auroc"], below, columns=theirs, tips=tips, **styling)
        within = columns["auroc_within_architecture"]
        if (has_within := np.isfinite(within)).any():
            tips = [("", "@predictor_"), ("within architectures", "@auroc_within_architecture{0.000}")]
            styling = {"color": OURS, "marker": "triangle", "size": 7, "is_hollow": True, "tips": tips}
            kept = {key: column[has_within] for key, column in shown.items()}
            draw.dots(within[has_within], row[has_within] + shift, columns=kept, **styling)
        heads = [(_OURS_AT, "ours", OURS, _OURS), (_PUBLISHED_AT, "published", PUBLISHED, _PUBLISHED)]
        for at, head, color, keys in heads if has_published.any() else heads[:1]:
            draw.words(at, 0.62, head, color=color, valign="bottom", is_bold=True)
            for place, numbers in zip(row, zip(*(columns[key] for key in keys), strict=True), strict=True):
                draw.words(at, place, with_interval(*numbers), color=color)
        panel = draw.panel(
            title="Area under the ROC curve for divergence",
            note=_note(columns, has_published=bool(has_published.any()), level=float(table.attrs.get("level", 0.95))),
            view=((-0.02, _END if has_published.any() else _PUBLISHED_AT), (row[-1] - 0.6, 1.15)),
            size=(_WIDTH, _ROW * len(names) + 40),
            names=("", ""),
            ticks=([0.0, 0.25, 0.5, 0.75, 1.0], list(zip(row.tolist(), names, strict=True))),
            grid=False,
            bounds=(0.0, 1.0),
        )
        return style.laid_out(hv, [panel], backend)


@checked
def predictor_frame(table: xr.Dataset, *, digits: PositiveInt = 3) -> pd.DataFrame:
    """Return the table of predictors as numbers: one row per predictor, our values next to the published ones.

    Args:
        table: Dataset as for `predictor_table`.
        digits: Number of decimals; at least 1.

    Returns:
        Numbers under two header rows: "ours" or "published", then the quantity. Columns without any value are omitted;
        NaN means unknown.

    Raises:
        SchemaError: If the dataset is not a table of predictors, or is empty.
        OptionError: If ``digits`` is below 1.

    Example:
        >>> import workbench as wb
        >>> table = wb.outcomes.predictor_table(wb.samples.divergence_sweep("norms"), n_bootstrap=0)
        >>> frame = wb.plots.predictor_frame(table)
        >>> frame["published"]["AUROC"].iloc[0].item()
        0.995

    See Also:
        `workbench.outcomes.predictor_table`: Computes the table.
        `workbench.plots.predictor_table`: Draws it.
    """
    import pandas as pd

    names, columns = _columns(table)
    words = {"auroc": "AUROC", "low": "low", "high": "high", "n_runs": "runs", "n_diverged": "diverged"}
    words |= {"auroc_within_architecture": "within architecture", "auroc_within_cell": "within cell"}
    frame = {}
    for key, column in columns.items():
        if np.isnan(column).all():
            continue
        source = "published" if key in _PUBLISHED else "ours"
        heading = (source, words[key.removeprefix("published_")])
        frame[heading] = pd.array(column).astype("Int64") if key in _COUNTS else np.round(column, digits)
    drawn = pd.DataFrame(dict(enumerate(frame.values())), index=pd.Index(names, name="predictor"))
    drawn.columns = pd.MultiIndex.from_tuples(list(frame))
    return drawn


def _columns(table: xr.Dataset) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the names of the rows and all columns, with NaN for unknown values."""
    optional = (*_WITHIN, *_COUNTS, *_PUBLISHED)
    columns = columns_of(table, _OURS, optional=optional, what="table of predictors", source=_SOURCE, dim="predictor")
    if np.isnan(columns["auroc"].astype(float)).all():
        raise SchemaError(
            "The table of predictors has no AUROC, which needs both runs that diverged and runs that converged."
        )
    unknown = np.full(len(columns["auroc"]), np.nan)
    return names_along(table, "predictor"), {
        key: columns.get(key, unknown).astype(float) for key in (*_OURS, *optional)
    }


def _note(columns: dict[str, np.ndarray], *, has_published: bool, level: float) -> list[str]:
    words = [f"● ours with {100 * level:g} % interval"]
    if has_published:
        words.append("◇ published")
    if np.isfinite(columns["auroc_within_architecture"]).any():
        words.append("△ ours within architectures")
    words.append("┆ chance level")
    if (
        np.isfinite(columns["n_runs"]).all()
        and len(set(columns["n_runs"])) == 1
        and len(set(columns["n_diverged"])) == 1
    ):
        words.append(f"{columns['n_runs'][0]:g} runs, {columns['n_diverged'][0]:g} diverged")
    return words
