"""The counts in the text of the pages on third-party models and checkpoints are those of their own tables."""

import re
from collections import Counter

import pytest

from tests.docs.page_numbers import ROOT

pytestmark = pytest.mark.recorded

MODELS, CHECKPOINTS = "third_party_models", "third_party_checkpoints"


def page(name):
    return (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")


def chapters(text):
    """Title -> rows of the tables below it, as lists of cells without the head of the table."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.MULTILINE):
        title, _, rest = chapter.partition("\n")
        rows = [line for line in rest.splitlines() if line.startswith("|")]
        found[title] = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows[2:]]
    return found


def test_the_counts_of_models_are_those_of_the_tables():
    first, *_ = text = re.split(r"^## ", page(MODELS), flags=re.MULTILINE)
    tables = chapters(page(MODELS))
    head = ["works", "rejected as listed", "rejected unexpectedly", "wrong", "crash", "skipped"]
    counts = {
        cells[0].strip("*"): list(map(int, cells[1:]))
        for line in first.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[1:] and cells[1].isdigit()
    }
    models, total = [0] * 7, counts.pop("All models")
    assert len(counts) == len(text) - 1
    for title, stated in counts.items():
        outcomes = Counter(row[-2] for row in tables[title])
        found = [outcomes[word] for word in head]
        assert [*found, len(tables[title])] == stated, title
        if title != "Inputs":
            models = [a + b for a, b in zip(models, stated, strict=True)]
    assert models == total
    inputs = counts["Inputs"]
    answer = (
        f"{total[0]} of {total[-1]} models work with `wb.profile`, and {total[1]} are rejected with a sentence. Of "
        f"{inputs[-1]} kinds of inputs {inputs[0]} work, and {inputs[1]} are rejected."
    )
    assert answer in first


def test_the_counts_of_checkpoints_are_those_of_the_table():
    text = page(CHECKPOINTS)
    rows = chapters(text)["Trials"]
    opened = sum(resident == "works" for _, resident, _, _ in rows)
    rejected = sum((resident, streamed) == ("rejected as expected",) * 2 for _, resident, streamed, _ in rows)
    not_run = sum(resident == "not run" for _, resident, _, _ in rows)
    failed = len(rows) - opened - rejected - not_run
    first = " ".join(text.split("\n## ")[0].split())
    assert f"Of {len(rows)} trials {opened} open" in first
    assert f"{rejected} are rejected with one sentence" in first
    assert f"{not_run} were not run and {failed} failed" in first
