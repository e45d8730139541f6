"""Reports of an assessment, a diagnosis or a comparison of designs as HTML, Markdown or notebook; see `report`.

quantity.py reads numbers from a tree and raises an exception if one is missing. document.py defines sentences with
slots for such numbers, tables and pictures. assessment_document.py, diagnosis_document.py and comparison_document.py
compose them, effect_space.py lists all measurements, pictures.py draws them, and html.py, markdown.py and notebook.py
write the files.
"""

from workbench.reports.make_report import report

__all__ = ["report"]


def __dir__() -> list[str]:
    return sorted(__all__)
