"""The risk of a planned training as one HTML page: text, metrics, and an interactive curve."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from workbench.widgets.figure_page import figure_page
from workbench.widgets.headline import headline
from workbench.widgets.risk.risk_words import CSS, as_html

if TYPE_CHECKING:
    from workbench.widgets.risk.risk_words import Card, RiskAnswer


def page(title: str, answer: RiskAnswer, cards: list[Card], curve: Any) -> str:
    """Return an HTML page that needs no network and no other file.

    Args:
        title: Description of the planned training.
        answer: The predicted outcome.
        cards: Its metrics.
        curve: Figure of the risk over the learning rate; None if the risk is unknown.
    """
    words = f"<h1>{html.escape(title)}</h1>{headline(answer.state, answer.sentence, [answer.more])}{as_html(cards)}"
    return figure_page(words, curve, style=CSS)
