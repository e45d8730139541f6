"""Lines of Python that make the visible widgets with everything that they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.widgets.workbench_parts.calls import LibraryCall, count_uses, statements, unused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workbench.widgets.workbench_parts.views import View


@dataclass(frozen=True)
class MadeView:
    """A widget that a view made.

    Attributes:
        view: The view.
        call: The call that made the widget.
        widget: The widget.
        before: Values of its controls when it was made.
    """

    view: View
    call: LibraryCall
    widget: Any
    before: dict[str, Any]


def code_of(visible: Iterable[MadeView]) -> str:
    """Return the code that makes these widgets and brings their controls into their present state."""
    visible = list(visible)
    if not visible:
        return ""
    counts: dict[Any, int] = {}
    for made in visible:
        for part in made.call.parts:
            count_uses(part, counts)
    names: dict[Any, str] = {}
    lines: list[str] = []
    for made in visible:
        text = made.call.code([statements(part, names, lines, counts) for part in made.call.parts])
        names[made.call] = variable = unused(made.call.variable, names.values())
        lines += [f"{variable} = {text}", *made.view.changes(made.widget, variable, made.before)]
    shown = [names[made.call] for made in visible]
    lines.append(shown[0] if len(shown) == 1 else f"display({', '.join(shown)})")
    return "\n".join([*_imports(visible, lines), "", *lines])


def _imports(visible: list[MadeView], lines: list[str]) -> list[str]:
    text = "\n".join(lines)
    found = ["import workbench as wb"] if "wb." in text else []
    if "xr." in text:
        found.insert(0, "import xarray as xr")
    if len(visible) > 1:
        found.insert(0, "from IPython.display import display")
    functions = sorted({made.call.function for made in visible}, key=str.lower)
    return [*found, f"from workbench.widgets import {', '.join(functions)}"]
