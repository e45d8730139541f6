"""A table in which the learner marks the causes of a run, and the change that would have prevented its failure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Cause of a run without a fault, which has no change.
NOTHING = "nothing"


class AnswerTable(anywidget.AnyWidget):
    """A table with a checkbox for each cause and a radio button for each change.

    "Nothing wrong" excludes all other causes and every change.

    Attributes:
        rows: Dicts of ``cause``, ``title``, ``meaning`` and ``change``, the sentence about the change.
        causes: The marked causes, in the order of the rows.
        cure: The cause whose change is chosen; empty for no change.
        is_locked: Whether the answer can no longer be changed.
    """

    _esm = Path(__file__).with_name("answer_table.js")
    _css = Path(__file__).with_name("answer_table.css")
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    causes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    cure = traitlets.Unicode().tag(sync=True)
    is_locked = traitlets.Bool(False).tag(sync=True)

    def fill(self, causes: Mapping[str, Any], cures: Mapping[str, str]) -> None:
        """Show another set of causes and changes, with none chosen."""
        names = [*(name for name in causes if name in cures), NOTHING]
        with self.hold_sync():
            self.causes, self.cure, self.is_locked = [], "", False
            self.rows = [
                {
                    "cause": name,
                    "title": causes[name].title,
                    "meaning": causes[name].meaning,
                    "change": cures.get(name, "no change"),
                }
                for name in names
            ]

    @traitlets.observe("causes")
    def _exclude(self, change: Any) -> None:
        """Keep "nothing wrong" apart from the causes: the one that was marked last remains."""
        before, now = list(change["old"] or ()), list(change["new"])
        if NOTHING not in now:
            return
        if NOTHING not in before:
            self.cure = ""
            if len(now) > 1:
                self.causes = [NOTHING]
        elif len(now) > 1:
            self.causes = [name for name in now if name != NOTHING]

    @traitlets.observe("cure")
    def _contradict(self, change: Any) -> None:
        """Remove "nothing wrong" when a change is chosen."""
        if change["new"] and NOTHING in self.causes:
            self.causes = []
