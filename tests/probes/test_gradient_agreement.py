import numpy as np
import pytest

from tests.about import about
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
            "The optimizer receives the gradients as computed, in 1 of 2 parameters; rounding explains any difference "
            "in 1.",
        ),
        (
            agreement(Verdict.RANK_MISSING, Verdict.STALE, weights=np.ones(3), missing_ranks=(1, 2), receivers=(0, 2)),
            "Gradients of ranks 1 and 2 are missing, in 1 of 2 parameters on ranks 0 and 2; stale in 1.",
        ),
        (
            agreement(Verdict.STALE, Verdict.AS_COMPUTED, weights=np.ones(1), delay=1),
            "The optimizer receives gradients of 1 step before, in 1 of 2 parameters.",
        ),
        (
            agreement(Verdict.LOW_PRECISION, weights=np.ones(1), n_bits=7.6),
            "Gradients are rounded to about 8 significant bits on their way to the optimizer, in 1 of 1 parameter.",
        ),
        (
            agreement(Verdict.SCALED, Verdict.SCALED, weights=np.ones(1)),
            "Gradients are scaled by individual factors, as by clipping each parameter, in 2 of 2 parameters.",
        ),
        (
            agreement(Verdict.NOT_MEASURED, weights=np.ones(1), reason="no parameter has a gradient"),
            "The gradients that the optimizer receives were not checked: no parameter has a gradient.",
        ),
    ],
)
def test_sentences(found, sentence):
    assert found.sentence == sentence


def test_verdicts_are_ordered_by_severity_and_a_scale_is_not_a_fault():
    assert max(Verdict, key=lambda one: one.severity) == Verdict.NOT_CLEARED
    assert [Verdict.PASS_MISSING.severity, Verdict.DISCARDED.severity] == [8, 9]  # stores contain these numbers
    assert min(Verdict, key=lambda one: one.severity) == Verdict.NOT_MEASURED
    assert [one for one in Verdict if not one.is_fault] == [Verdict.AS_COMPUTED, Verdict.SCALED, Verdict.NOT_MEASURED]


def projections(**change):
    shape = (2, 3, 8)
    arrays = dict.fromkeys(("computed", "accumulated", "received"), np.zeros(shape))
    given = arrays | {"size": np.zeros((2, 3)), "n_elements": np.ones(3), "formats": ("float32",) * 3}
    return ProjectedGradients(**given | change)


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"computed": np.zeros((3, 8))}, "computed", (3, 8)),
        ({"received": np.zeros((1, 3, 8))}, "received", (1, 3, 8)),
        ({"size": np.zeros(3)}, "size", (3,)),
        ({"passes": np.zeros((2, 1, 8))}, "passes", (2, 1, 8)),
        ({"formats": ("float32",)}, "formats", ("float32",)),
        ({"formats": ("float32", "int8", "float32")}, "formats", "int8"),
    ],
)
def test_arrays_that_do_not_match_are_rejected(change, name, value):
    assert projections().n_ranks == 2
    with pytest.raises(OptionError, check=about(name, value)):
        projections(**change)
