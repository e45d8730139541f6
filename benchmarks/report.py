"""How a benchmark's table is written."""

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
    """Write ``benchmarks/<name>.md``, whole or not at all, and print it.

    Args:
        name: Of the file.
        title: Its heading.
        about: What was measured, how and where.
        columns: Headings of the table.
        rows: Its rows, in Markdown.
        after: A closing sentence.
        folder: Where to write it, if not there.
    """
    text = "\n".join([f"# {title}", "", about, "", *table(columns, rows), "", *([after, ""] if after else [])])
    with replacing(folder / f"{name}.md") as partial:
        partial.write_text(text)
    print(text)


def table(columns: Sequence[str], rows: Sequence[str]) -> list[str]:
    """The lines of a table in Markdown; its rows are in Markdown already."""
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows]
