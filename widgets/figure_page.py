"""An interactive figure below some HTML, as one page that needs no network and no other file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from workbench.plots.figure_files import save
from workbench.widgets.headline import PAGE_CSS

_DARK = (
    "--jp-ui-font-color1: #e6e9ee; --jp-ui-font-color2: #a9b3c0; --jp-content-font-color1: #e6e9ee; color-scheme: dark"
)
_STYLE = f"""{PAGE_CSS}
body {{ font-family: system-ui, sans-serif; }}
h1 {{ margin: 0 2px 8px; font-size: 16px; font-weight: 500; color: var(--jp-ui-font-color1, #222); }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK}; }} body {{ background: #111111; }} }}
"""
_WITHOUT_FIGURE = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"></head><body></body></html>'


def figure_page(words: str, figure: Any, *, style: str = "") -> str:
    """Return an HTML page with some HTML above a figure.

    Args:
        words: The HTML.
        figure: Figure of `workbench.plots`; None for none.
        style: Further CSS.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.html"
        text = _WITHOUT_FIGURE if figure is None else save(figure, path).read_text(encoding="utf-8")
    # The search starts at the end, because the head contains a library.
    before, _, body = text.rpartition("</head>")
    main = f"<body><main>{words}</main>"
    return f"{before}<style>{_STYLE}{style}</style></head>{body.replace('<body>', main, 1)}"
