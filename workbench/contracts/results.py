"""Results of a check: one for each contract, as a table, as HTML and as JSON."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any

from workbench.io.atomic import check_free, replacing, write_json


class Status(StrEnum):
    """Outcome of one contract."""

    PASSED = "passed"
    FAILED = "failed"
    ACCEPTED = "accepted"
    NOT_APPLICABLE = "not applicable"
    NOT_TESTED = "could not be tested"


@dataclass(frozen=True)
class Result:
    """Outcome of the experiment on one contract.

    Attributes:
        id: Name of the contract.
        status: Whether it holds.
        evidence: What was measured, in numbers; the reason if it is not applicable or could not be tested.
        where: Module, parameter, rank or line of the script that breaks it; empty if it holds.
        remedy: Change that mends it; empty if it holds.
        proof: What the experiment shows with that change, measured on a copy; empty if it was not made.
        picture: How much each input (row) moves each output (column), over the largest; empty without a picture.
        seconds: Duration of the experiment.
    """

    id: str
    status: Status
    evidence: str
    where: str = ""
    remedy: str = ""
    proof: str = ""
    picture: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """What is wrong, where, and what mends it, in one line."""
        details = {"Where": self.where, "To mend it": self.remedy}
        return " ".join([self.evidence, *(f"{name}: {value.rstrip('.')}." for name, value in details.items() if value)])

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {**vars(self), "status": str(self.status), "seconds": round(self.seconds, 4)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Result:
        """Return the result that `as_json` has described."""
        picture = tuple(tuple(row) for row in values.get("picture", ()))
        return cls(**{**values, "status": Status(values["status"]), "picture": picture})


_MARKS = {
    Status.FAILED: ("✗", "#c62828"),
    Status.PASSED: ("✓", "#2e7d32"),
    Status.ACCEPTED: ("○", "#8d6e00"),
    Status.NOT_TESTED: ("?", "#8d6e00"),
    Status.NOT_APPLICABLE: ("–", "#757575"),
}


#: Keys of a report as JSON.
KEYS = ("verdict", "seconds", "n_updates", "losses", "checks")


@dataclass(frozen=True)
class CheckReport:
    """Results of all contracts of one training, printed as a table; those that are not applicable share one line.

    Attributes:
        checks: Results, those that failed first.
        n_updates: Number of updates that were observed.
        losses: Loss of each backward pass that was observed.
        seconds: Duration of all experiments.
    """

    checks: Sequence[Result]
    n_updates: int
    seconds: float
    losses: Sequence[float] = ()

    def __post_init__(self) -> None:
        order = [*_MARKS]
        object.__setattr__(self, "losses", tuple(self.losses))
        object.__setattr__(self, "checks", tuple(sorted(self.checks, key=lambda each: order.index(each.status))))

    def __getitem__(self, id: str) -> Result:
        """Return the result of one contract."""
        return next(each for each in self.checks if each.id == id)

    @property
    def failed(self) -> list[Result]:
        """Results of the contracts that are broken."""
        return [each for each in self.checks if each.status is Status.FAILED]

    @property
    def verdict(self) -> str:
        """``"failed"``, ``"passed"``, or ``"could not be tested"`` if nothing was found but something is unknown."""
        found = {each.status for each in self.checks}
        return str(next((s for s in (Status.FAILED, Status.NOT_TESTED) if s in found), Status.PASSED))

    @property
    def summary(self) -> str:
        """How many contracts hold, are broken, or are unknown, in one sentence."""
        counts = {status: sum(each.status is status for each in self.checks) for status in _MARKS}
        said = [f"{n} {status}" for status, n in counts.items() if n]
        return f"{len(self.checks)} contracts after {self.n_updates} updates: {', '.join(said)}."

    def as_json(self) -> dict[str, Any]:
        """Return verdict and results as JSON values."""
        checks = [each.as_json() for each in self.checks]
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "n_updates": self.n_updates,
            "losses": [each if math.isfinite(each) else None for each in self.losses],
            "checks": checks,
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> CheckReport:
        """Return the report that `as_json` has described."""
        losses = [math.nan if each is None else each for each in values["losses"]]
        return cls([Result.of_json(each) for each in values["checks"]], values["n_updates"], values["seconds"], losses)

    def __str__(self) -> str:
        lines = [self.summary]
        without = [each.id for each in self.checks if each.status is Status.NOT_APPLICABLE]
        shown = [each for each in self.checks if each.status is not Status.NOT_APPLICABLE]
        width = max((len(each.id) for each in shown), default=0)
        for each in shown:
            lines.append(f"{_MARKS[each.status][0]} {each.id:<{width}}  {each.status:<20}  {each.evidence}")
            details = {"where": each.where, "to mend it": each.remedy, "proof": each.proof}
            lines += [f"  {'':<{width}}  {name:<20}  {value}" for name, value in details.items() if value]
        if without:
            lines.append(f"{_MARKS[Status.NOT_APPLICABLE][0]} not applicable: {', '.join(without)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows: list[str] = []
        without: list[str] = []
        for each in self.checks:
            mark, color = _MARKS[each.status]
            parts = [escape(each.evidence)]
            details = {"Where": each.where, "To mend it": each.remedy, "Proof": each.proof}
            parts += [f"<b>{name}:</b> {escape(value)}" for name, value in details.items() if value]
            parts += [_svg(each.picture)] if each.picture else []
            cell = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
            (without if each.status is Status.NOT_APPLICABLE else rows).append(
                f'<tr><td style="{cell};color:{color};white-space:nowrap">{mark} {escape(each.status)}</td>'
                f'<td style="{cell};white-space:nowrap"><code>{escape(each.id)}</code></td>'
                f'<td style="{cell};max-width:640px;white-space:normal">{"<br>".join(parts)}</td></tr>'
            )
        folded = f"<details><summary>not applicable: {len(without)}</summary>{_table(without)}</details>"
        head = f'<p style="margin:4px 0"><b>{escape(self.summary)}</b></p>'
        return (
            '<div style="font-family:sans-serif;font-size:13px;line-height:1.45">'
            f"{head}{_table(rows)}{folded if without else ''}</div>"
        )

    def show(self) -> None:
        """Display the report in a notebook, or print it."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if getattr(shell, "kernel", None) is None:
            print(self)
            return
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()))

    def write(self, path: str | os.PathLike[str], *, html: bool = False, overwrite: bool = False) -> Path:
        """Write the report as JSON, or as a page of HTML.

        Raises:
            StoreError: If the file exists and is not to be replaced, or cannot be written.
        """
        if not html:
            return write_json(self.as_json(), Path(path), overwrite=overwrite)
        check_free(path, overwrite=overwrite)
        head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Contracts, Stability Workbench</title>'
        page = f"{head}{self._repr_html_()}</html>"
        with replacing(Path(path)) as new:
            new.write_text(page, encoding="utf-8")
        return Path(path)


def _table(rows: Sequence[str]) -> str:
    return f'<table style="border-collapse:collapse">{"".join(rows)}</table>'


def _svg(picture: tuple[tuple[float, ...], ...]) -> str:
    """Return a picture of which input moves which output: dark cells move much, in a logarithmic scale."""
    size, n = 11, len(picture)
    cells = []
    for i, row in enumerate(picture):
        for j, value in enumerate(row):
            if value > 0:
                shade = 1 + max(-6.0, math.log10(value)) / 6
                color = "#c62828" if j < i else "#1565c0"
                place = f'x="{36 + size * j}" y="{16 + size * i}" width="{size - 1}" height="{size - 1}"'
                cells.append(f'<rect {place} fill="{color}" fill-opacity="{0.15 + 0.85 * shade:.2f}"/>')
    width, height = 36 + size * n, 16 + size * n
    words = (
        f'<text x="{36}" y="11" font-size="10">output position →</text>'
        f'<text x="10" y="{height - 4}" font-size="10" transform="rotate(-90 10 {height - 4})">token changed →</text>'
    )
    label = "which token moves which output; red: an output before the token"
    return (
        f'<svg width="{max(width, 130)}" height="{height}" role="img" aria-label="{label}"><title>{label}</title>'
        f'<g fill="currentColor">{words}</g>{"".join(cells)}</svg>'
    )
