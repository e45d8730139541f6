"""Figures of a widget as one HTML page with controls of steps, layers, models and signals, without a kernel.

A widget updates its figures in place, step by step. The columns, texts and ranges that it writes are recorded here, and
a script on the page writes them again.
"""

from __future__ import annotations

import base64
import html
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh import __version__ as bokeh_version
from bokeh.embed.util import OutputDocumentFor, standalone_docs_json_and_render_items
from bokeh.models import ColumnDataSource, Range1d, Span, Title

from workbench.plots.figure_files import fit_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bokeh.models import LayoutDOM, Model

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style><script>{library}</script></head>
<body><header><h1>{title}</h1></header><main id="page"></main>
<script type="application/json" id="content">{content}</script><script>{script}</script></body></html>
"""
#: What a widget writes when the step changes: bokeh model -> properties.
_WRITTEN = {ColumnDataSource: ("data",), Title: ("text",), Range1d: ("start", "end"), Span: ("location",)}
#: Maximum number of steps of a page; of more steps, evenly spaced ones are kept.
MOST_STEPS = 40


@dataclass
class SavedView:
    """One figure of a page (None if it is only text), and the parts of it that are hidden with a model or signal.

    ``shown`` has the signals visible at first, ``planes`` the maps that can be zoomed to the square around 1; ``above``
    and ``below`` are HTML. `record` adds the state and the HTML of one step.
    """

    name: str
    root: LayoutDOM | None
    models: Mapping[str, Sequence[Model]] = field(default_factory=dict)
    signals: Mapping[str, Sequence[Model]] = field(default_factory=dict)
    shown: Sequence[str] = ()
    planes: Sequence[Model] = ()
    above: str = ""
    below: str = ""
    frames: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def record(self, below: str | None = None) -> None:
        """Record the state of the figure and of the HTML below it as another step."""
        written: dict[str, dict[str, Any]] = {}
        for model in self.root.references() if self.root is not None else ():
            for kind, names in _WRITTEN.items():
                if isinstance(model, kind):
                    written[model.id] = {name: _packed(getattr(model, name)) for name in names}
        self.frames.append(written)
        self.texts.append(self.below if below is None else below)

    def content(self) -> dict[str, Any]:
        """Return the view as JSON; the steps contain only what differs between them."""
        first = self.frames[0] if self.frames else {}
        moving = {
            (model, name)
            for model, values in first.items()
            for name, value in values.items()
            if any(frame.get(model, {}).get(name) != value for frame in self.frames)
        }
        frames: list[dict[str, dict[str, Any]]] = [{} for _ in self.frames]
        for frame, short in zip(self.frames, frames, strict=True):
            for model, name in moving:
                short.setdefault(model, {})[name] = frame.get(model, {}).get(name)
        hidden = {name: [model.id for model in models] for name, models in self.signals.items()}
        return {
            "name": self.name,
            "item": None if self.root is None else _item(self.root),
            "models": {name: [model.id for model in models] for name, models in self.models.items()},
            "signals": hidden,
            "shown": list(self.shown),
            "planes": [figure.id for figure in self.planes],
            "above": self.above,
            "texts": self.texts if len(set(self.texts)) > 1 else self.texts[:1],
            "frames": frames,
        }


def _item(root: LayoutDOM) -> dict[str, Any]:
    """Return the result of bokeh's ``json_item`` without its warning that Python callbacks need a kernel."""
    with OutputDocumentFor([root]):
        documents, _ = standalone_docs_json_and_render_items([root], suppress_callback_warning=True)
        (document,) = documents.values()
    return {"root_id": root.id, "doc": document, "version": bokeh_version}


def saved_page(
    title: str, views: Sequence[SavedView], *, steps: Sequence[int], step: int, n_layers: int, layers: tuple[int, int]
) -> str:
    """Return an HTML page of several figures, each with one recorded state per step, with one set of controls."""
    content = {
        "views": [view.content() for view in views],
        "steps": [int(step) for step in steps],
        "step": int(step),
        "n_layers": n_layers,
        "layers": list(layers),
    }
    here = Path(__file__)
    return _PAGE.format(
        title=html.escape(title),
        style=here.with_name("saved_page.css").read_text(encoding="utf-8"),
        library=files("bokeh").joinpath("server/static/js/bokeh.min.js").read_text(encoding="utf-8"),
        content=json.dumps(content, allow_nan=False).replace("<", "\\u003c"),
        script=fit_script() + here.with_name("saved_page.js").read_text(encoding="utf-8"),
    )


def chosen_steps(steps: Sequence[int], step: int) -> list[int]:
    """Return at most `MOST_STEPS` evenly spaced steps, and the step that is shown."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).round().astype(int))
    return sorted({*(steps[place] for place in places), step})


def _packed(value: Any) -> Any:
    """Return a value of a bokeh model as JSON, with numeric columns as base64."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {name: _packed_column(column) for name, column in value.items()}
    return _plain(value)


def _packed_column(column: Any) -> Any:
    is_flat = not isinstance(column, list) or not column or np.isscalar(column[0])
    array = np.asarray(column) if is_flat else None
    if array is not None and array.ndim == 1 and array.dtype.kind in "fiub":
        kind = np.float32 if array.dtype.kind == "f" else np.int32
        return {kind.__name__: base64.b64encode(np.ascontiguousarray(array, kind).tobytes()).decode()}
    return _plain(column)


def _plain(value: Any) -> Any:
    """Return numbers, strings and nested lists of them as JSON; NaN and infinity become null."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint32 and value.ndim == 2:
            return {"image": base64.b64encode(value.tobytes()).decode(), "shape": list(value.shape)}
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
