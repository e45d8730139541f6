"""Reports: a tree of an assessment, a diagnosis or a comparison of designs, told to people; `report` is the way in.

quantity.py finds a number in a tree, or says that it is not there; words.py writes it; document.py has sentences with
slots for such numbers, tables and pictures; assessment.py, diagnosis.py and comparison.py say what is to be said;
effect_space.py lists everything that was measured; pictures.py draws; html.py, markdown.py and notebook.py write.
"""

from workbench.reports.make_report import report

__all__ = ["report"]


def __dir__() -> list[str]:
    return sorted(__all__)
