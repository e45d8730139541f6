"""Lines of a script that is observed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from workbench.models.probing import is_library


def frames_of_script(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the running functions that belong neither to Python nor to an installed package, from the inside out."""
    frame = frame or sys._getframe()
    while frame is not None:
        if not is_library(frame.f_globals.get("__name__", "")):
            yield frame
        frame = frame.f_back


def line_of_script() -> str:
    """Return file and line of the innermost running function that belongs to no package; empty if there is none."""
    frame = next(frames_of_script(), None)
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    name = "cell" if "ipykernel_" in file else file.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{frame.f_lineno}"
