"""Tables of the page of the course, from the recorded practice cases."""

import pandas as pd

from workbench import course

#: Column of `wb.course.board` -> heading and format.
_COLUMNS = {
    "points": ("points", "{:.1f}"),
    "causes_right": ("causes right", "{:.2f}"),
    "cures_work": ("cures that work", "{:.2f}"),
    "spent": ("budget spent", "{:.2f}"),
}


def board() -> pd.DataFrame:
    """Return the mean scores of each program at each level."""
    scores = course.board()
    table = scores.reset_index()[["level", "player", "n"]].set_axis(["level", "program", "cases"], axis=1)
    return table.assign(**{title: scores[name].map(text.format).values for name, (title, text) in _COLUMNS.items()})
