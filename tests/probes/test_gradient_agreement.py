import numpy as np
import pytest

from workbench.errors import OptionError
from workbench.probes.gradient_agreement import GradientAgreement, ProjectedGradients
from workbench.probes.gradient_agreement import GradientVerdict as Verdict


def agreement(*states, **known):
    verdict = max(states, key=lambda state: state.severity)
    residual = np.zeros(len(states))
    return GradientAgreement(verdict, states, **{"scale": 1.0, "residual": residual, "tolerance": residual} | known)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            agreement(Verdict.AS_COMPUTED, Verdict.NOT_MEASURED, weights=np.ones(1)),
            "The optimizer gets the gradients that were computed, in 1 of 2 parameters; besides, 1 whose rounding "
            "explains any difference.",
        ),
        (
            agreement(Verdict.RANK_MISSING, Verdict.STALE, weights=np.ones(3), missing_ranks=(1, 2), receivers=(0, 2)),
            "Gradients of ranks 1 and 2 are missing, in 1 of 2 parameters on ranks 0 and 2; besides, stale in 1.",
        ),
        (
            agreement(Verdict.STALE, Verdict.AS_COMPUTED, weights=np.ones(1), delay=1),
            "The optimizer gets gradients of 1 step before, in 1 of 2 parameters.",
        ),
        (
            agreement(Verdict.LOW_PRECISION, weights=np.ones(1), n_bits=7.6),
            "Gradients are rounded to about 8 significant bits on their way to the optimizer, in 1 of 1 parameter.",
        ),
        (
            agreement(Verdict.SCALED, Verdict.SCALED, weights=np.ones(1)),
            "Gradients are scaled by factors of their own, as clipping one by one does, in 2 of 2 parameters.",
        ),
        (
            agreement(Verdict.NOT_MEASURED, weights=np.ones(1), reason="no parameter has a gradient"),
            "Whether the optimizer gets the computed gradients was not measured: no parameter has a gradient.",
        ),
    ],
)
def test_sentences(found, sentence):
    assert found.sentence == sentence


def test_severity_orders_verdicts_and_a_scale_is_no_fault():
    assert max(Verdict, key=lambda one: one.severity) == Verdict.PASS_MISSING
    assert min(Verdict, key=lambda one: one.severity) == Verdict.NOT_MEASURED
    assert [one for one in Verdict if not one.is_fault] == [Verdict.AS_COMPUTED, Verdict.SCALED, Verdict.NOT_MEASURED]


def projections(**change):
    shape = (2, 3, 8)
    arrays = dict.fromkeys(("computed", "accumulated", "received"), np.zeros(shape))
    given = arrays | {"size": np.zeros((2, 3)), "n_elements": np.ones(3), "formats": ("float32",) * 3}
    return ProjectedGradients(**given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"computed": np.zeros((3, 8))}, r"computed has shape \(3, 8\), expected \(rank, parameter, projection\)"),
        ({"received": np.zeros((1, 3, 8))}, r"received has shape \(1, 3, 8\), but that of computed, \(2, 3, 8\)"),
        ({"size": np.zeros(3)}, r"size has shape \(3,\)"),
        ({"formats": ("float32",)}, "formats has 1 entries, expected one for each of 3 parameters"),
        ({"formats": ("float32", "int8", "float32")}, "formats has 'int8', expected floating-point formats"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    assert projections().n_ranks == 2
    with pytest.raises(OptionError, match=message):
        projections(**change)
