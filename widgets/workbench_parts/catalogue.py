"""All sources of the list by unique names: those that ship with the workbench, were opened, or are in the folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.widgets.workbench_parts.sources import FOLDER, Source, shipped

if TYPE_CHECKING:
    from pathlib import Path

    from workbench.widgets.workbench_parts.files import FoundSources


class SourceCatalogue:
    """The sources of the list.

    Attributes:
        sources: The sources by name.
        is_complete: Whether the last search of the folder was complete.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {source.name: source for source in shipped()}
        self.is_complete = True
        self._opened: list[Source] = []

    def update(self, found: FoundSources) -> None:
        """Replace the sources of the folder.

        After an incomplete search, earlier ones that still exist are kept, so that none disappears by chance.
        """
        sources = {source.name: source for source in (*self._opened, *shipped())}
        paths = {source.path for source in self._opened}
        in_folder = {source.path: source for source in found.sources if source.path not in paths}
        if not found.is_complete:
            before = {one.path: one for one in self.sources.values() if one.group == FOLDER and one.path not in paths}
            in_folder |= {path: one for path, one in before.items() if path not in in_folder and _exists(path)}
        for source in in_folder.values():
            name = source.name
            while name in sources:
                name = f"./{name}"
            sources[name] = replace(source, name=name)
        self.sources, self.is_complete = sources, found.is_complete

    def add(self, source: Source) -> str:
        """Add a source unless it is there, and return its name."""
        for name, other in self.sources.items():
            if source.value == other.value or (source.path is not None and source.path == other.path):
                return name
        name = source.name
        while name in self.sources:
            name = f"{name}, opened"
        source = replace(source, name=name)
        self._opened.append(source)
        self.sources = {name: source, **self.sources}
        return name


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()
