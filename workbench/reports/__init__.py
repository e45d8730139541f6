"""Write an assessment, a diagnosis or a comparison of designs as HTML, Markdown or notebook; start at `report`.

quantity.py finds a number in a tree, or notes that it is missing; document.py holds sentences with slots for such
numbers, tables and pictures; assessment_document.py, diagnosis_document.py and comparison_document.py compose them;
effect_space.py lists every measurement; pictures.py draws; html.py, markdown.py and notebook.py write the files.
"""

from workbench.reports.make_report import report

__all__ = ["report"]


def __dir__() -> list[str]:
    return sorted(__all__)
