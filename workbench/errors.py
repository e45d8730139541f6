"""The exceptions a user may meet. Each message is one sentence: what was wrong, what was expected, what to do."""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base of every error that the workbench raises on purpose."""


class CheckpointError(WorkbenchError):
    """A checkpoint cannot be opened."""


class AnatomyError(WorkbenchError):
    """The residual stream of a model cannot be read with certainty."""


class SnapshotError(WorkbenchError):
    """Snapshots cannot be analysed: too few, constant, or not finite."""


class ThresholdError(WorkbenchError, ValueError):
    """An option lies outside its range, or two thresholds contradict each other."""


class SchemaError(WorkbenchError):
    """A dataset does not follow the schema."""


class StoreError(WorkbenchError):
    """A run cannot be written to or read from disk."""


class SweepError(WorkbenchError):
    """A sweep cannot reach its cluster, or some of its runs failed."""


class MissingPackageError(WorkbenchError, ImportError):
    """Something was asked for that an optional package does."""
