"""The risk of a planned training as one HTML page: text, metrics, and an interactive curve."""

from __future__ import annotations

import html
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.plots.figure_files import save
from workbench.widgets.headline import PAGE_CSS, headline
from workbench.widgets.risk.risk_words import CSS, as_html

if TYPE_CHECKING:
    from workbench.widgets.risk.risk_words import Card, RiskAnswer

_DARK = (
    "--jp-ui-font-color1: #e6e9ee; --jp-ui-font-color2: #a9b3c0; --jp-content-font-color1: #e6e9ee; color-scheme: dark"
)
_STYLE = f"""<style>{PAGE_CSS}{CSS}
body {{ font-family: system-ui, sans-serif; }}
h1 {{ margin: 0 2px 8px; font-size: 16px; font-weight: 500; color: var(--jp-ui-font-color1, #222); }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK}; }} body {{ background: #111111; }} }}
</style>"""
_WITHOUT_CURVE = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"></head><body></body></html>'


def page(title: str, answer: RiskAnswer, cards: list[Card], curve: Any) -> str:
    """Return an HTML page that needs no network and no other file.

    Args:
        title: Description of the planned training.
        answer: The predicted outcome.
        cards: Its metrics.
        curve: Figure of the risk over the learning rate; None if the risk is unknown.
    """
    words = f"<h1>{html.escape(title)}</h1>{headline(answer.state, answer.sentence, [answer.more])}{as_html(cards)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.html"
        text = _WITHOUT_CURVE if curve is None else save(curve, path).read_text(encoding="utf-8")
    # The search starts at the end, because the head contains a library.
    before, _, body = text.rpartition("</head>")
    return f"{before}{_STYLE}</head>{body.replace('<body>', f'<body><main>{words}</main>', 1)}"
