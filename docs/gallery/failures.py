"""Causes of a failure, and criteria of a design."""

import numpy as np

import workbench as wb


def cause_bars():
    """The causes of a failed run in the order of their evidence.

    The run was trained with a fault of its arithmetic. Causes that the diagnosis does not exclude are colored.
    """
    tree = wb.diagnose(wb.samples.failed_run("precision"))
    return wb.plots.cause_bars(tree["causes"].to_dataset())


def evidence_bars():
    """The evidence of each symptom for a cause (right) or against it (left).

    The first two causes of a failed run.
    """
    tree = wb.diagnose(wb.samples.failed_run("architecture"))
    evidence = tree["evidence"].to_dataset()
    first = tree["causes"]["cause"].values[:2]
    return wb.plots.evidence_bars(evidence.isel(evidence=np.isin(evidence["cause"], first)))


def evidence_timeline():
    """The step at which each symptom of a failed run was observed, the earliest at the top.

    The fifteen symptoms with the most weight. The size of a mark is the weight of the symptom.
    """
    tree = wb.diagnose(wb.samples.failed_run("hyperparameter"))
    evidence = tree["evidence"].to_dataset()
    strongest = abs(evidence["weight"]).argsort()[-15:]
    return wb.plots.evidence_timeline(evidence.isel(evidence=strongest))


def criteria_bands():
    """The criteria of an assessment against the bands of healthy designs.

    A recorded assessment of a published design.
    """
    tree = wb.samples.open("assessments")["gpt2"]
    return wb.plots.criteria_bands(tree["criteria"].to_dataset())
