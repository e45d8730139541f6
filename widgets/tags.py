"""A control for switching names on and off, which is also a legend with the styles of the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.errors import require_listed
from workbench.plots.style import model_style

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ESM = """
const SHAPES = {
  circle: '<circle r="3.6"/>',
  square: '<rect x="-3.3" y="-3.3" width="6.6" height="6.6"/>',
  triangle: '<path d="M0-4.2 4.2 3.4-4.2 3.4Z"/>',
  diamond: '<path d="M0-4.6 4.6 0 0 4.6-4.6 0Z"/>',
  inverted_triangle: '<path d="M0 4.2 4.2-3.4-4.2-3.4Z"/>',
  star: '<path d="M0-5 1.2-1.6 4.8-1.5 1.9.6 3 4 0 2-3 4-1.9.6-4.8-1.5-1.2-1.6Z"/>',
};
const DASHES = { solid: "", dashed: "6", dotted: "2 4", dashdot: "2 4 6 4" };

const swatch = ({ color, marker, dash }) => `<svg width="34" height="12" viewBox="-17 -6 34 12" aria-hidden="true"
  fill="${color}" stroke="${color}"><path d="M-17 0H17" stroke-width="1.8" stroke-dasharray="${DASHES[dash]}"/>
  <g stroke="none">${SHAPES[marker]}</g></svg>`;

function render({ model, el }) {
  el.classList.add("workbench-tags");
  const choose = (names) => {
    const chosen = new Set(names);
    model.set("value", model.get("options").map((option) => option.name).filter((name) => chosen.has(name)));
    model.save_changes();
  };
  const button = (text, tip, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.title = tip;
    made.textContent = text;
    made.onclick = act;
    return made;
  };
  const draw = () => {
    const focused = [...el.querySelectorAll("button")].indexOf(document.activeElement);
    const options = model.get("options"), chosen = new Set(model.get("value"));
    const label = document.createElement("span");
    label.className = "workbench-tags-label";
    label.textContent = model.get("label");
    el.setAttribute("role", "group");
    el.setAttribute("aria-label", model.get("label"));
    const tags = options.map((option) => {
      const tip = (option.tip ? option.tip + "\\n" : "") + "Click to show or hide; Alt-click to show only this one.";
      const tag = button(option.text, tip, (event) => {
        const rest = [...chosen].filter((name) => name !== option.name);
        choose(event.altKey ? [option.name] : chosen.has(option.name) ? rest : [...chosen, option.name]);
      });
      tag.className = "workbench-tag";
      tag.setAttribute("aria-pressed", chosen.has(option.name));
      if (option.color) tag.insertAdjacentHTML("afterbegin", swatch(option));
      return tag;
    });
    const is_full = options.every((option) => chosen.has(option.name));
    const all = button("All", "Show all", () => choose(options.map((option) => option.name)));
    all.className = "workbench-tags-all";
    all.disabled = is_full;
    const list = document.createElement("div");
    list.append(...tags, ...(options.length > 2 ? [all] : []));
    el.replaceChildren(label, list);
    el.querySelectorAll("button")[focused]?.focus();
  };
  model.on("change:options change:value change:label", draw);
  draw();
  return () => model.off("change:options change:value change:label", draw);
}
export default { render };
"""

_CSS = """
.workbench-tags { display: flex; margin: 3px 2px; font-size: 13px; color: var(--jp-ui-font-color1, #222); }
.workbench-tags-label { flex: none; width: 64px; margin-right: 8px; text-align: right; line-height: 26px; }
.workbench-tags > div { display: flex; flex-wrap: wrap; align-items: center; gap: 6px; }
.workbench-tags button { font: inherit; color: inherit; cursor: pointer; }
.workbench-tag { display: inline-flex; align-items: center; gap: 7px; padding: 2px 11px; border-radius: 13px;
  border: 1px solid var(--jp-border-color1, #bdbdbd); background: transparent; line-height: 20px; }
.workbench-tag[aria-pressed="true"] { background: var(--jp-layout-color2, #eee);
  border-color: var(--jp-border-color0, #9e9e9e); }
.workbench-tag[aria-pressed="false"] { color: var(--jp-ui-font-color2, #616161); border-style: dashed; }
.workbench-tag[aria-pressed="false"] svg { opacity: 0.35; }
.workbench-tags button:hover { border-color: var(--jp-brand-color1, #1976d2); }
.workbench-tags button:focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
.workbench-tags-all { border: none; background: none; padding: 2px 6px; text-decoration: underline; }
.workbench-tags-all:disabled { visibility: hidden; }
"""


class Tags(anywidget.AnyWidget):
    """A row of names that can be switched on and off."""

    _esm = _ESM
    _css = _CSS
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
