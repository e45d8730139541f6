"""Every word that a result may have as its status: one enum a question, with the very strings that files hold.

A member is a ``str``, so what is read back from a file compares equal to it.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Verdict(StrEnum):
    """The verdict of an assessment, from best to worst.

    "cannot say": nothing that was measured failed, but what was measured does not say that the design will train.
    """

    PROCEED = "proceed"
    CANNOT_SAY = "cannot say"
    AT_RISK = "at risk"
    REFUSE = "refuse"

    @property
    def severity(self) -> int:
        """0 for the best, rising."""
        return list(Verdict).index(self)

    @property
    def exit_status(self) -> int:
        """The exit status of ``workbench assess``; see `ExitStatus` for those that are no verdict."""
        return {Verdict.PROCEED: 0, Verdict.AT_RISK: 1, Verdict.REFUSE: 2, Verdict.CANNOT_SAY: 4}[self]


class ExitStatus(IntEnum):
    """Exit statuses of every command that are no verdict."""

    BAD_INPUT = 3
    #: The workbench itself failed.
    BROKEN = 5
    #: Ctrl-C, as shells count it.
    INTERRUPTED = 130


class CriterionState(StrEnum):
    """The state of a number relative to its limits, for criteria, failure modes and hazards; from best to worst."""

    HEALTHY = "healthy"
    AT_RISK = "at risk"
    FAILING = "failing"
    #: Stands beside the others, and says nothing.
    NOT_MEASURED = "not measured"

    @property
    def severity(self) -> int:
        """0: healthy, 1: at risk, 2: failing; -1: not measured."""
        return -1 if self is CriterionState.NOT_MEASURED else list(CriterionState).index(self)


#: The states that speak against a plan.
BAD_STATES = (CriterionState.AT_RISK, CriterionState.FAILING)
#: The order of tables: the worst first, and what was not measured last.
WORST_FIRST = tuple(sorted(CriterionState, key=lambda state: -state.severity))


class DecisionKind(StrEnum):
    """The kinds of decisions of an assessment, in the order in which to act."""

    PROCEED = "proceed"
    MEASURE = "measure"
    CHANGE = "change"
    KSS = "kss"
    MONITOR = "monitor"
    STOP_RULE = "stop rule"


class RunState(StrEnum):
    """The state of a recorded run, from its store."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    DIVERGED = "diverged"
    #: An error ended it.
    INTERRUPTED = "interrupted"


class CoordinateState(StrEnum):
    """The result of a coordinate check: the behaviour of updates with growing width."""

    PASSES = "passes"
    GROWS = "grows"
    VANISHES = "vanishes"
    DIVERGED = "diverged"
    TOO_FEW_WIDTHS = "too few widths"


class FailureKind(StrEnum):
    """The way in which a run failed, from its loss."""

    DIVERGED = "diverged"
    #: The loss rose above where it had been, and stayed or came back.
    SPIKE = "spike"
    #: Neither: if the run failed, then by learning too little.
    STALLED = "stalled"


class CauseKind(StrEnum):
    """Kinds of causes, the most common first."""

    HYPERPARAMETER = "hyperparameter"
    ARCHITECTURE = "architecture"
    PRECISION = "precision"
    ROUTING = "routing"
    DATA = "data"
    #: Nothing is wrong.
    NONE = "none"


class SymptomKind(StrEnum):
    """The source of a symptom."""

    #: What the run did: loss, gradients, spectra, attention.
    MECHANISM = "mechanism"
    #: Learning rate and batch size, as every step records them.
    LOG = "log"
    CONFIGURATION = "configuration"
