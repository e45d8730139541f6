"""Write the report of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.io.atomic import replacing

FOLDER = Path(__file__).resolve().parent


def write_report(
    name: str,
    title: str,
    about: str,
    columns: Sequence[str],
    rows: Sequence[str],
    after: str = "",
    *,
    folder: Path = FOLDER,
) -> None:
    """Write ``benchmarks/<name>.md`` atomically and print it.

    Args:
        name: Name of the file, without its suffix.
        title: Heading of the report.
        about: Description of the measurement and the machine.
        columns: Headings of the columns.
        rows: Rows of the table, in Markdown.
        after: Closing sentence; empty if there is none.
        folder: Folder of the file.
    """
    text = "\n".join([f"# {title}", "", about, "", *table(columns, rows), "", *([after, ""] if after else [])])
    with replacing(folder / f"{name}.md") as partial:
        partial.write_text(text)
    print(text)


def cell(text: str) -> str:
    """Return a text as the cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: Sequence[str], rows: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table, whose rows are given in Markdown."""
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows]
