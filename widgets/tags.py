"""A control for switching names on and off, which is also a legend with the styles of the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import require_listed
from workbench.plots.style import model_style


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
