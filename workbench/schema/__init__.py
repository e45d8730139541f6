"""The shape of the data: every dimension, coordinate, variable, unit and status."""

from workbench.schema.runs import (
    ACTIVATIONS,
    ATTENTION,
    CONCAT_DIMS,
    CURVATURE,
    EVENT_PLACES,
    EVENTS,
    MONITORS,
    OPTIMIZER,
    PARTS,
    ROUTER,
    SCHEMA_VERSION,
    SPECTRA,
    SPECTRA_ATTRS,
    SPECTRA_COUNTS,
    Variable,
    check_version,
    validate_events,
    validate_monitors,
    validate_part,
    validate_spectra,
)

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "CONCAT_DIMS",
    "CURVATURE",
    "EVENTS",
    "EVENT_PLACES",
    "MONITORS",
    "OPTIMIZER",
    "PARTS",
    "ROUTER",
    "SCHEMA_VERSION",
    "SPECTRA",
    "SPECTRA_ATTRS",
    "SPECTRA_COUNTS",
    "Variable",
    "check_version",
    "validate_events",
    "validate_monitors",
    "validate_part",
    "validate_spectra",
]


def __dir__() -> list[str]:
    return sorted(__all__)
