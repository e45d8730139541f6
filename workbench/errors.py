"""The exceptions a user may meet. Each message is one sentence: what was wrong, what was expected, what to do."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = [
    "AnatomyError",
    "CheckpointError",
    "MissingPackageError",
    "OptionError",
    "SchemaError",
    "SnapshotError",
    "StoreError",
    "SweepError",
    "WorkbenchError",
]


class WorkbenchError(Exception):
    """Base of every error that the workbench raises on purpose."""


class CheckpointError(WorkbenchError):
    """A checkpoint cannot be opened."""


class AnatomyError(WorkbenchError):
    """The residual stream of a model cannot be read with certainty."""


class SnapshotError(WorkbenchError):
    """Snapshots cannot be analysed: too few, constant, or not finite."""


class OptionError(WorkbenchError, ValueError):
    """A setting or argument is impossible."""


class SchemaError(WorkbenchError):
    """A dataset does not follow the schema."""


class StoreError(WorkbenchError):
    """A run cannot be written to or read from disk."""


class SweepError(WorkbenchError):
    """A sweep cannot reach its cluster, or some of its runs failed."""


class MissingPackageError(WorkbenchError, ImportError):
    """Something was asked for that an optional package does."""


def require_lab(what: str, *packages: str) -> None:
    """Refuse what needs packages of the extra ``lab`` where they are not installed; nothing is imported.

    Args:
        what: That needs them, as the beginning of a sentence, in the plural, such as "Figures".
        packages: Names that are imported.

    Raises:
        MissingPackageError: That says which are missing, and how to install them.
    """
    missing = [name for name in packages if sys.modules.get(name) is None and find_spec(name) is None]
    if missing:
        named = ", ".join({"PIL": "pillow"}.get(name, name) for name in missing)
        raise MissingPackageError(
            f"{what} need packages that are not installed ({named}); install them with: "
            'pip install "stability-workbench[lab]"'
        )


def __dir__() -> list[str]:
    return sorted(__all__)
