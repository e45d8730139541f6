"""Practice cases of wiring: a training with a hidden line that is wrong, or none, and a budget of contracts to test."""

from __future__ import annotations

import math
import random
from functools import cache, cached_property

from torch import nn

from workbench.contracts.lab import CONTRACTS
from workbench.contracts.results import CheckReport, Result
from workbench.course.miswirings import KINDS, MISWIRED, miswired
from workbench.course.scoring import BUDGET_POINTS, CAUSE_POINTS, CURE_POINTS, Score
from workbench.course.trainings import steps_of
from workbench.errors import OptionError, require_listed
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt

#: Number of contracts that may be tested, and updates of the curve.
_BUDGET, _N_UPDATES = 6, 60
#: Kinds of the sound trainings among the cases.
_SOUND = ("decoder", "encoder", "images", "experts", "float16", "micro-batches")


@cache
def cases() -> list[tuple[str, str]]:
    """Return fault and kind of all cases, in an order that tells nothing."""
    names = {kind: name for name, kind in KINDS.items()}
    found = [(fault.name, names[kind]) for fault in MISWIRED.values() for kind in fault.kinds]
    found += [("", kind) for kind in _SOUND]
    random.Random(0).shuffle(found)
    return found


def wiring_case(seed: NonNegativeInt) -> WiringCase:
    """Return a practice case of wiring: a small training of which one line may be wrong.

    Args:
        seed: Any whole number from 0 on; the same seed is always the same case, and the first sixty are all different.

    Raises:
        OptionError: If the seed is negative.

    Example:
        >>> import workbench as wb
        >>> case = wb.course.wiring_case(0)
        >>> case.test("gradients_cleared").id, case.spent
        ('gradients_cleared', 1)

    See Also:
        `workbench.course.patient`: Practice cases of runs that failed while they were trained.
        `workbench.check`: Tests the contracts of a training of your own.
    """
    return WiringCase(seed)


class WiringCase:
    """A small training of which one line may be wrong; the test of a contract costs 1.

    Args:
        seed: As in `workbench.course.wiring_case`, which returns a case.

    Attributes:
        seed: As above.
        kind: What is trained, a kind of `workbench.course.miswired`.
        model: The model, to be looked at.
        steps: Steps of the training and of its model -> what each is for; the wrong line is one of them.
        contracts: Ids of the contracts that can be tested.
        budget: Number of contracts that may be tested.
        spent: How many were tested.
        score: The score; None until `finish`.

    Example:
        >>> import workbench as wb
        >>> case = wb.course.wiring_case(0)
        >>> case.score is None, case.steps["clear"]
        (True, 'Clear the gradients.')

    See Also:
        `workbench.course.wiring_case`: Returns a case.
    """

    @checked
    def __init__(self, seed: NonNegativeInt) -> None:
        self._fault, self.kind = cases()[seed % len(cases())]
        self.seed, self.budget, self.spent, self.contracts = seed, _BUDGET, 0, tuple(CONTRACTS)
        self.steps = steps_of(KINDS[self.kind].network) | steps_of(KINDS[self.kind])
        self.model: nn.Module = miswired(fault=self._fault, kind=self.kind).model
        self.score: Score | None = None
        self._seen: dict[str, Result] = {}

    def __repr__(self) -> str:
        return f"WiringCase(seed={self.seed})"

    @cached_property
    def _report(self) -> CheckReport:
        return miswired(fault=self._fault, kind=self.kind).check()

    def curve(self) -> list[float]:
        """Train from the beginning, and return the losses; free of charge."""
        return miswired(fault=self._fault, kind=self.kind).train(_N_UPDATES)

    def test(self, id: str) -> Result:
        """Test one contract; the budget is charged once.

        Args:
            id: One of `contracts`.

        Returns:
            The result, without its place and without what mends it.

        Raises:
            OptionError: If there is no such contract, nothing is left of the budget, or the case is finished.
        """
        require_listed("id", [id], CONTRACTS)
        if id not in self._seen:
            self._check_open()
            if self.spent >= self.budget:
                raise OptionError(f"All {self.budget} tests are spent; name the contract with finish().")
            found, self.spent = self._report[id], self.spent + 1
            self._seen[id] = Result(id, found.status, found.evidence, picture=found.picture)
        return self._seen[id]

    def finish(self, id: str, where: str = "") -> Score:
        """Name the broken contract and the step whose line is wrong, and end the case.

        Args:
            id: One of `contracts`, or "nothing" for a sound training.
            where: One of `steps`; empty for a sound training.

        Returns:
            The score, with the sound line, the wrong one, and the results of the contract with both.

        Raises:
            OptionError: If a name is unknown, or the case is finished.
        """
        import pandas as pd

        require_listed("id", [id], (*CONTRACTS, "nothing"))
        require_listed("where", [where], (*self.steps, ""))
        self._check_open()
        right: tuple[str, ...] = ("nothing",)
        place, rows = "", [("injected", "nothing", "No line is wrong.", math.nan)]
        if fault := MISWIRED.get(self._fault):
            right, place, (sound, wrong) = (fault.contract, *fault.follows), fault.where, fault.lines
            words = {
                "injected": f"{fault.name}: the line of `{place}` is `{wrong}` instead of `{sound}`.",
                "for": self._report[fault.contract].evidence,
                "mended": f"With the sound line: {miswired(kind=self.kind).check()[fault.contract].evidence}",
            }
            rows = [(kind, fault.contract, each, math.nan) for kind, each in words.items()]
        is_right, is_there, unspent = id in right, where == place, 1 - self.spent / self.budget
        reasons = {
            "contract": f"'{id}' is right." if is_right else f"'{right[0]}' is right, not '{id}'.",
            "place": "The place is right."
            if is_there
            else f"The place is '{place}'."
            if place
            else "No line is wrong.",
            "budget": f"{self.spent} of {self.budget} tests are spent.",
        }
        points = (CAUSE_POINTS * is_right, CURE_POINTS * is_there, BUDGET_POINTS * unspent * is_right)
        table = zip(reasons, points, (CAUSE_POINTS, CURE_POINTS, BUDGET_POINTS), reasons.values(), strict=True)
        parts = pd.DataFrame(table, columns=["part", "points", "of", "reason"]).round(1).set_index("part")
        sentence = f"{reasons['contract']} {reasons['place']} {rows[0][2]}"
        evidence = pd.DataFrame(rows, columns=["kind", "cause", "sentence", "weight"])
        self.score = Score(round(sum(points), 1), sentence, parts, right[:1], evidence, is_right, math.nan, is_there)
        return self.score

    def _check_open(self) -> None:
        if self.score is not None:
            raise OptionError("This case is finished; open another one with wb.course.wiring_case().")
