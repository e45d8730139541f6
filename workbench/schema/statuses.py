"""The verdicts of an assessment and the exit statuses of the command line: one place for both, and nothing to load."""

from __future__ import annotations

#: Verdict -> exit status of ``workbench assess``, from the best verdict to the worst. "cannot say": nothing that was
#: measured failed, but what was measured does not say that the design will train.
EXIT_STATUS = {"proceed": 0, "cannot say": 4, "at risk": 1, "refuse": 2}
VERDICTS = tuple(EXIT_STATUS)
PROCEED, CANNOT_SAY, AT_RISK, REFUSE = VERDICTS
#: Exit statuses of every command that are no verdict: the input is wrong, the workbench itself failed, it was stopped.
BAD_INPUT, BROKEN, INTERRUPTED = 3, 5, 130
