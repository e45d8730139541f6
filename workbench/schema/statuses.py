"""Statuses of results, as enums whose values are the strings stored in files.

Members are strings, so values read from a file compare equal to them.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Verdict(StrEnum):
    """Verdicts, from best to worst; "cannot say": nothing failed, and nothing shows that the design will train."""

    PROCEED = "proceed"
    CANNOT_SAY = "cannot say"
    AT_RISK = "at risk"
    REFUSE = "refuse"

    @property
    def severity(self) -> int:
        """Rank from 0, the best verdict."""
        return list(Verdict).index(self)

    @property
    def exit_status(self) -> int:
        """Exit status of ``workbench assess``; `ExitStatus` lists the others."""
        return {Verdict.PROCEED: 0, Verdict.AT_RISK: 1, Verdict.REFUSE: 2, Verdict.CANNOT_SAY: 4}[self]


class ExitStatus(IntEnum):
    """Exit statuses of all commands, other than those of verdicts."""

    BAD_INPUT = 3
    #: An internal error of the workbench.
    BROKEN = 5
    #: Ctrl-C, by the convention of shells.
    INTERRUPTED = 130


class CriterionState(StrEnum):
    """State of a measurement relative to its limits, for criteria, failure modes and hazards; from best to worst."""

    HEALTHY = "healthy"
    AT_RISK = "at risk"
    FAILING = "failing"
    #: Not part of the order.
    NOT_MEASURED = "not measured"

    @property
    def severity(self) -> int:
        """Severity: 0 healthy, 1 at risk, 2 failing, -1 not measured."""
        return -1 if self is CriterionState.NOT_MEASURED else list(CriterionState).index(self)


#: States that are evidence against a plan.
BAD_STATES = (CriterionState.AT_RISK, CriterionState.FAILING)
#: Order of rows in tables: the worst first, and "not measured" last.
WORST_FIRST = tuple(sorted(CriterionState, key=lambda state: -state.severity))


class DecisionKind(StrEnum):
    """Kinds of decisions of an assessment, in the order in which to act on them."""

    PROCEED = "proceed"
    MEASURE = "measure"
    CHANGE = "change"
    KSS = "kss"
    MONITOR = "monitor"
    STOP_RULE = "stop rule"


class RunState(StrEnum):
    """State of a recorded run, as read from its store."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    DIVERGED = "diverged"
    #: Ended by an error.
    INTERRUPTED = "interrupted"
    #: No process writes it, although none has closed it.
    UNCLOSED = "ended without being closed"


class FailureKind(StrEnum):
    """Way in which a run failed, as shown by its loss."""

    DIVERGED = "diverged"
    #: The loss rose above its previous level, with or without a return to it.
    SPIKE = "spike"
    #: Neither of the two: if the run failed, it learned too little.
    STALLED = "stalled"


class CauseKind(StrEnum):
    """Kinds of causes of a failure, the most common first."""

    HYPERPARAMETER = "hyperparameter"
    ARCHITECTURE = "architecture"
    PRECISION = "precision"
    ROUTING = "routing"
    DATA = "data"
    #: The training step does not do what it should.
    WIRING = "wiring"
    #: Another fault than the known ones.
    UNKNOWN = "unknown"
    #: No fault was found.
    NONE = "none"


class DiagnosisState(StrEnum):
    """What a diagnosis states."""

    #: A fact about the run was found.
    FOUND = "found"
    #: The symptoms indicate causes.
    LIKELY = "likely"
    #: The loss diverged, or rose and did not recover, but no cause stands out.
    NO_CAUSE = "no cause found"
    #: No lasting failure is visible, and no cause stands out.
    NOTHING_FOUND = "nothing found"


class SymptomKind(StrEnum):
    """Source of a symptom."""

    #: Measurements of the run: loss, gradients, spectra, attention.
    MECHANISM = "mechanism"
    #: Learning rate and batch size, as recorded at every step.
    LOG = "log"
    CONFIGURATION = "configuration"
    #: Numbers that are decided by absolute limits, and alarms.
    FACT = "fact"
