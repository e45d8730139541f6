"""HTML in JupyterLab's colors: tables, headlines, pages with a figure, and names that can be switched on and off."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
import xarray as xr

from workbench.errors import require_listed
from workbench.formatting import fixed
from workbench.koopman.measures import MASSES, summarize
from workbench.plots.figure_files import save
from workbench.plots.style import model_style
from workbench.schema.runs import SPECTRA
from workbench.schema.statuses import CriterionState


class Tags(anywidget.AnyWidget):
    """A row of names that can be switched on and off."""

    _esm = Path(__file__).with_name("tags.js")
    _css = Path(__file__).with_name("tags.css")
    label = traitlets.Unicode().tag(sync=True)
    options = traitlets.List(traitlets.Dict()).tag(sync=True)
    value = traitlets.List(traitlets.Unicode()).tag(sync=True)

    @property
    def names(self) -> list[str]:
        """All names, whether switched on or not."""
        return [option["name"] for option in self.options]

    def choose(self, names: str | Iterable[str]) -> None:
        """Switch these names on and all others off."""
        names = [names] if isinstance(names, str) else list(names)
        require_listed(self.label, names or [None], self.names)
        self.value = [name for name in self.names if name in names]


def model_tags(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return options for models, each with its style in figures that show all of them."""
    return [{"name": name, "text": name, **model_style(index)} for index, name in enumerate(names)]


#: From the center of the circle outwards; the order of the columns of the table and of the parts of its bars.
_MASS_COLORS = {
    "contractive_mass": "#7f7f7f",
    "intermediate_mass": "#0f8f66",
    "near_unit_mass": "#1f77d4",
    "expansive_mass": "#d55e00",
}
#: Maximum number of rows of a table of modes.
_N_ROWS = 40
CELL = "padding:2px 12px 2px 0;text-align:right;white-space:nowrap"
NAME = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap"
#: Layout of a widget that contains a table, which scrolls on a narrow page.
SCROLLING = {"overflow": "auto hidden"}
#: Styles of headings and of secondary text.
HEAD = "font-weight:700;font-size:15px;line-height:1.4;color:var(--jp-ui-font-color1,#222)"
MUTED = "font-size:12px;line-height:1.4;white-space:normal;color:var(--jp-ui-font-color2,#616161)"
TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;line-height:1.5;color:var(--jp-ui-font-color1)"


def mass_table(measured: Mapping[str, xr.Dataset]) -> str:
    """Return a table with the mean masses and the largest spectral radius over the layers of each model."""
    names = list(_MASS_COLORS)
    head = "".join(
        f'<th style="{CELL};font-weight:600"><span style="color:{_MASS_COLORS[name]}">■</span> '
        f"{html.escape(SPECTRA[name].long_name.replace(' mass', ''))}</th>"
        for name in names
    )
    rows = []
    for model, data in measured.items():
        if not data.sizes["layer"]:
            rows.append(
                f'<tr><td style="{NAME}">{html.escape(model)}</td><td colspan="6">no layer in this range</td></tr>'
            )
            continue
        summary = summarize(data[[*names, "spectral_radius"]])
        cells, bar = "", ""
        for name in names:
            mean, lowest, highest = (float(summary[name].sel(statistic=kind)) for kind in ("mean", "min", "max"))
            spread = f"lowest {lowest:.2f}, highest {highest:.2f} of {data.sizes['layer']} layers"
            cells += f'<td style="{CELL}" title="{spread}">{fixed(mean)}</td>'
            width = 0 if np.isnan(mean) else 100 * mean
            bar += f'<span style="width:{width:.2f}%;background:{_MASS_COLORS[name]}"></span>'
        bar = f'<span style="display:flex;width:120px;height:10px;border-radius:2px;overflow:hidden">{bar}</span>'
        radius = float(summary["spectral_radius"].sel(statistic="max"))
        rows.append(
            f'<tr><td style="{NAME}">{html.escape(model)}</td><td style="{CELL}">{bar}</td>{cells}'
            f'<td style="{CELL}">{fixed(radius)}</td></tr>'
        )
    return (
        f'<table style="{TABLE}"><tr><th style="{NAME}">mass, mean over layers</th><td></td>{head}'
        f'<th style="{CELL}">largest ρ</th></tr>{"".join(rows)}</table>'
    )


def mode_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of the first rows of `SpectrumExplorer.selected`, or a hint if nothing is selected."""
    if not rows:
        hint = "Select modes in a panel (box, lasso or click) to list them here."
        return f'<span style="color:var(--jp-ui-font-color2)">{hint}</span>'
    head = "".join(
        f'<th style="{NAME if name == "model" else CELL}">{name}</th>'
        for name in (
            "model",
            "layer",
            "mode",
            "λ",
            "|λ|",
            SPECTRA["residual"].long_name,
            SPECTRA["is_reliable"].long_name,
        )
    )
    body = ""
    for row in rows[:_N_ROWS]:
        value = row["eigenvalue"]
        cells = (
            str(row["layer"]),
            str(row["mode"]),
            f"{value.real:.4f} {'−' if value.imag < 0 else '+'} {abs(value.imag):.4f}i",
            f"{row['modulus']:.4f}",
            fixed(row["residual"]),
            "yes" if row["is_reliable"] else "no",
        )
        body += f'<tr><td style="{NAME}">{html.escape(row["model"])}</td>'
        body += "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells) + "</tr>"
    more = (
        f"<div>and {len(rows) - _N_ROWS} more; <code>selected()</code> returns all of them</div>"
        if len(rows) > _N_ROWS
        else ""
    )
    return f'<table style="{TABLE}"><tr>{head}</tr>{body}</table>{more}'


def muted(sentence: str) -> str:
    """Return HTML of a line of explanation."""
    return f'<div style="color:var(--jp-ui-font-color2);line-height:1.5;white-space:normal">{sentence}</div>'


assert set(_MASS_COLORS) == set(MASSES)


_SIGNS: dict[str, str] = {
    CriterionState.HEALTHY: "✔",
    CriterionState.AT_RISK: "▲",
    CriterionState.FAILING: "✖",
    CriterionState.NOT_MEASURED: "○",
}
_LIGHT = "--healthy: #1660b0; --at-risk: #7a5c00; --failing: #b3400a; --not-measured: #5b6470;"
_DARK = "--healthy: #7db4f0; --at-risk: #e3c04d; --failing: #f59a66; --not-measured: #a9b3c0;"
HEADLINE_CSS = f"""
.workbench-answer {{ {_LIGHT} --tone: var(--not-measured); box-sizing: border-box; min-height: 78px;
  margin: 4px 2px 8px; padding: 2px 14px; border-left: 6px solid var(--tone); font-size: 14px; line-height: 1.5;
  overflow-wrap: anywhere; color: var(--jp-content-font-color1, #222); white-space: normal; }}
[data-jp-theme-light="false"] .workbench-answer {{ {_DARK} }}
.workbench-answer.healthy {{ --tone: var(--healthy); }}
.workbench-answer.at-risk {{ --tone: var(--at-risk); }}
.workbench-answer.failing {{ --tone: var(--failing); }}
.workbench-answer p {{ margin: 0; }}
.workbench-answer .sentence {{ color: var(--tone); font-size: 1.3em; line-height: 1.4; font-weight: 600; }}
"""
#: The same style for a page that follows the theme of the operating system.
PAGE_CSS = f"{HEADLINE_CSS} @media (prefers-color-scheme: dark) {{ .workbench-answer {{ {_DARK} }} }}"


def headline(state: str, sentence: str, more: Sequence[str] = ()) -> str:
    """Return HTML of a sentence in the color and with the sign of a state, and smaller sentences below."""
    sentence, *more = (html.escape(line).replace(" %", "&nbsp;%") for line in (sentence, *more))
    rest = "".join(f"<p>{line}</p>" for line in more)
    return (
        f'<div role="status" class="workbench-answer {state.replace(" ", "-")}"><p class="sentence">'
        f'<span aria-hidden="true">{_SIGNS[state]}</span> {sentence}</p>{rest}</div>'
    )


_DARK_PAGE = (
    "--jp-ui-font-color1: #e6e9ee; --jp-ui-font-color2: #a9b3c0; --jp-content-font-color1: #e6e9ee; color-scheme: dark"
)
_STYLE = f"""{PAGE_CSS}
body {{ font-family: system-ui, sans-serif; }}
h1 {{ margin: 0 2px 8px; font-size: 16px; font-weight: 500; color: var(--jp-ui-font-color1, #222); }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_PAGE}; }} body {{ background: #111111; }} }}
"""
_WITHOUT_FIGURE = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"></head><body></body></html>'


def figure_page(words: str, figure: Any, *, style: str = "") -> str:
    """Return an HTML page with some HTML above a figure of `workbench.plots`, or above none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.html"
        text = _WITHOUT_FIGURE if figure is None else save(figure, path).read_text(encoding="utf-8")
    # The search starts at the end, because the head contains a library.
    before, _, body = text.rpartition("</head>")
    main = f"<body><main>{words}</main>"
    return f"{before}<style>{_STYLE}{style}</style></head>{body.replace('<body>', main, 1)}"
