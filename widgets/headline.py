"""The headline of a widget: the result in one sentence, in the color of its state."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGNS: dict[str, str] = {
    CriterionState.HEALTHY: "✔",
    CriterionState.AT_RISK: "▲",
    CriterionState.FAILING: "✖",
    CriterionState.NOT_MEASURED: "○",
}
_LIGHT = "--healthy: #1660b0; --at-risk: #7a5c00; --failing: #b3400a; --not-measured: #5b6470;"
_DARK = "--healthy: #7db4f0; --at-risk: #e3c04d; --failing: #f59a66; --not-measured: #a9b3c0;"
CSS = f"""
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
PAGE_CSS = f"{CSS} @media (prefers-color-scheme: dark) {{ .workbench-answer {{ {_DARK} }} }}"


def headline(state: str, sentence: str, more: Sequence[str] = ()) -> str:
    """Return HTML of a sentence in the color and with the sign of a state, and smaller sentences below."""
    sentence, *more = (html.escape(line).replace(" %", "&nbsp;%") for line in (sentence, *more))
    rest = "".join(f"<p>{line}</p>" for line in more)
    return (
        f'<div role="status" class="workbench-answer {state.replace(" ", "-")}"><p class="sentence">'
        f'<span aria-hidden="true">{_SIGNS[state]}</span> {sentence}</p>{rest}</div>'
    )
