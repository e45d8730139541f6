"""The themes of widgets: for a page, and with large type for a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.errors import OptionError

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

#: Name -> how much larger than on a page all text is.
THEMES = {"page": 1.0, "projector": 1.5}


def check_theme(theme: str) -> None:
    """Refuse a theme that does not exist.

    Raises:
        OptionError: If there is no such theme.
    """
    if theme not in THEMES:
        raise OptionError(f"The theme is {theme!r}, expected one of {', '.join(THEMES)}.")


def enlarge_text(root: LayoutDOM, theme: str) -> None:
    """Set all text of a bokeh layout in the size of a theme; text that has it already stays."""
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
