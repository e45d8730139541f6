"""Themes of widgets: "page", and "projector" with large type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.errors import require_listed

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

#: Theme -> factor of all text sizes.
THEMES = {"page": 1.0, "projector": 1.5}


def check_theme(theme: str) -> None:
    """Raise an exception if a theme does not exist."""
    require_listed("theme", [theme], THEMES)


def enlarge_text(root: LayoutDOM, theme: str) -> None:
    """Scale all text of a bokeh layout to a theme; text that is already scaled stays unchanged."""
    factor = THEMES[theme]
    if factor == 1:
        return
    for model in root.references():
        if theme in model.tags:
            continue
        model.tags = [*model.tags, theme]
        sizes = {name: getattr(model, name) for name in model.properties() if name.endswith("text_font_size")}
        points = {name: size for name, size in sizes.items() if isinstance(size, str) and size.endswith("pt")}
        model.update(**{name: f"{factor * float(size.removesuffix('pt')):g}pt" for name, size in points.items()})
